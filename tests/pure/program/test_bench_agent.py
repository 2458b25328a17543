"""`bench --agent` counts valid calls and solved tasks, and passes only equal numbers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest.mock import patch

import pytest
from resolved import line_of

from offload.errors import DeviceFailed
from specdec.options import DrafterName, PolicyName
from specoffload import cli, report
from specoffload.bench.agent import (
    MOST_ANSWERS,
    AgentReply,
    PlayedWay,
    TaskOutcome,
    WrittenCall,
    play,
    verdict,
)
from specoffload.bench.agent_tasks import TASKS, AgentTask
from specoffload.bench.agent_tools import AgentWorld
from specoffload.config.resolution import Config
from specoffload.errors import UsageError

Script = Sequence[Sequence[tuple[str, Mapping[str, Any]]]]  # answers, each of them calls
Messages = Sequence[Mapping[str, Any]]


def submit(answer: str) -> tuple[str, dict[str, Any]]:
    return "submit_answer", {"answer": answer}


def replace(path: str, old: str, new: str) -> tuple[str, dict[str, Any]]:
    return "replace_in_file", {"path": path, "old": old, "new": new}


def read(path: str) -> tuple[str, dict[str, Any]]:
    return "read_file", {"path": path}


def light(room: str, on: bool) -> tuple[str, dict[str, Any]]:
    return "set_light", {"room": room, "on": on}


def order(key: str, quantity: int) -> tuple[str, dict[str, Any]]:
    return "place_order", {"id": key, "quantity": quantity}


def sum_of(a: float, operator: str, b: float) -> tuple[str, dict[str, Any]]:
    return "calculate", {"a": a, "operator": operator, "b": b}


# What a model that solves a task may call.
SOLUTIONS: Mapping[str, Script] = {
    "eggs": [[read("notes.txt")], [submit("12")]],
    "port": [[read("config.ini")], [submit("8080.")]],
    "new port": [[replace("config.ini", "port = 8080", "port = 9090")], [submit("done")]],
    "wrong sum": [
        [("write_file", {"path": "calc.py", "content": "def add(a, b):  # mended\n  return a + b"})]
    ],
    "hello": [[("write_file", {"path": "hello.py", "content": 'print("hello")\n\n'})]],
    "push": [[("search_files", {"text": "def push"})], [submit("stack.py defines it")]],
    "backup": [
        [("write_file", {"path": "backup.txt", "content": "milk: 2 litres\neggs: 12\nrice: 500 g"})]
    ],
    "rename": [[replace("shapes.py", "area", "rectangle_area")], [submit("done")]],
    "old log": [[("delete_file", {"path": "old.log"}), submit("done")]],
    "count": [[("search_files", {"text": ""})], [submit("6")]],
    "one light": [[light("kitchen", True)]],
    "all lights": [[light("hall", False), light("bedroom", False)], [submit("done")]],
    "colder": [
        [("read_room", {"room": "bedroom"})], [("set_heating", {"room": "bedroom", "celsius": 16})]
    ],
    "product": [[sum_of(1234, "*", 5678)], [submit("7,006,652")]],
    "boxes": [[sum_of(24, "*", 1.25)], [sum_of(30, "*", 3)], [submit("90.00 €")]],
    "brackets": [
        [sum_of(17, "+", 5)], [sum_of(22, "*", 12)], [sum_of(264, "-", 4)], [submit("260")]
    ],
    "dentist": [
        [("read_day", {"day": "Tuesday"})],
        [("add_event", {"day": "Tuesday", "time": "10:00", "title": "dentist"})],
    ],
    "Ana": [[("read_day", {"day": "Thursday"})], [submit("Thursday, at 12:30")]],
    "pencils": [[("find_products", {"word": "Pencil"})], [order("p2", 3)]],
    "two orders": [[order("n1", 1), order("p1", 2)], [submit("done")]],
}  # fmt: skip


def written(calls: Sequence[tuple[str, Mapping[str, Any]]], number: int = 0) -> AgentReply:
    return AgentReply(
        "",
        tuple(
            WrittenCall(f"call-{number}-{i}", name, json.dumps(arguments))
            for i, (name, arguments) in enumerate(calls)
        ),
        n_drafted=4,
        n_accepted=3,
    )


def scripted(script: Script) -> tuple[Callable[[Messages, Messages], AgentReply], list[Messages]]:
    """A model that writes the calls of the script, then text. Also returns what it was sent."""
    seen: list[Messages] = []

    def ask(messages: Messages, tools: Messages) -> AgentReply:
        seen.append([dict(message) for message in messages])
        at = len(seen) - 1
        return written(script[at], at) if at < len(script) else AgentReply("That is all.")

    return ask, seen


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_task_is_solved_by_its_calls_and_by_nothing_less(task: AgentTask) -> None:
    script = SOLUTIONS[task.name]
    ask, seen = scripted(script)
    found = play(task, ask)
    assert found.is_solved
    assert found.n_valid == len(found.calls) == sum(map(len, script))
    assert (found.n_drafted, found.n_accepted) == (4 * len(script), 3 * len(script))
    for n_results, messages in enumerate(seen):  # each question has the results of all calls before
        n_calls = sum(map(len, script[:n_results]))
        assert sum(message["role"] == "tool" for message in messages) == n_calls
        assert not any("error" in str(m["content"]) for m in messages if m["role"] == "tool")
    for missing in range(len(script[-1])):
        less = [*script[:-1], [call for i, call in enumerate(script[-1]) if i != missing]]
        # Where a task asks for no answer, only the state of its world counts.
        is_needed = script[-1][missing] != submit("done")
        assert play(task, scripted(less)[0]).is_solved is not is_needed


def test_there_are_twenty_tasks_and_none_is_solved_at_its_begin() -> None:
    assert len({task.name for task in TASKS}) == len(TASKS) == 20
    assert not [task.name for task in TASKS if task.is_solved(AgentWorld())]
    wrong = [submit("about 13 eggs, thursday or stack")]
    solved = [task.name for task in TASKS if play(task, scripted([wrong])[0]).is_solved]
    assert solved == ["Ana"]


def test_code_that_is_right_elsewhere_or_changes_another_file_solves_nothing() -> None:
    task = next(task for task in TASKS if task.name == "wrong sum")
    mended = replace("calc.py", "a - b", "a + b")
    assert play(task, scripted([[mended]])[0]).is_solved
    for more in (("delete_file", {"path": "old.log"}), replace("calc.py", "a + b", "(")):
        assert not play(task, scripted([[mended, more]])[0]).is_solved


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("read_file", '{"path": 1}', "error: path: Input should be a valid string"),
        ("read_file", "{}", "error: path: Field required"),
        ("read_file", '{"path": "a", "mode": "r"}', "error: mode: Extra inputs are not permitted"),
        ("open", "{}", "error: there is no tool open"),
        ("place_order", '{"id": "p1", "quantity": 1}', "error: there is no tool place_order"),
        ("read_file", "[1]", None),
        ("read_file", '{"path": "a', None),
        ("read_file", "[" * 9999, None),
    ],
)
def test_a_wrong_call_is_no_valid_one(name: str, arguments: str, said: str | None) -> None:
    """It gets an error, which is told. After arguments that are no object the task ends."""
    seen: list[Messages] = []

    def ask(messages: Messages, tools: Messages) -> AgentReply:
        seen.append(list(messages))
        return (
            AgentReply("", (WrittenCall("x", name, arguments),)) if len(seen) == 1 else AgentReply()
        )

    found = play(TASKS[0], ask)
    assert (found.n_valid, found.calls) == (0, ((name, arguments),))
    assert len(seen) == (1 if said is None else 2)
    if said is not None:
        assert seen[1][-1] == {"role": "tool", "tool_call_id": "x", "content": said}


def test_a_task_ends_after_its_answers_and_no_call_follows_a_submission() -> None:
    ask, seen = scripted([[read("notes.txt")]] * 99)
    assert not play(TASKS[0], ask).is_solved
    assert len(seen) == MOST_ANSWERS
    ask, seen = scripted([[submit("12"), submit("13")]])
    assert play(TASKS[0], ask).is_solved
    assert len(seen) == 1


def way_of(name: str, *tasks: tuple[bool, int], n_drafted: int = 5) -> PlayedWay:
    """Tasks with (solved, valid calls of three)."""
    return PlayedWay(
        name,
        tuple(
            TaskOutcome(f"t{i}", (("a", "{}"),) * 3, n_valid, solved, n_drafted)
            for i, (solved, n_valid) in enumerate(tasks)
        ),
    )


PLAIN = way_of("no drafts", (True, 3), (True, 2), n_drafted=0)


@pytest.mark.parametrize(
    ("others", "failed", "passes", "said"),
    [
        ([way_of("x", (True, 3), (True, 2))], {}, True, ["pass: the other way has the numbers"]),
        (
            [way_of("x", (True, 3), (False, 2))], {}, False,
            ["no pass", "x: 1 tasks solved, and 2 with no drafts", "x: other numbers in t1"],
        ),
        (
            [way_of("x", (True, 3), (True, 2)), way_of("y", (True, 3), (True, 1))], {}, False,
            ["no pass", "y: 4 valid calls, and 5 with no drafts", "y: other numbers in t1"],
        ),
        # The numbers are equal, but other tasks have them: that passes and is said.
        ([way_of("x", (True, 2), (True, 3))], {}, True, ["pass", "x: other numbers in t0, t1"]),
        (
            [], {"x": "it ended"}, False,
            ["no pass: not all ways were played", "x was not played: it ended"],
        ),
        (
            [way_of("x", (True, 3), (True, 2), n_drafted=0)], {}, True,
            ["pass", "x drafted no token, so its numbers say nothing about drafts"],
        ),
        ([], {}, True, []),
    ],
)  # fmt: skip
def test_equal_numbers_pass(
    others: list[PlayedWay], failed: dict[str, str], passes: bool, said: list[str]
) -> None:
    found = verdict([PLAIN, *others], failed)
    assert found.passes is passes
    assert len(found.sentences) == len(said)
    for sentence, begin in zip(found.sentences, said, strict=True):
        assert sentence.startswith(begin)


@pytest.mark.parametrize(
    ("each", "said"),
    [((False, 0), "writes no valid call"), ((False, 3), "solves none of the tasks")],
)
def test_a_model_that_solves_nothing_proves_little(each: tuple[bool, int], said: str) -> None:
    found = verdict([way_of("no drafts", each), way_of("x", each)], {})
    assert found.passes
    assert found.sentences[-1] == (
        f"this model {said} even with no drafts, so equal numbers prove little"
    )


class _Agent(BaseHTTPRequestHandler):
    """An OpenAI server whose model solves the tasks, except those named in `fails`."""

    fails: frozenset[str] = frozenset()
    refuses = False
    bodies: list[dict[str, Any]]

    def do_GET(self) -> None:  # noqa: N802 (the library's name)
        self._answer(200, {"data": [{"id": "a-model"}]})

    def do_POST(self) -> None:  # noqa: N802
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        if self.refuses:
            self._answer(400, {"error": "no tools here"})
            return
        question = body["messages"][1]["content"]
        task = next(task for task in TASKS if task.question == question)
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        script = SOLUTIONS[task.name]
        message: dict[str, Any] = {"content": "I give up."}
        if turn < len(script) and task.name not in self.fails:
            message = {
                "content": None,
                "tool_calls": [
                    {"id": call.id, "type": "function",
                     "function": {"name": call.name, "arguments": call.arguments}}
                    for call in written(script[turn], turn).calls
                ],
            }  # fmt: skip
        timings = {"draft_n": 6, "draft_n_accepted": 2}
        self._answer(200, {"choices": [{"message": message}], "timings": timings})

    def _answer(self, status: int, data: dict[str, Any]) -> None:
        text = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def serving(**settings: Any) -> Iterator[tuple[str, type[_Agent]]]:
    fake = type("Fake", (_Agent,), {"bodies": [], **settings})
    server = ThreadingHTTPServer(("127.0.0.1", 0), fake)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def played(*words: str) -> int:
    """The exit code of `bench` with these words."""
    try:
        cli.bench(line_of(*words, command="bench"))
    except SystemExit as e:
        return int(e.code or 0)
    return 0


def test_given_servers_are_compared_with_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as (one, fake), serving() as (two, _):
        words = ("--agent-url", one, "--agent-url", f"{two}/v1", "--tool-choice", "required")
        assert played(*words, "-n", "77") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("20 of 20") == 3  # solved, solved and the same calls
    assert f"pass: the other way has the numbers of {one}" in shown
    assert all(body["tool_choice"] == "required" for body in fake.bodies)
    assert all(body["max_tokens"] == 77 for body in fake.bodies)
    assert all("cache_prompt" not in body for body in fake.bodies)  # an agent's prompts are cached


def test_a_worse_server_does_not_pass(capsys: pytest.CaptureFixture[str]) -> None:
    report.only_data(True)
    try:
        with serving() as (one, fake), serving(fails=frozenset({"port", "Ana"})) as (two, _):
            assert played("--agent", "--agent-url", one, "--agent-url", two) == 1
    finally:
        report.only_data(False)
    found = json.loads(capsys.readouterr().out)
    assert found["passes"] is False
    best, worse = found["agent"]
    assert (best["n_solved"], worse["n_solved"], worse["n_same"]) == (20, 18, 18)
    assert best["n_valid"] - worse["n_valid"] == 4
    assert best["n_drafted"] == 3 * best["n_accepted"] == 6 * len(fake.bodies)
    assert any("other numbers in port, Ana" in sentence for sentence in found["sentences"])
    assert all(body["tool_choice"] == "auto" for body in fake.bodies)


def test_each_drafter_and_all_together_are_played_by_a_server_of_their_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configs = []

    @contextmanager
    def started(config: Config) -> Iterator[str]:
        configs.append(config)
        if config.spec.options.drafters == (DrafterName.NGRAM_MOD,):
            raise DeviceFailed("the server ended with status 1 while loading: why")
        with serving() as (url, _):
            yield url

    words = ("--agent", "--spec-type", "draft,ngram-mod", "--spec-policy", "fixed")
    with patch("specoffload.commands.bench_agent.serving", started):
        assert played(*words) == 1  # because one of them was not played
    names = [", ".join(config.spec.options.drafters) for config in configs]
    assert names == ["none", "draft", "ngram-mod", "draft, ngram-mod"]
    assert [config.spec.draft is None for config in configs] == [True, False, True, False]
    assert all(config.spec.options.policy is PolicyName.FIXED for config in configs)
    shown = " ".join(capsys.readouterr().out.split())
    assert "ngram-mod was not played: the server ended with status 1 while loading: why" in shown
    assert "all together" in shown
    assert "no pass" in shown


def test_refusals_and_a_server_that_is_gone_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as (one, _), serving(refuses=True) as (two, _):
        gone = "http://127.0.0.1:1"
        assert played("--agent-url", one, "--agent-url", two, "--agent-url", gone) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{gone} was not played: --agent {gone}/v1: no answer of an OpenAI server" in shown
    assert "refused requests of 20 tasks" in shown
    assert "no tools here" in shown


def test_flags_that_cannot_be_are_one_sentence() -> None:
    for words, said in (
        (("--agent-url", "127.0.0.1:1"), "--agent 127.0.0.1:1: must begin with http"),
        (("--agent-url", "http://127.0.0.1:1"), "no answer of an OpenAI server"),
        (("--agent", "--policies"), "--agent plays tasks alone"),
        (("--agent", "--texts", "http://x"), "--agent plays tasks alone"),
        (("--agent", "-p", "1,2"), "--agent plays tasks alone"),
        (("--agent", "-n", "0"), "--agent plays tasks alone"),
        (("--agent", "--tool-choice", "none"), "must be one of auto, required"),
    ):
        with pytest.raises(UsageError, match=said):
            cli.bench(line_of(*words, command="bench"))


def test_a_choice_of_tools_without_tasks_has_no_effect_and_it_is_said() -> None:
    seen = []
    with patch.object(cli, "config_of", lambda line, options, **_: seen.append(options)), \
            patch("specoffload.commands.bench.bench_config"):  # fmt: skip
        cli.bench(line_of("--tool-choice", "required", "m.gguf", command="bench"))
    (options,) = seen
    assert any("--tool-choice" in note for note in options.notes)
