"""Jobs in the engine process: what is told of each, by number."""

from __future__ import annotations

from fake_generator import FakeFactory

from specoffload.server.engine.messages import (
    Cancel,
    CompletionJob,
    Finished,
    JobEvent,
    Outputs,
    Problem,
    Shutdown,
    Started,
    Submit,
    ToEngine,
)
from specoffload.server.engine.process import Service
from specoffload.session.generation import GenerateOptions, Piece


class Told:
    """A service on a fake generator: messages by the step before which they come."""

    def __init__(self, n_parallel: int, messages: dict[int, list[ToEngine]]) -> None:
        self.events: dict[int, list[JobEvent]] = {}
        self._messages, self._n = dict(messages), -1
        Service(FakeFactory(n_parallel=n_parallel)(), self._send).run(self._take)

    def _take(self, *, wait: bool) -> list[ToEngine]:
        self._n += 1
        if wait and not self._messages:
            return [Shutdown()]
        return self._messages.pop(min(self._messages) if wait else self._n, [])

    def _send(self, outputs: Outputs) -> None:
        for output in outputs.outputs:
            self.events.setdefault(output.job_id, []).append(output.event)

    def pieces(self, job_id: int) -> list[Piece]:
        return [event for event in self.events[job_id] if isinstance(event, Piece)]


def job(prompt: str, **options: int) -> CompletionJob:
    return CompletionJob(prompt, GenerateOptions(**options))  # type: ignore[arg-type]


def test_several_answers_to_a_prompt_are_told_apart_and_end_together() -> None:
    told = Told(3, {0: [Submit(0, job("[options]", n=3, seed=7))]})
    assert isinstance(told.events[0][0], Started)
    assert told.events[0][-1] == Finished()
    assert told.events[0].count(Finished()) == 1
    texts = ["".join(p.text for p in told.pieces(0) if p.index == i) for i in range(3)]
    assert all(f"seed={seed}" in text for seed, text in zip((7, 8, 9), texts, strict=True))
    assert sum(piece.finish_reason is not None for piece in told.pieces(0)) == 3


def test_one_answer_that_fails_ends_its_job_and_no_other() -> None:
    told = Told(4, {0: [Submit(0, job("[raise]", n=2)), Submit(1, job("fine"))]})
    assert isinstance(told.events[0][-1], Problem)
    assert sum(isinstance(event, Problem) for event in told.events[0]) == 1
    assert told.events[1][-1] == Finished()


def test_a_cancelled_job_ends_before_the_next_step() -> None:
    told = Told(2, {0: [Submit(0, job("[forever]", n=2))], 3: [Cancel(0)]})
    assert told.events[0][-1] == Finished()
    assert len(told.pieces(0)) == 2 * 3
