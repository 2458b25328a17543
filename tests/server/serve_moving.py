"""`specoffload serve` in which every idle conversation leaves the cells before others' next decode.

python serve_moving.py serve MODEL ...

The engine process imports this file, too. A part of a copy has only a few tokens of a tiny model.
"""

from __future__ import annotations

from offload.sequences import sequences
from specoffload.__main__ import main
from specoffload.slots.idle_rents import MoveCosts


def _nothing(_: MoveCosts, __: int) -> float:
    return 0.0


MoveCosts.seconds = _nothing  # type: ignore[method-assign]
sequences.PART_BYTES = 32 << 10  # type: ignore[attr-defined]

if __name__ == "__main__":
    main()
