"""The engine process: makes the generator and serves jobs from the pipe, one at a time.

It owns libllama, so a failed assertion or a device error ends this process and not the API. The
main thread computes; a second thread reads the pipe, so that a cancellation is seen during a
generation and the end of the API process (end of file) ends this one too: no orphan.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from collections.abc import Generator as PyGenerator
from multiprocessing.connection import Connection

from offload.errors import BadRequest, DoesNotFit
from specoffload.server.messages import (
    Cancel,
    ChatJob,
    CompletionJob,
    Event,
    Finished,
    Job,
    LoadFailed,
    Output,
    Prompt,
    Ready,
    Shutdown,
    Started,
    Submit,
    TemplateJob,
    ToEngine,
    TokenizeJob,
    Tokens,
    problem_of,
)
from specoffload.session.generation import Generator, Piece

Factory = Callable[[], Generator]
"""Makes the generator; must be picklable, since the process is spawned, not forked."""

IGNORED_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})

log = logging.getLogger("specoffload.engine")


class _Inbox:
    """Jobs in arrival order, and which of them the client has given up."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._jobs: queue.SimpleQueue[Submit | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._cancelled: set[int] = set()
        self._n_done = -1  # highest job_id that needs no cancelling any more
        threading.Thread(target=self._read, name="pipe reader", daemon=True).start()

    def __iter__(self) -> Iterator[Submit]:
        while (submit := self._jobs.get()) is not None:
            yield submit

    def is_cancelled(self, job_id: int) -> bool:
        with self._lock:
            return job_id in self._cancelled

    def forget(self, job_id: int) -> None:
        with self._lock:
            self._n_done = job_id
            self._cancelled = {i for i in self._cancelled if i > job_id}

    def _read(self) -> None:
        while True:
            try:
                message: ToEngine = self._connection.recv()
            except (EOFError, OSError):
                # The API process is gone. The main thread may be deep inside libllama, where no
                # exception reaches it, and memory is the kernel's to free.
                os._exit(0)
            if isinstance(message, Submit):
                self._jobs.put(message)
            elif isinstance(message, Cancel):
                with self._lock:
                    if message.job_id > self._n_done:
                        self._cancelled.add(message.job_id)
            else:
                assert isinstance(message, Shutdown)
                self._jobs.put(None)


def engine_main(connection: Connection, factory: Factory) -> None:
    """Entry point of the spawned process; returns after Shutdown or a failed load.

    Ctrl-C at a terminal goes to the whole process group, and a service manager's SIGTERM to the
    whole service. What happens then is for the API process to decide, which drains first and ends
    this process by Shutdown, SIGKILL or the end of the pipe; so both signals are ignored here.
    """
    for sig in IGNORED_SIGNALS:
        signal.signal(sig, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    inbox = _Inbox(connection)
    try:
        generator = factory()
    except Exception as error:
        problem = problem_of(error)
        if problem.http_status >= 500:
            log.exception("the model could not be loaded")
        connection.send(LoadFailed(problem))
        return
    connection.send(Ready(generator.card))
    try:
        for submit in inbox:
            _serve_one(generator, submit, inbox, connection)
            inbox.forget(submit.job_id)
    finally:
        generator.close()


def _serve_one(generator: Generator, submit: Submit, inbox: _Inbox, connection: Connection) -> None:
    """Run one job to its last event. Several at once will replace this function and the loop."""

    def tell(event: Event) -> None:
        connection.send(Output(submit.job_id, event))

    if inbox.is_cancelled(submit.job_id):
        tell(Finished())
        return
    n_prompt_tokens: int | None = None
    try:
        # Closed here and not by the collector: the sequence must be free before the next job.
        with contextlib.closing(_run(generator, submit.job)) as events:
            for event in events:
                if isinstance(event, Started):
                    n_prompt_tokens = event.n_prompt_tokens
                if inbox.is_cancelled(submit.job_id):
                    break
                tell(event)
    except Exception as error:
        n_ctx = generator.card.n_ctx
        if isinstance(error, PromptTooLong):
            n_prompt_tokens = error.n_prompt_tokens
        problem = problem_of(error, n_prompt_tokens=n_prompt_tokens, n_ctx=n_ctx)
        if problem.http_status >= 500:
            log.exception("job %d failed", submit.job_id)
        tell(problem)
    else:
        tell(Finished())


def _run(generator: Generator, job: Job) -> PyGenerator[Event, None, None]:
    if isinstance(job, TokenizeJob):
        ids = generator.tokenize(
            job.text, add_special=job.add_special, parse_special=job.parse_special
        )
        yield Tokens(tuple(ids))
    elif isinstance(job, TemplateJob):
        yield Prompt(generator.apply_chat_template(job.messages))
    else:
        tokens = _prompt_tokens(generator, job)
        _check_prompt(tokens, generator.card.n_vocab, generator.card.n_ctx)
        yield Started(len(tokens))
        yield from _pieces(generator, tokens, job)


def _prompt_tokens(generator: Generator, job: CompletionJob | ChatJob) -> list[int]:
    """A template writes its own special tokens, so none is added to what it returns."""
    if isinstance(job, ChatJob):
        text = generator.apply_chat_template(job.messages)
        return generator.tokenize(text, add_special=False, parse_special=True)
    if isinstance(job.prompt, str):
        return generator.tokenize(job.prompt, add_special=True, parse_special=True)
    return list(job.prompt)


class PromptTooLong(DoesNotFit):
    """Carries the two numbers that llama-server's error shape has fields for."""

    def __init__(self, n_prompt_tokens: int, n_ctx: int) -> None:
        super().__init__(
            f"the prompt has {n_prompt_tokens} tokens, the context {n_ctx}, and the answer needs "
            "at least one: shorten the prompt or raise --ctx-size"
        )
        self.n_prompt_tokens = n_prompt_tokens


def _check_prompt(tokens: list[int], n_vocab: int, n_ctx: int) -> None:
    if not tokens:
        raise BadRequest("the prompt is empty: at least one token is needed")
    for at, token in enumerate(tokens):
        if not 0 <= token < n_vocab:
            raise BadRequest(
                f"prompt[{at}] is token {token}: the vocabulary has tokens 0 to {n_vocab - 1}"
            )
    if len(tokens) >= n_ctx:
        raise PromptTooLong(len(tokens), n_ctx)


def _pieces(
    generator: Generator, tokens: list[int], job: CompletionJob | ChatJob
) -> Iterator[Piece]:
    last: Piece | None = None
    pieces = generator.generate(tokens, job.options)
    close = getattr(pieces, "close", None)
    with contextlib.ExitStack() as stack:
        if close is not None:
            stack.callback(close)
        for last in pieces:
            yield last
    if last is None or last.finish_reason is None or last.stats is None:
        raise RuntimeError("the generation ended without a finish reason and statistics")
