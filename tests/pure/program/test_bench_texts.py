"""`bench --texts` finds the first token in which a server's texts differ, and says its margin."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from resolved import line_of

from specoffload import cli, report
from specoffload.bench.repeated import ask_repeatedly, counted
from specoffload.bench.texts import (
    TALKS,
    AnswerTokens,
    BenchTalk,
    Token,
    first_difference,
    play,
    play_all,
    talks_of,
)
from specoffload.commands.bench_texts import bench_texts
from specoffload.config.options import BenchOptions, RunOrder
from specoffload.errors import UsageError

N_QUESTIONS = sum(len(talk.questions) for talk in TALKS)


def answer_of(text: str, margin: float | None = None) -> AnswerTokens:
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

    def ask(messages: Any) -> AnswerTokens:
        asked.append(tuple(text for _, text in messages))
        return answer_of(f"answer{len(asked)}")

    assert len(play(BenchTalk("t", ("q1", "q2")), ask)) == 2
    assert asked == [("q1",), ("q1", "answer1", "q2")]


@pytest.mark.parametrize(("run", "n_clients"), [(RunOrder.IN_SEQUENCE, 1), (RunOrder.AT_ONCE, 3)])
def test_a_run_has_one_client_or_one_for_each_conversation(run: RunOrder, n_clients: int) -> None:
    inside, most, lock = 0, 0, threading.Lock()
    all_in = threading.Barrier(n_clients)

    def ask(messages: Any) -> AnswerTokens:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        all_in.wait(timeout=30)  # passes only if this many clients ask at once
        with lock:
            inside -= 1
        return answer_of("a")

    talks = [BenchTalk(str(i), ("q",)) for i in range(3)]
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
def serving(of: type[_Fake] = _Fake, **settings: Any) -> Iterator[tuple[str, type[_Fake]]]:
    fake = type("Fake", (of,), {"bodies": [], **settings})
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


def test_ones_own_questions_are_held_in_the_runs_of_the_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text('"Who plays chess?"\n\n["first", "second\\nline"]\n', "utf-8")
    with serving() as (url, fake):
        words = ("--texts", url, "-f", str(file), "--runs", "par,seq,seq,par")
        cli.bench(line_of(*words, command="bench"))
    asked = [[m["content"] for m in body["messages"][::2]] for body in fake.bodies]
    held = [["Who plays chess?"], ["first"], ["first", "second\nline"]]
    assert len(asked) == 4 * len(held)
    for run in range(4):
        of_run = asked[run * len(held) : (run + 1) * len(held)]
        assert of_run == held if run in (1, 2) else sorted(of_run) == sorted(held)
    shown = " ".join(capsys.readouterr().out.split())
    assert "compared with a first run all at once" in shown
    for head in ("run 2, in", "run 3, in", "run 4, all"):
        assert head in shown
    assert talks_of((("a  b\nc",), ("d", "e"))) == (
        BenchTalk("1: a b c", ("a  b\nc",)), BenchTalk("2: d", ("d", "e")),
    )  # fmt: skip


def test_a_line_of_a_text_file_is_a_question(tmp_path: Path) -> None:
    file = tmp_path / "questions.txt"
    file.write_text('["not JSON here"]\n\nTell me more.\n', "utf-8")
    own = line_of("--texts", "http://x", "--file", str(file), command="bench").of(BenchOptions)
    assert own.conversations == (('["not JSON here"]',), ("Tell me more.",))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no question"),
        ("\n \n", "has no question"),
        ('"a"\n{"b": 1}', "line 2 must be a JSON string, or a list of strings"),
        ("hello", "line 1 must be a JSON string"),
        ("[]", "line 1 must be"),
        ('["a", 2]', "line 1 must have only questions that are texts"),
        ('["a", " "]', "none empty"),
        ("[" * 5000, "line 1 must be"),
    ],
)
def test_a_file_that_holds_no_questions_is_one_sentence(
    tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text(text, "utf-8")
    with pytest.raises(UsageError, match=said):
        line_of("--texts", "http://x", "-f", str(file), command="bench")


@pytest.mark.parametrize(
    ("runs", "said"),
    [("seq", "two runs or more"), ("seq,all", "'all' is unknown; there are seq, par"), ("", "''")],
)
def test_a_list_of_runs_that_compares_nothing_is_one_sentence(runs: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        line_of("--texts", "http://x", "--runs", runs, command="bench")


def test_questions_and_runs_without_texts_have_no_effect_and_it_is_said(tmp_path: Path) -> None:
    file = tmp_path / "q.txt"
    file.write_text("a", "utf-8")
    seen = []
    with patch.object(cli, "config_of", lambda line, options, **_: seen.append(options)), \
            patch("specoffload.commands.bench.bench_config"):  # fmt: skip
        cli.bench(line_of("-f", str(file), "--runs", "par,par", "m.gguf", command="bench"))
    (options,) = seen
    assert {"-f", "--runs"} <= {word for note in options.notes for word in note.split()}


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


class _Responses(_Fake):
    """A server that writes another text in every fifth response."""

    def do_POST(self) -> None:  # noqa: N802
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.refuses and self.refuses in body:
            self._answer(400, {"error": f"unknown key {self.refuses}"})
            return
        assert self.path == "/v1/responses"
        self.bodies.append(body)
        text = "the king moves" + " slowly" * (len(self.bodies) % 5 == 0)
        parts = [{"type": "output_text", "text": text}, {"type": "refusal", "refusal": "no"}]
        self._answer(200, {"output": [{"type": "message", "content": parts}]})


@pytest.mark.parametrize("refuses", ["", "cache_prompt"])
def test_equal_requests_are_counted_by_the_texts_of_their_answers(
    refuses: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report.only_data(True)
    try:
        with serving(of=_Responses, refuses=refuses) as (url, fake):
            words = ("--texts", url, "--responses", "20", "-n", "9", "--runs", "seq,seq")
            cli.bench(line_of(*words, command="bench"))
    finally:
        report.only_data(False)
    (found,) = json.loads(capsys.readouterr().out)["responses"]
    assert (found["run"], found["n"], found["n_equal"]) == ("seq", 20, 16)
    usual, other = found["texts"]
    assert usual == {"n": 16, "n_characters": 14, "differs_at": None, "end": "the king moves"}
    assert (other["n"], other["n_characters"], other["differs_at"]) == (4, 21, 14)
    assert len(fake.bodies) == 20
    assert {json.dumps(body) for body in fake.bodies} == {json.dumps(fake.bodies[0])}
    body = fake.bodies[0]
    assert (body["temperature"], body["max_output_tokens"]) == (0, 9)
    assert body["input"] == TALKS[0].questions[0] == found["question"]
    assert body.get("cache_prompt") is (None if refuses else False)


def test_both_ways_of_asking_and_each_question_have_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "q.jsonl").write_text('"one"\n["two", "not sent"]\n', "utf-8")
    with serving(of=_Responses) as (url, fake):
        cli.bench(line_of("--texts", url, "--responses", "4", "-f", str(file), command="bench"))
    assert [body["input"] for body in fake.bodies] == ["one"] * 8 + ["two"] * 8
    shown = " ".join(capsys.readouterr().out.split())
    assert "4 equal requests to /v1/responses" in shown
    assert "1: one, in sequence: 4 of 4 equal" in shown
    assert "1: one, all at once: 3 of 4 equal, 2 texts" in shown
    assert "14 characters" in shown


def test_requests_at_once_are_at_once() -> None:
    all_in = threading.Barrier(6)
    n_done = 0

    def ask(question: str) -> str:
        all_in.wait(timeout=30)
        return question

    def on_answer() -> None:
        nonlocal n_done
        n_done += 1

    found = ask_repeatedly("q", ask, 6, RunOrder.AT_ONCE, on_answer)
    assert (found.n, found.n_equal, n_done) == (6, 6, 6)


@pytest.mark.parametrize(
    ("answers", "texts"),
    [
        (["a"], [(1, "a", None)]),
        (["b", "a", "a"], [(2, "a", None), (1, "b", 0)]),
        (["ab", "a"], [(1, "ab", None), (1, "a", 1)]),
        (["", "x"], [(1, "", None), (1, "x", 0)]),
    ],
)
def test_texts_are_counted_and_the_most_frequent_is_first(
    answers: list[str], texts: list[tuple[int, str, int | None]]
) -> None:
    assert [(its.n, its.text, its.differs_at) for its in counted(answers)] == texts


def test_a_server_without_responses_is_one_sentence() -> None:
    class No(_Fake):
        def do_POST(self) -> None:  # noqa: N802
            self.rfile.read(int(self.headers["Content-Length"]))
            self._answer(404, {"error": "no such path"})

    with serving(of=No) as (url, _), pytest.raises(UsageError, match=r"it answered 404"):
        cli.bench(line_of("--texts", url, "--responses", "2", command="bench"))
