"""Accepts jobs: between two steps, and also during a step that takes long.

Accepting a job means to tokenise its prompt, to refuse it if it cannot be answered, and to tell the
API process the result. The client gets its status and header only after that. The main thread of
the engine process accepts jobs between two steps. A step that reads a part of a prompt can take
many seconds. So a second thread accepts jobs that arrive during a step of more than `LONG_STEP_S`,
and the main thread queues them after the step. If a job is cancelled while the step reads its
prompt, the second thread stops the step. So the next job need not wait for the step's end. It also
stops the step for a new job if that saves more time than it costs (`slots/prompt_share.py`).

The two threads never read the channel at the same time. The second thread changes nothing in the
session: it only reads the vocabulary and makes samplers.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from offload.ggml.library import interrupt
from specoffload.errors import KNOWN
from specoffload.generation.generation import N_SEEDS, GenerateOptions
from specoffload.server.engine.calls import PromptTooLong, TextTooLong, kept_places, prompt_tokens
from specoffload.server.engine.messages import (
    Cancel,
    ChatJob,
    CompletionJob,
    EngineCall,
    Event,
    GeneratingJob,
    JobOutput,
    Problem,
    Started,
    Submit,
    ToEngine,
    problem_of,
)

if TYPE_CHECKING:
    from specoffload.session.session import Session
    from specoffload.slots.request import Request

LONG_STEP_S = 0.02
"""Seconds of a step after which the second thread accepts jobs. It first looks after this time, so
steps of a few milliseconds are never disturbed."""

log = logging.getLogger("specoffload.engine")


@dataclass(frozen=True)
class Accepted:
    """A job that can be answered. Its answers are not queued yet."""

    job_id: int
    answers: tuple[Request, ...]
    started: Started


def accept(session: Session, job_id: int, job: GeneratingJob) -> Accepted:
    """Make the requests of a job, one for each of its answers, without queueing them.

    Raises BadRequest, DoesNotFit or NotSupported for a job that cannot be answered.
    """
    tokens = prompt_tokens(session, job)
    asked = job.options
    if isinstance(job, ChatJob) and job.cache_ends:
        asked = replace(asked, keep_at=kept_places(session, job, tokens))
    answers: list[Request] = []
    for index in range(asked.n):
        options = _options_of_answer(asked, index)
        answers.append(session.new_request(tokens, options, answers[0] if answers else None))
    text: str | None = None
    if isinstance(job, CompletionJob) and job.with_text:
        is_text = isinstance(job.prompt, str)
        text = str(job.prompt) if is_text else session.detokenize(tokens)
    return Accepted(job_id, tuple(answers), Started(len(tokens), text))


def refusal(session: Session, job_id: int, error: Exception, n_prompt: int | None) -> Problem:
    """Return what the client is told about a job that failed, and log what nobody expects."""
    if isinstance(error, PromptTooLong):
        n_prompt = error.n_prompt_tokens
    if isinstance(error, TextTooLong):
        told = problem_of(error, n_prompt_tokens=error.n_tokens, n_ctx=error.n_most)
        return replace(told, event=Event.TEXT_TOO_LONG)
    problem = problem_of(error, n_prompt_tokens=n_prompt, n_ctx=session.card.n_ctx)
    if isinstance(error, PromptTooLong):
        event, is_least = Event.PROMPT_TOO_LONG, error.is_lower_bound
        problem = replace(problem, event=event, is_lower_bound=is_least)
    # The API process reports known errors by their message. A traceback would add nothing.
    if problem.http_status == 500 and not isinstance(error, KNOWN):
        log.error("job %d failed", job_id, exc_info=error)
    return problem


class Acceptance:
    """Takes the messages of the API process. During long steps a thread of its own takes them."""

    def __init__(
        self,
        session: Session,
        receive: Callable[[bool], list[ToEngine]],
        tell: Callable[[JobOutput], None],
        is_worth_stopping: Callable[[int], bool],
    ) -> None:
        """`receive(wait)` returns the messages that have arrived; if `wait`, at least one. `tell`
        sends an output at once. `is_worth_stopping` says if the step should be stopped when a job
        is cancelled. All may be called by the second thread."""
        self._session, self._receive, self._tell = session, receive, tell
        self._is_worth_stopping = is_worth_stopping
        self._stopping = threading.Lock()  # held while a step is stopped, and at its end
        self._reading = threading.Lock()  # held by the thread that reads the channel
        self._taken: list[ToEngine | Accepted] = []
        self._step_began_s: float | None = None
        self._has_work = threading.Event()
        self.n_stopped = 0  # number of steps that were stopped
        self.n_during_steps = 0  # number of jobs that were accepted during a step
        threading.Thread(target=self._watch, name="acceptance", daemon=True).start()

    def take(self, *, wait: bool) -> list[ToEngine | Accepted]:
        """Return what has arrived since the last call, in its order. For the main thread only.

        With `wait`, wait until there is something.
        """
        with self._reading:
            taken, self._taken = self._taken, []
            if taken:
                return taken + self._receive(False)
            if wait:
                self._has_work.clear()
            return [*self._receive(wait)]

    @contextlib.contextmanager
    def during_step(self) -> Iterator[None]:
        """Let the second thread accept jobs if the block takes long."""
        interrupt.go_on()
        self._step_began_s = time.monotonic()
        if not self._has_work.is_set():
            self._has_work.set()
        try:
            yield
        finally:
            with self._stopping:
                self._step_began_s = None
                interrupt.go_on()

    def _watch(self) -> None:
        while True:
            self._has_work.wait()
            time.sleep(LONG_STEP_S)
            # The main thread takes this lock between two steps. So the step cannot end and another
            # one begin while it is looked at here.
            with self._reading:
                began_s = self._step_began_s
                if began_s is not None and time.monotonic() - began_s >= LONG_STEP_S:
                    self._taken += filter(None, map(self._look_at, self._receive(False)))
                    self._stop_for_new(time.monotonic() - began_s)

    def _stop_for_new(self, step_s: float) -> None:
        """Stop the step, which runs since `step_s` seconds, if an accepted job should go first."""
        if interrupt.is_stopped():
            return
        accepted = [taken for taken in self._taken if isinstance(taken, Accepted)]
        if any(self._session.is_worth_stopping_for(job.answers[0], step_s) for job in accepted):
            self._stop_step()

    def _stop_step(self) -> None:
        with self._stopping:
            if self._step_began_s is not None:
                self.n_stopped += 1
                interrupt.stop()

    def _look_at(self, message: ToEngine) -> ToEngine | Accepted | None:
        """Return what the main thread must do about a message: for a refused job, nothing."""
        if isinstance(message, Cancel) and self._is_worth_stopping(message.job_id):
            self._stop_step()
        if not isinstance(message, Submit) or isinstance(message.job, EngineCall):
            return message
        job_id = message.job_id
        self.n_during_steps += 1
        try:
            accepted = accept(self._session, job_id, message.job)
        except Exception as error:
            self._tell(JobOutput(job_id, refusal(self._session, job_id, error, None)))
            return None
        self._tell(JobOutput(job_id, accepted.started))
        return accepted


def _options_of_answer(options: GenerateOptions, index: int) -> GenerateOptions:
    """Return the options of answer number `index` to one prompt.

    Each answer gets another seed, because equal seeds give equal answers. Only the first answer
    reports probabilities of the prompt.
    """
    seed = options.seed if options.seed is None else (options.seed + index) % N_SEEDS
    n_top = None if index else options.prompt_logprobs
    return replace(options, n=1, seed=seed, prompt_logprobs=n_top)
