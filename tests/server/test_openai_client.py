"""OpenAI's own client works over a real socket."""

from __future__ import annotations

import json

from fake_generator import TAIL
from running import Running, http


def test_a_chat_completion_has_the_answer_and_its_counts(server: Running) -> None:
    with server.client() as client:
        answer = client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": "hello"}]
        )
    assert answer.object == "chat.completion"
    assert answer.model == "fake"
    assert answer.id.startswith("chatcmpl-")
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content == "user: hello\n" + TAIL
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("user: hello\n")
    assert answer.usage.completion_tokens == len("user: hello\n" + TAIL)
    total = answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.total_tokens == total
    timings = answer.model_extra["timings"]
    assert timings["prompt_ms"] == 250.0
    assert timings["draft_n"] == 2 * timings["draft_n_accepted"]


def test_streamed_chat_pieces_join_to_the_whole_answer(server: Running) -> None:
    with server.client() as client:
        stream = client.chat.completions.create(
            model="any",
            messages=[{"role": "user", "content": "hello"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(texts) == "user: hello\n" + TAIL
    assert len(texts) > 20
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == len("user: hello\n")
    assert len({c.id for c in chunks}) == 1


def test_max_tokens_ends_with_length_and_a_stop_sequence_is_never_shown(server: Running) -> None:
    with server.client() as client:
        short = client.completions.create(model="any", prompt="abcdef", max_tokens=4)
        by_new_name = client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": "x"}], max_completion_tokens=3
        )
        stopped = client.completions.create(model="any", prompt="abcdef", stop=["zz", "de"])
    assert (short.choices[0].text, short.choices[0].finish_reason) == ("abcd", "length")
    assert by_new_name.choices[0].message.content == "use"
    assert by_new_name.choices[0].finish_reason == "length"
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("abc", "stop")


def test_sampling_parameters_reach_the_generator(server: Running) -> None:
    with server.client() as client:
        answer = client.completions.create(
            model="any",
            prompt="[options]",
            temperature=0.5,
            top_p=0.25,
            seed=7,
            extra_body={"top_k": 3, "min_p": 0.125, "repeat_penalty": 1.5, "ignore_eos": True},
        )
        default = client.completions.create(model="any", prompt="[options]")
    text = answer.choices[0].text
    for part in ("temperature=0.5", "top_p=0.25", "seed=7", "top_k=3", "min_p=0.125"):
        assert part in text
    assert "repeat_penalty=1.5" in text
    assert "ignore_eos=True" in text
    assert "temperature=0.8" in default.choices[0].text


def test_models_are_listed_and_found_by_name(server: Running) -> None:
    with server.client() as client:
        assert [m.id for m in client.models.list()] == ["fake"]
        assert client.models.retrieve("fake").owned_by == "specoffload"


def test_the_event_stream_is_valid_when_read_a_byte_at_a_time(server: Running) -> None:
    """Multi-byte characters arrive whole although the socket splits them anywhere."""
    body = {"prompt": "x", "stream": True}
    with http.stream("POST", server.url + "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        raw = b"".join(response.iter_bytes(1))
    events = raw.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    assert all(event.startswith(b"data: ") and b"\n" not in event for event in events[:-1])
    texts = [json.loads(event[6:])["choices"][0]["text"] for event in events[:-2]]
    assert "".join(texts) == "x" + TAIL
