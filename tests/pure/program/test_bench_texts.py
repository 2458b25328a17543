"""`bench --texts` finds the first token in which a server's texts differ, and says its margin."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from resolved import line_of

from specoffload import cli, report
from specoffload.bench.texts import (
    AT_ONCE,
    IN_SEQUENCE,
    TALKS,
    Answer,
    Talk,
    Token,
    first_difference,
    play,
    play_all,
)
from specoffload.commands.bench_texts import bench_texts
from specoffload.config.options import BenchOptions
from specoffload.errors import UsageError

N_QUESTIONS = sum(len(talk.questions) for talk in TALKS)


def answer_of(text: str, margin: float | None = None) -> Answer:
    return tuple(Token(word, margin) for word in text.split())


@pytest.mark.parametrize(
    ("one", "two", "words"),
    [
        ("a b c", "a b c", None),
        ("a b c", "a x c", "differs at token 2: 'b', 'x', margin 0.5000"),
        ("a b", "a b c", "differs at token 3: '', 'c'"),
        ("a b", "a", "differs at token 2: 'b', '', margin 0.5000"),
    ],
)
def test_the_first_difference_has_its_place_and_margin(
    one: str, two: str, words: str | None
) -> None:
    found = first_difference([answer_of(one, 0.5)], [answer_of(two, 0.1)])
    assert (found and found.words) == words


def test_answers_after_a_difference_are_not_compared() -> None:
    found = first_difference(
        [answer_of("a"), answer_of("b"), answer_of("c")],
        [answer_of("a"), answer_of("x"), answer_of("y")],
    )
    assert found is not None
    assert (found.answer, found.words) == (1, "differs at token 1 of answer 2: 'b', 'x'")


def test_each_question_follows_the_answers_before_it() -> None:
    asked: list[tuple[str, ...]] = []

    def ask(messages: Any) -> Answer:
        asked.append(tuple(text for _, text in messages))
        return answer_of(f"answer{len(asked)}")

    assert len(play(Talk("t", ("q1", "q2")), ask)) == 2
    assert asked == [("q1",), ("q1", "answer1", "q2")]


@pytest.mark.parametrize(("run", "n_clients"), [(IN_SEQUENCE, 1), (AT_ONCE, 3)])
def test_a_run_has_one_client_or_one_for_each_conversation(run: str, n_clients: int) -> None:
    inside, most, lock = 0, 0, threading.Lock()
    all_in = threading.Barrier(n_clients)

    def ask(messages: Any) -> Answer:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        all_in.wait(timeout=30)  # passes only if this many clients ask at once
        with lock:
            inside -= 1
        return answer_of("a")

    talks = [Talk(str(i), ("q",)) for i in range(3)]
    assert len(play_all(talks, ask, run)) == 3
    assert most <= n_clients


class _Fake(BaseHTTPRequestHandler):
    """An OpenAI server whose chess answers change in the third run."""

    bodies: list[dict[str, Any]]
    refuses = ""  # a key that it does not know
    has_tokens = True

    def do_GET(self) -> None:  # noqa: N802 (the library's name)
        self._answer(200, {"data": [{"id": "a-model"}]})

    def do_POST(self) -> None:  # noqa: N802
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.refuses and self.refuses in body:
            self._answer(400, {"error": f"unknown key {self.refuses}"})
            return
        self.bodies.append(body)
        words = ["move", "the", "king"]
        is_last_run = len(self.bodies) > 2 * N_QUESTIONS
        if is_last_run and "chess" in body["messages"][0]["content"]:
            words[2] = "queen"
        tokens = [
            {"token": w, "logprob": -0.5, "top_logprobs": [
                {"token": w, "logprob": -0.5}, {"token": "other", "logprob": -0.75}]}
            for w in words
        ]  # fmt: skip
        choice: dict[str, Any] = {"message": {"content": "".join(words)}}
        if self.has_tokens:
            choice["logprobs"] = {"content": tokens}
        self._answer(200, {"choices": [choice]})

    def _answer(self, status: int, data: dict[str, Any]) -> None:
        text = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def serving(**settings: Any) -> Iterator[tuple[str, type[_Fake]]]:
    fake = type("Fake", (_Fake,), {"bodies": [], **settings})
    server = ThreadingHTTPServer(("127.0.0.1", 0), fake)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("refuses", ["", "cache_prompt"])
def test_a_servers_texts_are_compared_token_by_token(
    refuses: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report.only_data(True)
    try:
        with serving(refuses=refuses) as (url, fake):
            bench_texts(BenchOptions(texts=f"{url}/v1/", n_predict=9))
    finally:
        report.only_data(False)
    found = json.loads(capsys.readouterr().out)["texts"]
    assert [one["name"] for one in found] == [talk.name for talk in TALKS]
    for one in found:
        again, at_once = one["runs"]
        assert again == {"run": "seq", "match": True}
        if one["name"] == "chess":
            assert (at_once["token"], at_once["baseline"], at_once["other"]) == (2, "king", "queen")
            assert at_once["margin"] == pytest.approx(0.25)
        else:
            assert at_once == {"run": "par", "match": True}
    assert len(fake.bodies) == 3 * N_QUESTIONS
    assert all(b["temperature"] == 0 and b["max_tokens"] == 9 for b in fake.bodies)
    assert all(b.get("cache_prompt") is (None if refuses else False) for b in fake.bodies)


def test_a_server_without_tokens_is_compared_by_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serving(has_tokens=False) as (url, _):
        bench_texts(BenchOptions(texts=url))
    shown = " ".join(capsys.readouterr().out.split())
    assert "differs at token 8" in shown


def test_addresses_and_flags_that_cannot_be_are_one_sentence() -> None:
    for words, said in (
        (("--texts", "127.0.0.1:1"), "must begin with http"),
        (("--texts", "http://127.0.0.1:1"), "no answer of an OpenAI server"),
        (("--texts", "http://x", "--policies"), "--texts opens no model"),
    ):
        with pytest.raises(UsageError, match=said):
            cli.bench(line_of(*words, command="bench"))
