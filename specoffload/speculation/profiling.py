"""Measuring a profile: what to measure in the time there is, and on which text.

`specoffload profile` measures every batch size up to 64 at two depths. A first start has some
seconds: it measures sizes that span the whole range, then those between as long as the time
lasts, and interpolates the rest; served rounds correct both afterwards.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from offload.engine import Engine
from offload.errors import BadRequest
from offload.timing import decode_s
from specdec.costs.measure import MeasureOptions, measure, measure_step
from specdec.costs.profile import CostProfile, ProfileKey
from specdec.errors import BadProfile
from specdec.whole_file import read_text
from specoffload.config.resolution import demo_file
from specoffload.errors import UsageError
from specoffload.speculation.draft_model import DraftModel

SEQUENCE = 0
# A first start may spend so many seconds, or as many times T(1) where that is more.
BUDGET_S, _BUDGET_TOKENS, _MOST_BUDGET_S = 4.0, 66.0, 12.0
N_MAX = 64
DEPTHS = (16, 512)
_QUICK_DEPTHS = (16, 192)
_DEEP_BELOW_S = 0.02  # T(1) up to which a first start measures at both
_SPANNING = (1, 64, 8, 32, 2, 16, 4)
_BETWEEN = (3, 5, 6, 9, 12, 24, 48, 7, 33, 10, 17, 20, 40, 56)
_LEAST_ROOM = 8  # tokens of context
_QUICK_MOST = 12  # repetitions of a size
LEAD_TOKENS = 16  # before a timed decode, where weights stream through slots

Progress = Callable[[float], None]


def real_text(engine: DraftModel, file: Path | None = None) -> list[int]:
    """Tokens of real text, since the experts that a batch uses depend on it.

    The embedded pair's prompts, code and prose, or `file`. Raises UsageError.
    """
    if file is None:
        rows = json.loads(demo_file("prompts.json").read_text(encoding="utf-8"))
        text = "\n".join(row["text"] for row in rows)
    else:
        try:
            text = read_text(file)
        except (OSError, UnicodeDecodeError) as e:
            raise UsageError(f"--text {file}: cannot be read as UTF-8 text ({e})") from e
    return engine.tokenize(text, add_special=False, parse_special=False)


def full_options(
    n_max: int, n_repeats: int, n_text: int, n_ctx: int, *, streams: bool = False
) -> MeasureOptions:
    """Every batch size; the deepest depth that the text and the context have room for. `streams`
    is true where batches of these sizes find some of their weights in slots.

    Raises BadProfile when not even the shallow one fits.
    """
    room = min(n_text, n_ctx) - n_max
    depths = tuple(sorted({min(depth, room) for depth in DEPTHS}))
    if depths[0] < 0:
        raise BadProfile(
            f"measuring batches of {n_max} needs as many tokens of text and of context; there are "
            f"{n_text} and {n_ctx}"
        )
    return MeasureOptions(
        n_max,
        n_repeats,
        depths,
        n_most=2 * n_repeats,
        lead_tokens=LEAD_TOKENS if streams else 0,
    )


def quick_plan(
    one_s: float, edges: Sequence[int], n_room: int, *, streams: bool = False
) -> MeasureOptions:
    """The measurement of a first start, given T(1): pure. `streams` as for `full_options`.

    `edges` are sizes from which another way of computing is chosen (--min-batch); `n_room` tokens
    of text and context are there. All sizes up to the largest batch can be drafted for, whatever
    the time lasted for.
    """
    n_max = min(N_MAX, n_room)
    near = [n for edge in edges for n in (edge - 1, edge)]
    ordered = (*_SPANNING, *near, *_BETWEEN, *range(1, n_max + 1))
    sizes = tuple(dict.fromkeys(min(n, n_max) for n in ordered if n >= 1))
    depths = _QUICK_DEPTHS if one_s <= _DEEP_BELOW_S else (0,)  # reading 16 tokens would take long
    fitting = tuple(d for d in depths if d + n_max <= n_room) or (n_room - n_max,)
    budget_s = min(max(BUDGET_S, _BUDGET_TOKENS * one_s), _MOST_BUDGET_S)
    lead_tokens = LEAD_TOKENS if one_s <= _DEEP_BELOW_S else LEAD_TOKENS // 2
    return MeasureOptions(
        n_max,
        1,
        fitting,
        sizes,
        n_most=_QUICK_MOST,
        budget_s=budget_s,
        lead_tokens=lead_tokens if streams else 0,
    )


def measure_quickly(
    target: Engine,
    draft: DraftModel | None,
    key: ProfileKey,
    on_progress: Progress | None = None,
) -> tuple[CostProfile, str]:
    """The profile of a first start, and what was measured. Raises BadProfile."""
    text = real_text(target)
    room = min(len(text), target.n_ctx)
    if room <= _LEAST_ROOM:
        raise BadProfile(f"a context of {target.n_ctx} tokens is too short to measure a profile")
    began = time.perf_counter()
    one_s = min(decode_s(target.sequences, SEQUENCE, text[i : i + 1]) for i in range(2))
    edges = () if target.plan is None else (target.min_batch.experts, target.min_batch.dense)
    options = quick_plan(one_s, edges, room, streams=streams_in_verification(target))
    costs = run_measure(target, draft, text, options, key, on_progress)
    took_s = time.perf_counter() - began
    n_firm = costs.n_max - len(costs.uncertain)
    return costs, (
        f"measured in {took_s:.1f} s: {n_firm} of {costs.n_max} batch sizes firmly at "
        f"{len(options.depths)} depth(s), the others once or interpolated"
    )


def measure_again(
    target: Engine, costs: CostProfile, on_progress: Progress | None = None
) -> tuple[CostProfile, str]:
    """`costs` with the sizes timed again that contradict others, and what came of it, in half the
    time of a first start. Raises BadProfile."""
    text, began = real_text(target), time.perf_counter()
    most = min(len(text), target.n_ctx, target.options.n_outputs)
    sizes = tuple(n for n in costs.to_retry if n <= most)
    if not sizes:
        return costs, "batch sizes that contradict others are larger than this run's"
    options = MeasureOptions(
        max(sizes),
        2,
        (0,),
        tuple(dict.fromkeys((1, *sizes))),
        n_most=_QUICK_MOST,
        budget_s=BUDGET_S / 2,
        lead_tokens=LEAD_TOKENS if streams_in_verification(target) else 0,
    )
    found = run_measure(target, None, text, options, costs.key, on_progress)
    times_s = {t.n: (found.step_s[t.n - 1], t.n_repeats) for t in found.timed if t.n in sizes}
    again = costs.retried(times_s)
    n_left = len(set(again.to_retry).intersection(times_s))
    return again, (
        f"{len(sizes)} batch sizes contradicted others, {len(times_s)} of them were measured again "
        f"in {time.perf_counter() - began:.1f} s, and {n_left} still do"
    )


def streams_in_verification(target: Engine) -> bool:
    """True if batches of up to N_MAX tokens find some of their weights in slots."""
    if target.plan is None or not target.plan.streamed:
        return False
    return min(target.min_batch.experts, target.min_batch.dense) <= N_MAX


def draft_step_s(draft: DraftModel, text: Sequence[int]) -> float:
    """The time of one token of an idle draft."""
    return measure_step(draft.sequences, SEQUENCE, text, 16)


def run_measure(
    target: Engine,
    draft: DraftModel | None,
    text: Sequence[int],
    options: MeasureOptions,
    key: ProfileKey,
    on_progress: Progress | None = None,
) -> CostProfile:
    """`specdec.measure` on an engine whose sequence is empty. Raises BadProfile or BadRequest."""
    if not 0 < options.n_max <= target.options.n_outputs:
        raise BadRequest(f"batches of {options.n_max} exceed {target.options.n_outputs} rows")
    theirs = None if draft is None else real_text(draft)
    costs = measure(
        target.sequences,
        text,
        options,
        draft=None if draft is None else draft.sequences,
        draft_text=theirs,
        key=key,
        on_progress=on_progress,
    )
    threads = target.options.n_threads
    many = f", {threads} thread{'s' * (threads > 1)}" if threads else ""
    where = target.choice.name + many
    return replace(costs, title=f"{target.facts.path.name} on {where}")
