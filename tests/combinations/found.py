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
    # A measurement went back to tokens that sliding windows had forgotten.
    Case.of("command", memory="sinks", device="sim", measures="at length"),
    # A plan did not say that most experts in RAM cost a third of the prompts' speed.
    Case.of("command", command="plan elsewhere", memory="sinks", experts="in RAM"),
    # A kept time of split layers that another program had lengthened was believed for good.
    Case.of("command", device="sim", experts="split", start="disturbed"),
    # A folder that cannot be written threw away what had been found for minutes.
    Case.of("command", command="tune numa", start="read-only"),
    # A driver took more than the header promised, so that a start with a larger --vram was refused.
    Case.of("session", memory="tables", device="stand-in", experts="split"),
    Case.of("session", memory="dense", device="stand-in", experts="split"),
    # What a flag costs was said by `run`, `chat` and `serve` alone. A server's line begins with the
    # time, so its sentence was not found.
    Case.of("command", command="serve", device="sim", cache="RAM"),
    Case.of("command", command="profile", device="sim", cache="RAM"),
    # A question after one with an image that had been refused was refused, too.
    Case.of("request", history="unanswered image", length="short"),
)
