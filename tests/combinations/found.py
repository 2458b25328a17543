"""The smallest combinations that have shown a fault. Each has been mended as its kind.

`scripts/test` plays all of them. A line has the case, and in a comment what was wrong.
"""

from __future__ import annotations

from combinations.cases import Case

FOUND: tuple[Case, ...] = (
    # A restored slot had no checkpoints, so none of its tokens were found again.
    Case.of("session", memory="tables", event="restored"),
    Case.of("session", memory="recurrent", event="restored"),
    Case.of("session", memory="hybrid", event="restored", device="sim", experts="streamed"),
    # A limit on reasoning wrote a token that the grammar of a forced call refused.
    Case.of("request", constraint="required", reasoning="limit 8", sampling="seeded"),
    Case.of("request", api="responses", constraint="named", reasoning="limit 0"),
)
