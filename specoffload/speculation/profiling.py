"""Measuring a profile: what to measure in the time there is, and on which text.

`specoffload profile` measures every batch size up to 64 at two depths. A first start measures
fewer sizes and interpolates, within a few seconds where the model allows it; served rounds
correct both afterwards.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from offload.engine import Engine
from offload.errors import BadRequest
from offload.timing import median_decode_s
from specdec.costs.measure import MeasureOptions, measure, measure_step
from specdec.costs.profile import CostProfile, ProfileKey
from specdec.errors import BadProfile
from specoffload.config.resolution import demo_file
from specoffload.errors import UsageError

SEQUENCE = 0
BUDGET_S = 4.0  # what a first start may spend where the model is fast enough
N_MAX = 64
DEPTHS = (16, 512)
_QUICK_DEPTHS = (16, 192)
_QUICK_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 17, 20, 24, 32, 33)
_FEWER_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 17)
_FEWEST_SIZES = (1, 2, 4, 8)

Progress = Callable[[float], None]


@dataclass(frozen=True)
class Planned:
    """A measurement to make, and the words for what it leaves out."""

    options: MeasureOptions
    words: str


def real_text(engine: Engine, file: Path | None = None) -> list[int]:
    """Tokens of real text, since the experts that a batch uses depend on it.

    The embedded pair's prompts, code and prose, or `file`. Raises UsageError.
    """
    if file is None:
        rows = json.loads(demo_file("prompts.json").read_text(encoding="utf-8"))
        text = "\n".join(row["text"] for row in rows)
    else:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise UsageError(f"--text {file}: cannot be read as UTF-8 text ({e})") from e
    return engine.tokenize(text, add_special=False, parse_special=False)


def full_options(n_max: int, n_repeats: int, n_text: int, n_ctx: int) -> MeasureOptions:
    """Every batch size; the deepest depth that the text and the context have room for.

    Raises BadProfile when not even the shallow one fits.
    """
    room = min(n_text, n_ctx) - n_max
    depths = tuple(sorted({min(depth, room) for depth in DEPTHS}))
    if depths[0] < 0:
        raise BadProfile(
            f"measuring batches of {n_max} needs as many tokens of text and of context; there are "
            f"{n_text} and {n_ctx}"
        )
    return MeasureOptions(n_max, n_repeats, depths)


def quick_plan(
    one_s: float,
    many_s: float,
    edges: Sequence[int],
    n_room: int,
    budget_s: float = BUDGET_S,
    longest: int = 0,
) -> Planned:
    """The most telling measurement within `budget_s`, given T(1) and T(33) roughly.

    `longest` is a batch size that is measured whatever it takes; `edges` are sizes from which
    another way of computing is chosen (--min-batch). Where even the least plan takes longer than
    the budget, it is made all the same: pure function.
    """
    for sizes, depths in (
        (_QUICK_SIZES, _QUICK_DEPTHS),
        (_FEWER_SIZES, _QUICK_DEPTHS),
        (_FEWER_SIZES, _QUICK_DEPTHS[:1]),
        (_FEWEST_SIZES, _QUICK_DEPTHS[:1]),
    ):
        n_max = max(sizes[-1], longest)
        near = {n for edge in edges for n in (edge - 1, edge) if 1 < n <= n_max}
        chosen = tuple(sorted({*sizes, *near, n_max}))
        slope = (many_s - one_s) / (_QUICK_SIZES[-1] - 1)
        # Each decode that is timed follows one of the same size that is not.
        set_s = 2 * sum(one_s + slope * (n - 1) for n in chosen) * len(depths)
        n_repeats = max(1, min(4, int(budget_s / set_s) - 1)) if set_s > 0 else 4
        if set_s * (1 + n_repeats) <= budget_s:
            break
    fitting = tuple(d for d in depths if d + n_max <= n_room) or (max(0, n_room - n_max),)
    words = (
        f"{len(chosen)} of {n_max} batch sizes at {len(fitting)} depth(s), {n_repeats} time(s), "
        "the others interpolated"
    )
    return Planned(MeasureOptions(n_max, n_repeats, fitting, chosen), words)


def measure_quickly(
    target: Engine,
    draft: Engine | None,
    key: ProfileKey,
    on_progress: Progress | None = None,
    budget_s: float = BUDGET_S,
    longest: int = 0,
) -> tuple[CostProfile, str]:
    """The profile of a first start, up to batches of `longest` at least, and what was measured.
    Raises BadProfile."""
    text = real_text(target)
    room = min(len(text), target.n_ctx)
    if room <= _FEWEST_SIZES[-1]:
        raise BadProfile(f"a context of {target.n_ctx} tokens is too short to measure a profile")
    one_s = _once(target, text[:1])
    many = min(_QUICK_SIZES[-1], room)
    many_s = _once(target, text[:many])
    edges = () if target.plan is None else (target.min_batch.experts, target.min_batch.dense)
    planned = quick_plan(one_s, many_s, edges, room, budget_s, longest)
    options = planned.options
    if options.n_max > room:
        sizes = tuple(n for n in options.sizes if n <= room)
        options = MeasureOptions(sizes[-1], options.n_repeats, (0,), sizes)
    began = time.perf_counter()
    costs = run_measure(target, draft, text, options, key, on_progress)
    return costs, f"measured in {time.perf_counter() - began:.1f} s: {planned.words}"


def _once(target: Engine, tokens: Sequence[int]) -> float:
    """One decode of `tokens`, after one that is dropped."""
    return median_decode_s(target.sequences, SEQUENCE, [tokens] * 2)


def draft_step_s(draft: Engine, text: Sequence[int]) -> float:
    """The time of one token of an idle draft."""
    return measure_step(draft.sequences, SEQUENCE, text, 16)


def run_measure(
    target: Engine,
    draft: Engine | None,
    text: Sequence[int],
    options: MeasureOptions,
    key: ProfileKey,
    on_progress: Progress | None = None,
) -> CostProfile:
    """`specdec.measure` on an engine whose sequence is empty, with progress per decode."""
    sizes = options.sizes or tuple(range(1, options.n_max + 1))
    n_decodes = len(options.depths) * (1 + options.n_repeats) * len(sizes)
    n_calls = 0

    def clock() -> float:
        nonlocal n_calls
        n_calls += 1
        if on_progress is not None:
            on_progress(min(1.0, n_calls / (2 * n_decodes)))
        return time.perf_counter()

    if not 0 < options.n_max <= target.options.n_outputs:
        raise BadRequest(f"batches of {options.n_max} exceed {target.options.n_outputs} rows")
    theirs = None if draft is None else real_text(draft)
    return measure(
        target.sequences,
        text,
        options,
        draft=None if draft is None else draft.sequences,
        draft_text=theirs,
        key=key,
        clock=clock,
    )
