"""Jobs whose grammars take long to compile hold up no others, and can be cancelled."""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue

import pytest

from specoffload.generation.generation import GenerateOptions
from specoffload.server.engine.calls import counters
from specoffload.server.engine.compiling import N_THREADS, CompilingFirst
from specoffload.server.engine.messages import (
    Cancel,
    CompletionJob,
    EngineCall,
    Finished,
    JobOutput,
    Shutdown,
    Submit,
    ToEngine,
)


class _Engine:
    """Messages that arrive, and grammars that compile once they may."""

    def __init__(self) -> None:
        self.arrived: SimpleQueue[ToEngine | None] = SimpleQueue()  # None: woken
        self.may_compile: dict[str, threading.Event] = {}
        self.compiled: set[str] = set()
        self.begun: SimpleQueue[str] = SimpleQueue()
        self.told: list[JobOutput] = []
        self.first = CompilingFirst(
            self._take,
            lambda: self.arrived.put(None),
            self.told.append,
            lambda options: options.grammar is None or options.grammar in self.compiled,
            self._compile,
        )

    def _take(self, wait: bool) -> list[ToEngine]:
        found = [self.arrived.get(timeout=30)] if wait else []
        while True:
            try:
                found.append(self.arrived.get_nowait())
            except Empty:
                return [message for message in found if message is not None]

    def _compile(self, options: GenerateOptions) -> None:
        assert options.grammar is not None
        self.begun.put(options.grammar)
        if options.grammar in self.may_compile:
            assert self.may_compile[options.grammar].wait(30)
        self.compiled.add(options.grammar)

    def put(self, job_id: int, grammar: str | None = None, *, slow: bool = False) -> Submit:
        if slow and grammar is not None:
            self.may_compile[grammar] = threading.Event()
        submit = Submit(job_id, CompletionJob("a", GenerateOptions(grammar=grammar)))
        self.arrived.put(submit)
        return submit


@pytest.fixture
def engine() -> _Engine:
    return _Engine()


def test_others_pass_a_job_whose_grammar_is_compiled(engine: _Engine) -> None:
    slow = engine.put(1, "slow", slow=True)
    plain = engine.put(2)
    call = Submit(3, EngineCall(counters, ()))
    engine.arrived.put(call)
    assert engine.first.receive(True) == [plain, call]
    small = engine.put(4, "small")
    assert engine.first.receive(True) == [small]
    engine.may_compile["slow"].set()
    assert engine.first.receive(True) == [slow]
    again = engine.put(5, "slow")
    assert engine.first.receive(False) == [again]


def test_a_small_grammar_passes_three_large_ones(engine: _Engine) -> None:
    for at in range(N_THREADS - 1):
        engine.put(at, f"slow {at}", slow=True)
    small = engine.put(9, "small")
    assert engine.first.receive(True) == [small]
    for event in engine.may_compile.values():
        event.set()


def test_a_cancelled_job_ends_at_once_and_never_begins(engine: _Engine) -> None:
    engine.put(1, "slow", slow=True)
    assert engine.first.receive(False) == []
    assert engine.begun.get(timeout=30) == "slow"
    engine.arrived.put(Cancel(1))
    assert engine.first.receive(False) == []
    assert engine.told == [JobOutput(1, Finished())]
    engine.may_compile["slow"].set()
    last = engine.put(2)
    assert engine.first.receive(True) == [last]
    assert engine.first.receive(False) == []


def test_a_cancelled_job_that_waits_is_not_compiled(engine: _Engine) -> None:
    for at in range(N_THREADS):
        engine.put(at, f"slow {at}", slow=True)
    engine.put(8, "waits")
    engine.first.receive(False)
    engine.arrived.put(Cancel(8))
    engine.first.receive(False)
    for event in engine.may_compile.values():
        event.set()
    found = 0
    while found < N_THREADS:
        found += len(engine.first.receive(True))
    assert "waits" not in engine.compiled


def test_the_end_of_others_and_of_all_is_passed_on(engine: _Engine) -> None:
    engine.arrived.put(Cancel(7))
    engine.arrived.put(Shutdown())
    assert engine.first.receive(True) == [Cancel(7), Shutdown()]
