"""Compiles grammars on threads of their own, before the engine's main thread gets the jobs.

A grammar may take a second. The main thread answers nobody while it compiles one. llguidance does
not hold Python's lock meanwhile, so steps go on beside it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from specoffload.generation.generation import GenerateOptions
from specoffload.server.engine.messages import (
    Cancel,
    EngineCall,
    Finished,
    JobOutput,
    Submit,
    ToEngine,
)

N_THREADS = 4  # a small grammar need not wait for three large ones


class CompilingFirst:
    """Takes messages, and holds a job back until its grammar is compiled."""

    def __init__(
        self,
        take: Callable[[bool], list[ToEngine]],
        wake: Callable[[], None],
        tell: Callable[[JobOutput], None],
        is_compiled: Callable[[GenerateOptions], bool],
        compile_grammar: Callable[[GenerateOptions], None],
    ) -> None:
        """`take(wait)` returns the messages that have arrived; if `wait`, it returns after a
        message or after `wake`. `tell` sends an output at once. `compile_grammar` raises nothing
        and may be called by several threads.
        """
        self._take, self._wake, self._tell = take, wake, tell
        self._is_compiled, self._compile = is_compiled, compile_grammar
        self._held: set[int] = set()  # jobs whose grammars are being compiled
        self._lock = threading.Lock()  # held while the set and the queue are changed
        self._ready: deque[Submit] = deque()
        self._threads = ThreadPoolExecutor(N_THREADS, thread_name_prefix="grammars")

    def receive(self, wait: bool) -> list[ToEngine]:
        """Return what has arrived and is compiled; with `wait`, at least one message.

        One thread may call it at a time.
        """
        while True:
            messages = [message for message in self._take(wait) if not self._keeps(message)]
            with self._lock:
                ready = list(self._ready)
                self._ready.clear()
            if messages or ready or not wait:
                return [*ready, *messages]

    def _keeps(self, message: ToEngine) -> bool:
        """True for a job that is held back, and for the end of such a job."""
        if isinstance(message, Cancel):
            with self._lock:
                if message.job_id not in self._held:
                    return False
                self._held.discard(message.job_id)
            self._tell(JobOutput(message.job_id, Finished()))
            return True
        if not isinstance(message, Submit) or isinstance(message.job, EngineCall):
            return False
        options = message.job.options
        if self._is_compiled(options):
            return False
        with self._lock:
            self._held.add(message.job_id)
        self._threads.submit(self._work, message, options)
        return True

    def _work(self, submit: Submit, options: GenerateOptions) -> None:
        with self._lock:
            if submit.job_id not in self._held:
                return  # its client has left
        try:
            self._compile(options)
        finally:
            with self._lock:
                if submit.job_id in self._held:
                    self._held.discard(submit.job_id)
                    self._ready.append(submit)
            self._wake()
