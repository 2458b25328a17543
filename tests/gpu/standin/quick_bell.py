"""Runs the program so that its doorbell is used in all decodes, and its watchdog acts early.

    quick_bell.py serve MODEL.gguf [flags of specoffload serve]

The watchdog of `offload/stream/doorbell.py` acts after 2 s without progress, and not after 15. The
other way of split layers is never timed. Spawned processes import this file, too.
"""

from __future__ import annotations

from offload.stream import doorbell
from specoffload.__main__ import main

doorbell.MOST_SECONDS = 2
doorbell.FIRST_TRIAL = 1 << 30

if __name__ == "__main__":
    main()
