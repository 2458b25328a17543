"""Times batches of several sequences, as llama-batched-bench does. Results have its key names.

First a prompt of `pp` tokens is evaluated for each of `pl` sequences. Then every sequence writes
`tg` tokens, and each decode has one token of every sequence.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from offload.ggml.context import FLASH_ATTN
from specoffload import report
from specoffload.bench.llama_bench import markdown
from specoffload.config.resolution import Config
from specoffload.config.speculation import SpecConfig
from specoffload.errors import UsageError
from specoffload.opening.draft_model import real_text
from specoffload.session.session import Session
from specoffload.session.startup_lines import show_always_shown

# llama-batched-bench's columns, in its order. In JSONL, the keys of `_conditions` precede them.
COLUMNS = ("pp", "tg", "pl", "n_kv", "t_pp", "speed_pp", "t_tg", "speed_tg", "t", "speed")
_HEADS = ("PP", "TG", "B", "N_KV", "T_PP s", "S_PP t/s", "T_TG s", "S_TG t/s", "T s", "S t/s")

_SHOWN = (
    "PP",
    "TG",
    "B",
    "N_KV",
    "S_PP t/s",
    "S_TG t/s",
    "S t/s",
    "T s",
)  # columns that fit a terminal 80 wide


@dataclass(frozen=True)
class Sweep:
    """Cases to measure: every combination of the three tuples.

    `n_pp` are prompt lengths in tokens, `n_tg` are numbers of written tokens per sequence, and
    `n_pl` are numbers of sequences. If `is_pp_shared`, all sequences share one prompt.
    """

    n_pp: tuple[int, ...]
    n_tg: tuple[int, ...]
    n_pl: tuple[int, ...]
    is_pp_shared: bool = False

    def cases(self) -> Iterator[tuple[int, int, int]]:
        """All cases (pp, tg, pl), in llama-batched-bench's order."""
        return itertools.product(self.n_pp, self.n_tg, self.n_pl)

    def n_kv(self, pp: int, tg: int, pl: int) -> int:
        """Number of KV cells that a case needs."""
        return pp + pl * tg if self.is_pp_shared else pl * (pp + tg)


def speeds(sweep: Sweep, pp: int, tg: int, pl: int, pp_s: float, tg_s: float) -> dict[str, Any]:
    """The row of a case that took `pp_s` seconds for prompts and `tg_s` for writing. Pure."""
    n_read, took_s = pp if sweep.is_pp_shared else pl * pp, pp_s + tg_s
    return {
        "pp": pp, "tg": tg, "pl": pl, "n_kv": sweep.n_kv(pp, tg, pl),
        "t_pp": pp_s, "speed_pp": n_read / pp_s if pp_s else 0.0,
        "t_tg": tg_s, "speed_tg": pl * tg / tg_s if tg_s else 0.0,
        "t": took_s, "speed": (n_read + pl * tg) / took_s if took_s else 0.0,
    }  # fmt: skip


def written(rows: Sequence[dict[str, Any]], form: str) -> str:
    """Rows as llama-batched-bench's text. Raises UsageError unless `form` is "md" or "jsonl"."""
    if form == "jsonl":
        return "".join(json.dumps(row) + "\n" for row in rows)
    if form == "md":
        return markdown(_HEADS, [cells(row) for row in rows])
    raise UsageError(
        f"--output {form}: -npl measures as llama-batched-bench, which has md and jsonl"
    )


def cells(row: dict[str, Any]) -> list[str]:
    """A row's values as rounded text, in the order of COLUMNS."""
    return [
        str(v) if isinstance(v := row[key], int) else f"{v:.3f}" if key[0] == "t" else f"{v:.2f}"
        for key in COLUMNS
    ]


def bench_batched(config: Config, sweep: Sweep, form: str | None) -> None:
    """Measure every case that fits the context, and print the rows in `form`; None: a table."""
    if form is not None:
        written([], form)
        report.only_data(True)
    most = max(sweep.n_kv(*case) for case in sweep.cases())
    config = replace(
        config,
        spec=SpecConfig(use_profile=False, profile_dir=config.spec.profile_dir),
        ctx_size=config.ctx_size or most,
        parallel=max(sweep.n_pl),
    )
    rows = []
    with Session(config) as session, report.progress("measuring batches") as bar:
        show_always_shown(session.notes)
        conditions = _conditions(session, sweep)
        cases = list(sweep.cases())
        _measure(session, sweep, *cases[0])  # warm-up, since the first run is too slow
        for i, case in enumerate(cases):
            if sweep.n_kv(*case) > session.target.n_ctx:
                needed = sweep.n_kv(*case)
                report.note(f"pp {case[0]}, tg {case[1]}, pl {case[2]} is left out: it needs a "
                            f"context of {needed} (--ctx-size)")  # fmt: skip
                continue
            rows.append(conditions | speeds(sweep, *case, *_measure(session, sweep, *case)))
            bar((i + 1) / len(cases))
    if form is not None:
        report.raw(written(rows, form))
        return
    shown = [_HEADS.index(head) for head in _SHOWN]
    report.table(
        "sequences at once (B), tokens/s of reading, writing and both",
        _SHOWN,
        [[cells(row)[i] for i in shown] for row in rows],
    )
    report.data({"batched": rows})


def _conditions(session: Session, sweep: Sweep) -> dict[str, Any]:
    o = session.target.layout.context
    return {
        "n_kv_max": session.target.n_ctx, "n_batch": session.config.batch_size,
        "n_ubatch": o.n_ubatch, "flash_attn": FLASH_ATTN[o.flash_attn],
        "is_pp_shared": int(sweep.is_pp_shared), "n_gpu_layers": session.target.facts.n_layers
        if session.target.start.choice.on_gpu else 0,
        "n_threads": o.n_threads or 0, "n_threads_batch": o.n_threads_batch or 0,
    }  # fmt: skip


def _measure(session: Session, sweep: Sweep, pp: int, tg: int, pl: int) -> tuple[float, float]:
    """Returns the seconds of evaluating the prompts, and of writing. Leaves all sequences empty."""
    sequences, n_slots = session.target.sequences, session.config.parallel
    tokens = itertools.cycle(real_text(session.target))
    for i in range(n_slots):
        sequences.rewind(i, 0)
    began = time.perf_counter()
    for i in range(1 if sweep.is_pp_shared else pl):
        for at in range(0, pp, sequences.n_batch):
            n = min(sequences.n_batch, pp - at)
            last = at + n == pp
            sequences.extend_batch([(i, list(itertools.islice(tokens, n)), int(last))])
    if sweep.is_pp_shared and pp:
        for i in range(1, pl):
            sequences.share(0, i, pp)
    read = time.perf_counter()
    for _ in range(tg):
        sequences.extend_batch([(i, [next(tokens)], 1) for i in range(pl)])
    ended = time.perf_counter()
    for i in range(n_slots):
        sequences.rewind(i, 0)
    return read - began, ended - read
