"""The engine process's work: jobs go into the generator, and what comes of them goes out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from time import monotonic
from typing import Protocol

from specoffload.server.engine.messages import (
    BriefJob,
    Cancel,
    CompletionJob,
    Counters,
    CountersJob,
    DetokenizeJob,
    Embedded,
    EmbedJob,
    Event,
    Finished,
    GeneratingJob,
    Output,
    Outputs,
    Shutdown,
    SlotChanged,
    Slots,
    SlotsJob,
    Started,
    Submit,
    Text,
    ToEngine,
    TokenizeJob,
    Tokens,
    problem_of,
)
from specoffload.server.engine.prompts import (
    PromptTooLong,
    check_ids,
    check_text,
    prompt_tokens,
    text_tokens,
)
from specoffload.session.generation import (
    N_SEEDS,
    GenerateOptions,
    Generator,
    Piece,
    Running,
)

log = logging.getLogger("specoffload.engine")


class TakeMessages(Protocol):
    def __call__(self, *, wait: bool) -> list[ToEngine]:
        """All messages that have come; with `wait` at least one."""
        ...


class Service:
    """Jobs under way in the generator, and what is to be told of them."""

    def __init__(self, generator: Generator, send: Callable[[Outputs], None]) -> None:
        self._generator, self._send = generator, send
        self._card = generator.card
        self._running: dict[int, list[Running]] = {}  # by job: its answers that are not over
        self._jobs: dict[int, tuple[int, int]] = {}  # by id() of what runs: job, and which answer
        self._n_prompts: dict[int, int] = {}  # tokens, by job
        self._outputs: list[Output] = []

    def run(self, take: TakeMessages) -> None:
        """Until Shutdown. Messages are seen before each step, so a job ends within one."""
        while True:
            has_work = bool(self._running) or self._generator.use_idle_time()
            for message in take(wait=not has_work):
                if isinstance(message, Shutdown):
                    return
                if isinstance(message, Cancel):
                    self._cancel(message.job_id)
                else:
                    self._submit(message)
            if self._running:
                self._step()
            if self._outputs:
                self._send(Outputs(tuple(self._outputs), monotonic()))
                self._outputs.clear()

    def _submit(self, submit: Submit) -> None:
        job_id, job = submit.job_id, submit.job
        try:
            if isinstance(job, GeneratingJob):
                self._begin(job_id, job)
                return
            self._tell(job_id, _answer(self._generator, job))
        except Exception as error:
            self._fail(job_id, error)
        else:
            self._tell(job_id, Finished())

    def _begin(self, job_id: int, job: GeneratingJob) -> None:
        tokens = prompt_tokens(self._generator, job)
        self._n_prompts[job_id] = len(tokens)
        answers: list[Running] = []
        self._running[job_id] = answers
        for index in range(job.options.n):
            options = _of_answer(job.options, index)
            answer = self._generator.start(tokens, options, answers[0] if answers else None)
            answers.append(answer)
            self._jobs[id(answer)] = job_id, index
        self._tell(job_id, Started(len(tokens), _text_of(self._generator, job, tokens)))

    def _step(self) -> None:
        try:
            news = self._generator.step()
        except Exception as error:  # of ours: every job is lost, and the next may do
            for job_id in list(self._running):
                self._fail(job_id, error)
            return
        for running in news:
            known = self._jobs.get(id(running))
            if known is not None:
                self._report(*known, running)

    def _report(self, job_id: int, index: int, running: Running) -> None:
        last: Piece | None = None
        while running.pieces:
            last = running.pieces.popleft()
            self._tell(job_id, replace(last, index=index) if index else last)
        if not running.is_over:
            return
        if running.error is not None:
            self._fail(job_id, running.error)
        elif last is None or last.finish_reason is None or last.stats is None:
            ended = RuntimeError("the generation ended without a finish reason and statistics")
            self._fail(job_id, ended)
        else:
            del self._jobs[id(running)]
            self._running[job_id].remove(running)
            if not self._running[job_id]:
                self._forget(job_id)
                self._tell(job_id, Finished())

    def _cancel(self, job_id: int) -> None:
        if job_id in self._running:
            self._forget(job_id)
            self._tell(job_id, Finished())

    def _fail(self, job_id: int, error: Exception) -> None:
        n_prompt_tokens = self._n_prompts.get(job_id)
        if isinstance(error, PromptTooLong):
            n_prompt_tokens = error.n_prompt_tokens
        problem = problem_of(error, n_prompt_tokens=n_prompt_tokens, n_ctx=self._card.n_ctx)
        if problem.http_status == 500:  # what this model cannot do is no failure
            log.error("job %d failed", job_id, exc_info=error)
        self._forget(job_id)
        self._tell(job_id, problem)

    def _forget(self, job_id: int) -> None:
        self._n_prompts.pop(job_id, None)
        for answer in self._running.pop(job_id, ()):
            self._generator.cancel(answer)  # does nothing to one that has failed
            del self._jobs[id(answer)]

    def _tell(self, job_id: int, event: Event) -> None:
        self._outputs.append(Output(job_id, event))


def _of_answer(options: GenerateOptions, index: int) -> GenerateOptions:
    """The options of one of the answers to a prompt: of equal seeds, all would be the same. The
    first tells of the prompt for all."""
    seed = options.seed if options.seed is None else (options.seed + index) % N_SEEDS
    n_top = None if index else options.prompt_logprobs
    return replace(options, n=1, seed=seed, prompt_logprobs=n_top)


def _text_of(generator: Generator, job: GeneratingJob, tokens: list[int]) -> str | None:
    """The text of a prompt that is to be told again."""
    if not isinstance(job, CompletionJob) or not job.with_text:
        return None
    return job.prompt if isinstance(job.prompt, str) else generator.detokenize(tokens)


def _answer(generator: Generator, job: BriefJob) -> Event:
    """The one event of a job that generates nothing."""
    if isinstance(job, TokenizeJob):
        return _tokens(generator, job)
    if isinstance(job, DetokenizeJob):
        check_ids(job.tokens, generator.card.n_vocab)
        return Text(generator.detokenize(job.tokens))
    if isinstance(job, EmbedJob):
        tokens = text_tokens(generator, job.prompt)
        rows, is_pooled = generator.embed(tokens)
        return Embedded(rows, len(tokens), is_pooled)
    if isinstance(job, SlotsJob):
        return Slots(generator.slots())
    if isinstance(job, CountersJob):
        return Counters(tuple(generator.counters().items()))
    return SlotChanged(job, generator.change_slot(job.number, job.action, job.filename))


def _tokens(generator: Generator, job: TokenizeJob) -> Tokens:
    check_text(job.text, generator.card)
    ids = generator.tokenize(job.text, add_special=job.add_special, parse_special=job.parse_special)
    pieces = tuple(generator.piece(id_) for id_ in ids) if job.with_pieces else None
    return Tokens(tuple(ids), pieces)
