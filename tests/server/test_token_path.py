"""The fast path of a token through the API process: frames, lines, writes past ASGI's `send`."""

from __future__ import annotations

import json
import pickle
import socket
import time

from fake_generator import FakeFactory
from hypothesis import given
from hypothesis import strategies as st
from running import StartServer, http

from offload.sampling.answers import ChosenLogprob, TokenLogprob
from specoffload.generation.generation import TextPiece
from specoffload.generation.statistics import GenerationStats
from specoffload.server.api.answers import MARK, TextLine, server_sent
from specoffload.server.engine.messages import Finished, JobOutput, Outputs
from specoffload.server.engine.process import Frames, packed

MESSAGES = st.lists(st.one_of(st.binary(max_size=50), st.text(max_size=50), st.integers()))


@given(MESSAGES, st.lists(st.integers(min_value=1, max_value=40), min_size=1))
def test_messages_arrive_whole_however_their_bytes_are_cut(
    messages: list[object], sizes: list[int]
) -> None:
    data = b"".join(map(packed, messages))
    frames, found, at, turn = Frames(), [], 0, 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        found += frames.feed(data[at : at + size])
        at, turn = at + size, turn + 1
    assert found == messages


TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@given(TEXTS, st.one_of(st.sampled_from([MARK, f'"{MARK}"', 'a "model"']), TEXTS))
def test_a_prepared_line_is_the_event_with_its_text(text: str, model: str) -> None:
    def chunk(text: str) -> dict[str, object]:
        return {"model": model, "choices": [{"index": 0, "text": text, "logprobs": None}]}

    assert TextLine(chunk(MARK)).sent(text) == server_sent(chunk(text))


LOGPROBS = (ChosenLogprob(TokenLogprob(1, b"a", -0.5), ()),)
PIECES = st.builds(
    TextPiece,
    st.text(max_size=5),
    st.tuples(st.integers()),
    finish_reason=st.sampled_from([None, None, "stop"]),
    stats=st.sampled_from([None, None, GenerationStats()]),
    so_far=st.sampled_from([None, None, GenerationStats()]),
    index=st.sampled_from([0, 0, 3]),
    stopping_word=st.sampled_from([None, None, "x"]),
    logprobs=st.sampled_from([(), (), LOGPROBS]),
    id_slot=st.sampled_from([-1, 0, 3]),
    prompt_logprobs=st.sampled_from([(), (), LOGPROBS]),
    n_prompt_read=st.sampled_from([None, None, 512]),
)


@given(st.lists(st.builds(JobOutput, st.integers(), PIECES | st.just(Finished()))))
def test_what_a_step_made_arrives_as_it_was(outputs: list[JobOutput]) -> None:
    sent = Outputs(tuple(outputs), 1.5)
    assert pickle.loads(pickle.dumps(sent)) == sent
    assert [type(output) for output in pickle.loads(pickle.dumps(sent)).outputs] == [
        JobOutput for _ in outputs
    ]


def stream(url: str, prompt: str) -> str:
    body = {"prompt": prompt, "stream": True}
    return http.post(url + "/v1/completions", json=body).text


def test_the_way_of_each_token_to_its_socket_is_timed(start_server: StartServer) -> None:
    server = start_server(FakeFactory(), has_metrics=True)
    server.wait_until_healthy()
    began_s = time.perf_counter()
    text = text_of(stream(server.url, "x" * 100))
    took_s = time.perf_counter() - began_s
    metrics = http.get(server.url + "/metrics").text
    found = {
        line.split()[0]: float(line.split()[1])
        for line in metrics.splitlines()
        if line.startswith("specoffload:token_delay_seconds")
    }
    n = found["specoffload:token_delay_seconds_count"]
    # Writes are counted. The last write has only the stream's end.
    assert 100 <= n <= len(text) + 1
    assert found['specoffload:token_delay_seconds_bucket{le="+Inf"}'] == n
    assert 0 < found["specoffload:token_delay_seconds_sum"] <= n * took_s, (
        "a token's delay is in it"
    )


def ask(url: str, version: str) -> tuple[bytes, bytes]:
    """Ask for a stream. Returns the head and body as received from the socket."""
    body = json.dumps({"prompt": "hello there, " * 20, "stream": True}).encode()
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as client:
        head = f"POST /v1/completions HTTP/{version}\r\nHost: {host}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        parts = []
        while part := client.recv(65536):
            parts.append(part)
    answer_head, _, answer = b"".join(parts).partition(b"\r\n\r\n")
    return answer_head, answer


def text_of(stream: str) -> str:
    events = [line[6:] for line in stream.split("\n") if line.startswith("data: {")]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def test_both_versions_of_http_stream_the_text_that_is_given_whole(
    start_server: StartServer,
) -> None:
    server = start_server(FakeFactory())
    whole = http.post(server.url + "/v1/completions", json={"prompt": "hello there, " * 20}).json()
    head, old = ask(server.url, "1.0")
    assert b"chunked" not in head.lower()
    assert text_of(old.decode()) == whole["choices"][0]["text"]
    head, new = ask(server.url, "1.1")
    assert b"transfer-encoding: chunked" in head.lower()
    parts = []
    while new:
        size, _, rest = new.partition(b"\r\n")
        parts.append(rest[: int(size, 16)])
        new = rest[int(size, 16) + 2 :]
    assert parts[-1] == b""
    assert text_of(b"".join(parts).decode()) == whole["choices"][0]["text"]
