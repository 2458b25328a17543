"""The trace of a session (--trace): events of its generations, without those of its opening."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from offload.engine import Engine
from offload.errors import DeviceFailed
from offload.trace.trace import Trace
from specdec.whole_file import named_file
from specoffload.generation.statistics import StepTrace
from specoffload.slots.batcher import Batcher

log = logging.getLogger("specoffload.session")


class SessionTrace:
    """Begins and ends the trace, and writes it. Does nothing if nothing is traced."""

    def __init__(self, trace: Trace, path: Path | None) -> None:
        """`path`: the file to write; None: the trace is only read in this process."""
        self._trace, self._path = trace, path
        self._untraced_bytes = 0  # streamed before the trace began

    def begin(self, target: Engine, batcher: Batcher, piece: Callable[[int], bytes]) -> None:
        """Begin after opening, so that the trace excludes the measurements made until then."""
        if not self._trace.is_on:
            return
        target.settle()
        self._untraced_bytes = target.counters().streamed_bytes
        self._trace.restart()
        batcher.on_step.append(StepTrace(self._trace, piece).add)

    def end(self, target: Engine) -> None:
        """Add the bytes copied in the traced time. Call it before the target is closed."""
        if self._trace.is_on:
            with suppress(DeviceFailed):  # closing goes on; the decode has reported the failure
                target.settle()
            copied = target.counters().streamed_bytes - self._untraced_bytes
            self._trace.totals["streamed_bytes"] = copied

    def write(self) -> None:
        trace = self._trace
        if self._path is None or not trace.is_on:
            return
        trace.write(self._path, named_file)
        if trace.n_dropped:
            log.warning(
                "the trace has the last %d events; %d older ones were dropped",
                len(trace),
                trace.n_dropped,
            )
