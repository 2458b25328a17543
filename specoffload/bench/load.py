"""Warns of other programs that would make measured times too long."""

from __future__ import annotations

import time

from specoffload import report
from specoffload.cpu_load import Load, Watch

_LOOK_S = 0.3


def load_sentence(load: Load) -> str:
    """A warning if other programs disturb the timing, else ""."""
    if not load.is_busy:
        return ""
    return (
        f"this machine is busy: {load.words} in the last {_LOOK_S:g} s, so measurements will be "
        "too slow"
    )


def warn_of_load() -> None:
    """Measure the load for a third of a second, and warn if other programs will disturb timing."""
    watch = Watch()
    time.sleep(_LOOK_S)
    if sentence := load_sentence(watch.others()):
        report.note(sentence)
