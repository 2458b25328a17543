"""Jobs that arrive during a long step are accepted once, in their order, and refused at once."""

from __future__ import annotations

import random
import threading
import time
from queue import Empty, SimpleQueue
from typing import cast

import pytest
from fake_generator import FakeFactory
from running import eventually

from offload.ggml.library import interrupt
from specoffload.generation.generation import GenerateOptions
from specoffload.server.engine import acceptance
from specoffload.server.engine.acceptance import Acceptance, Accepted, accept
from specoffload.server.engine.calls import counters
from specoffload.server.engine.messages import (
    Cancel,
    CompletionJob,
    EngineCall,
    JobOutput,
    Problem,
    Shutdown,
    Started,
    Submit,
    ToEngine,
)
from specoffload.session.session import Session


class _Door:
    """The channel and the outputs of a test."""

    def __init__(self) -> None:
        self.session = cast(Session, FakeFactory(n_ctx=64)())
        self.told: list[JobOutput] = []
        self._arrived: SimpleQueue[ToEngine] = SimpleQueue()
        self._reading = threading.Lock()
        self.worth_stopping: set[int] = set()  # jobs whose prompts the step reads
        self.acceptance = Acceptance(
            self.session, self._receive, self.told.append, self.worth_stopping.__contains__
        )

    def put(self, message: ToEngine) -> None:
        self._arrived.put(message)

    def _receive(self, wait: bool) -> list[ToEngine]:
        assert self._reading.acquire(blocking=False), "two threads read the channel"
        try:
            found = [self._arrived.get()] if wait else []
            while True:
                try:
                    found.append(self._arrived.get_nowait())
                except Empty:
                    return found
        finally:
            self._reading.release()


def _job(number: int, text: str = "x", n: int = 1) -> Submit:
    return Submit(number, CompletionJob(text, GenerateOptions(n=n), with_text=True))


def test_a_job_is_accepted_in_a_long_step_and_begun_after_it() -> None:
    door = _Door()
    with door.acceptance.during_step():
        door.put(_job(0, "hello", n=2))
        door.put(_job(1, "x" * 100))
        door.put(Cancel(0))
        eventually(lambda: len(door.told) == 2)
    started, problem = (output.event for output in door.told)
    assert started == Started(6, "hello")
    assert isinstance(problem, Problem)
    assert (problem.http_status, problem.n_prompt_tokens, problem.n_ctx) == (400, 101, 64)
    accepted, cancel = door.acceptance.take(wait=True)
    assert isinstance(accepted, Accepted)
    assert (accepted.job_id, accepted.started, len(accepted.answers)) == (0, Started(6, "hello"), 2)
    assert cancel == Cancel(0)
    assert door.acceptance.n_during_steps == 2


def test_a_step_is_stopped_for_a_new_job_when_that_is_worth_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is asked again and again, because the step may reach the end of an ubatch."""
    door, asked = _Door(), list[float]()

    def is_worth_it(request: object, step_s: float) -> bool:
        asked.append(step_s)
        return len(asked) == 3

    monkeypatch.setattr(door.session, "is_worth_stopping_for", is_worth_it)
    with door.acceptance.during_step():
        time.sleep(0.1)
        assert not asked, "nobody has come"
        door.put(_job(0))
        eventually(interrupt.is_stopped)
        time.sleep(0.1)
    assert not interrupt.is_stopped()
    assert len(asked) == 3
    assert asked == sorted(asked)
    assert door.acceptance.n_stopped == 1


def test_calls_and_a_shutdown_wait_for_the_main_thread() -> None:
    door = _Door()
    others: list[ToEngine] = [Submit(0, EngineCall(counters)), Cancel(3), Shutdown()]
    with door.acceptance.during_step():
        for message in (*others, _job(1)):
            door.put(message)
        eventually(lambda: len(door.told) == 1)
    assert door.acceptance.take(wait=False)[:3] == others


def test_a_short_step_is_left_alone() -> None:
    door = _Door()
    for number in range(20):
        with door.acceptance.during_step():
            door.put(_job(number))
        assert door.acceptance.take(wait=False) == [_job(number)]
    assert not door.told


def test_an_answer_is_the_same_whoever_accepts_it() -> None:
    door = _Door()
    job = CompletionJob("hello", GenerateOptions(n=3, seed=5))
    here = accept(door.session, 0, job)
    with door.acceptance.during_step():
        door.put(Submit(0, job))
        eventually(lambda: len(door.told) == 1)
    (there,) = door.acceptance.take(wait=False)
    assert isinstance(there, Accepted)
    assert (here.started, len(here.answers)) == (there.started, len(there.answers))


@pytest.mark.parametrize("seed", range(3))
def test_each_message_is_taken_once_in_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages arrive at random times, during steps and between them."""
    monkeypatch.setattr(acceptance, "LONG_STEP_S", 0.001)
    chance = random.Random(seed)
    door, n, taken = _Door(), 300, list[int]()
    pauses = [chance.choice((0, 0, 0.0005, 0.002)) for _ in range(n)]
    refused = {number for number in range(n) if chance.random() < 0.2}

    def send() -> None:
        for number, pause_s in enumerate(pauses):
            time.sleep(pause_s)
            door.put(_job(number, "[refuse]" if number in refused else "x"))

    sender = threading.Thread(target=send)
    sender.start()
    begun = list[int]()
    while len(taken) + len([o for o in door.told if isinstance(o.event, Problem)]) < n:
        for message in door.acceptance.take(wait=False):
            assert isinstance(message, Submit | Accepted)
            taken.append(message.job_id)
            if isinstance(message, Accepted):
                begun.append(message.job_id)
        with door.acceptance.during_step():
            time.sleep(chance.choice((0, 0.001, 0.004)))
    sender.join()
    assert taken == sorted(set(taken)), "once, in order"
    told = [output.job_id for output in door.told]
    assert told == sorted(set(told))
    assert set(begun) | {o.job_id for o in door.told if isinstance(o.event, Problem)} == set(told)
    assert set(told) - set(begun) <= refused
    assert begun, "no job was accepted during a step"
    assert len(begun) < len(taken), "no job was accepted between steps"


def test_a_step_is_stopped_for_a_cancelled_job_that_it_reads_and_for_no_other() -> None:
    door = _Door()
    door.worth_stopping.add(7)
    with door.acceptance.during_step():
        door.put(Cancel(3))
        door.put(_job(8))
        eventually(lambda: len(door.told) == 1)  # both were looked at
        assert not interrupt.is_stopped()
        door.put(Cancel(7))
        eventually(interrupt.is_stopped)
    assert not interrupt.is_stopped()
    assert door.acceptance.n_stopped == 1
    taken = door.acceptance.take(wait=False)
    assert [message.job_id for message in taken if not isinstance(message, Shutdown)] == [3, 8, 7]


def test_a_cancel_between_two_steps_stops_none() -> None:
    door = _Door()
    door.worth_stopping.add(7)
    door.put(Cancel(7))
    assert door.acceptance.take(wait=False) == [Cancel(7)]
    with door.acceptance.during_step():
        time.sleep(3 * acceptance.LONG_STEP_S)
        assert not interrupt.is_stopped()
