"""Plays tasks as an agent does, and compares what ways of decoding solve. Pure.

A source's agent solved all of its tasks without drafts and none with n-gram drafts, although each
single text looked right. So tasks are counted here, and not texts: an agent asks, runs the calls of
the answer, tells their results, and asks again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from specoffload.bench.agent_tasks import SYSTEM, AgentTask
from specoffload.bench.agent_tools import AgentTool, AgentWorld

MOST_ANSWERS = 8  # of a task. The longest one needs four.
PLAIN = "no drafts"


@dataclass(frozen=True)
class WrittenCall:
    """A call that a model wrote. `arguments` is meant to be JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class AgentReply:
    """An answer of a server, and how many tokens were drafted for it and accepted.

    `refusal` is not empty if the server refused the request.
    """

    text: str = ""
    calls: tuple[WrittenCall, ...] = ()
    n_drafted: int = 0
    n_accepted: int = 0
    refusal: str = ""


CallTools = Callable[
    [Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], AgentReply
]  # messages, tools


@dataclass(frozen=True)
class TaskOutcome:
    """The result of one task. `calls` are the names and arguments of all calls, in their order."""

    task: str
    calls: tuple[tuple[str, str], ...]
    n_valid: int
    is_solved: bool
    n_drafted: int = 0
    n_accepted: int = 0
    refusal: str = ""


@dataclass(frozen=True)
class PlayedWay:
    """The outcomes of all tasks in one way of decoding."""

    name: str
    outcomes: tuple[TaskOutcome, ...]

    @property
    def n_calls(self) -> int:
        return sum(len(outcome.calls) for outcome in self.outcomes)

    @property
    def n_valid(self) -> int:
        return sum(outcome.n_valid for outcome in self.outcomes)

    @property
    def n_solved(self) -> int:
        return sum(outcome.is_solved for outcome in self.outcomes)

    @property
    def n_drafted(self) -> int:
        return sum(outcome.n_drafted for outcome in self.outcomes)

    @property
    def n_accepted(self) -> int:
        return sum(outcome.n_accepted for outcome in self.outcomes)

    def n_same(self, baseline: PlayedWay) -> int:
        """Number of tasks with the same calls, in names and arguments, as in `baseline`."""
        return sum(
            one.calls == two.calls
            for one, two in zip(self.outcomes, baseline.outcomes, strict=True)
        )


@dataclass(frozen=True)
class AgentVerdict:
    """Whether all ways have the numbers of the first one, and sentences that say so."""

    passes: bool
    sentences: tuple[str, ...]


def play(task: AgentTask, ask: CallTools) -> TaskOutcome:
    """Play a task. It ends with an answer without calls, a submitted answer, or MOST_ANSWERS.

    A call with wrong arguments gets an error as its result, so that the model can mend it. One
    whose arguments are no JSON object ends the task, because servers refuse it in a history.
    """
    tools = {tool.name: tool for tool in task.tools}
    described = [tool.described() for tool in task.tools]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task.question},
    ]
    world, calls = AgentWorld(), list[tuple[str, str]]()
    n_valid = n_drafted = n_accepted = 0
    refusal = ""
    for _ in range(MOST_ANSWERS):
        reply = ask(messages, described)
        n_drafted, n_accepted = n_drafted + reply.n_drafted, n_accepted + reply.n_accepted
        refusal = reply.refusal
        calls += [(call.name, call.arguments) for call in reply.calls]
        results = [_result(call, tools, world) for call in reply.calls]
        n_valid += sum(result.is_valid for result in results)
        if not reply.calls or world.answer is not None or any(r.is_broken for r in results):
            break
        messages.append(_told(reply))
        for call, result in zip(reply.calls, results, strict=True):
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result.text})
    solved = task.is_solved(world)
    return TaskOutcome(task.name, tuple(calls), n_valid, solved, n_drafted, n_accepted, refusal)


def play_all(
    name: str, tasks: Sequence[AgentTask], ask: CallTools, on_progress: Callable[[float], object]
) -> PlayedWay:
    """Play all tasks one after the other. `on_progress` gets the share of them that is done."""
    outcomes = []
    for number, task in enumerate(tasks, 1):
        outcomes.append(play(task, ask))
        on_progress(number / len(tasks))
    return PlayedWay(name, tuple(outcomes))


@dataclass(frozen=True)
class _CallResult:
    text: str
    is_valid: bool = False
    is_broken: bool = False  # True if the arguments are no JSON object


def _result(
    call: WrittenCall, tools: Mapping[str, type[AgentTool]], world: AgentWorld
) -> _CallResult:
    """Run a call in `world` if it is valid. No call is run after the task was submitted."""
    try:
        is_object = isinstance(json.loads(call.arguments), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        return _CallResult("error: the arguments are no JSON object", is_broken=True)
    if call.name not in tools:
        return _CallResult(f"error: there is no tool {call.name}")
    try:
        tool = tools[call.name].model_validate_json(call.arguments)
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        return _CallResult(f"error: {place}: {first['msg']}")
    if world.answer is not None:
        return _CallResult("the task has ended", is_valid=True)
    return _CallResult(tool.run(world), is_valid=True)


def _told(reply: AgentReply) -> dict[str, Any]:
    """The answer as a message of the next request."""
    calls = [
        {
            "id": call.id, "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in reply.calls
    ]  # fmt: skip
    return {"role": "assistant", "content": reply.text or None, "tool_calls": calls}


def verdict(ways: Sequence[PlayedWay], failed: Mapping[str, str]) -> AgentVerdict:
    """Compare the numbers of valid calls and of solved tasks with those of the first way.

    `failed` has the reason for each way that could not be played. Such a way does not pass.
    """
    baseline, *others = ways
    differ = False
    sentences = [f"{name} was not played: {reason}" for name, reason in failed.items()]
    for way in others:
        for what, theirs, ours in (
            ("tasks solved", baseline.n_solved, way.n_solved),
            ("valid calls", baseline.n_valid, way.n_valid),
        ):
            if theirs != ours:
                differ = True
                sentences.append(f"{way.name}: {ours} {what}, and {theirs} with {baseline.name}")
        names = [
            one.task
            for one, two in zip(way.outcomes, baseline.outcomes, strict=True)
            if (one.is_solved, one.n_valid) != (two.is_solved, two.n_valid)
        ]
        if names:
            sentences.append(f"{way.name}: other numbers in {_listed(names)}")
    n, passes = len(baseline.outcomes), not differ and not failed
    if not passes:
        lacks = f"have the numbers of {baseline.name}" if differ else "were played"
        sentences.insert(0, f"no pass: not all ways {lacks}")
    elif others:
        have = "the other way has" if len(others) == 1 else f"all {len(others)} other ways have"
        sentences.insert(0, f"pass: {have} the numbers of {baseline.name}")
    sentences += [
        f"{way.name} drafted no token, so its numbers say nothing about drafts: --spec-policy "
        "fixed drafts in every round"
        for way in others
        if not way.n_drafted
    ]
    if not baseline.n_solved:
        reason = "writes no valid call" if not baseline.n_valid else "solves none of the tasks"
        proves = ", so equal numbers prove little" if others else ""
        sentences.append(f"this model {reason} even with {baseline.name}{proves}")
    elif baseline.n_solved < n / 2:
        sentences.append(f"this model solves {baseline.n_solved} of {n} tasks with {baseline.name}")
    refused = [(way.name, o) for way in ways for o in way.outcomes if o.refusal]
    if refused:
        name, outcome = refused[0]
        sentences.append(
            f"the server refused requests of {len(refused)} tasks, the first of them in "
            f"{outcome.task!r} with {name}: {outcome.refusal}"
        )
    return AgentVerdict(passes, tuple(sentences))


_MOST_LISTED = 5


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_LISTED
    shown = ", ".join(names[:_MOST_LISTED])
    return f"{shown} and {more} more" if more > 0 else shown
