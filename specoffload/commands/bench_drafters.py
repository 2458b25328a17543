"""`specoffload bench --drafters`: compares drafters on this model and machine.

Each drafter continues the same texts alone, and all of them together, with the default policy. The
table shows what each is worth here, and if drafting pays at all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from offload.plan.row_draft import no_mtp_reason
from offload.times.steadiness import speed_words
from specdec.options import ROW_FILES, DrafterName
from specoffload import report
from specoffload.bench.comparison import compared_decodes, doubts
from specoffload.bench.load import warn_of_load
from specoffload.bench.paths import Measured, SessionPath, Workload, measure_in_turns
from specoffload.commands.bench import (
    N_PROMPTS,
    commit,
    fit_together,
    machine,
    with_bench_context,
)
from specoffload.config.options import BenchOptions
from specoffload.config.resolution import Config, demo_prompts
from specoffload.cpu_load import Watch
from specoffload.opening.header import target_facts
from specoffload.session.session import Session
from specoffload.session.startup_lines import show_always_shown

NOTHING, TOGETHER = "nothing", "all together"
_FILES = frozenset({DrafterName.DRAFT, *ROW_FILES})  # drafters that --draft opens
_NONE = (DrafterName.NONE,)


def bench_drafters(config: Config, own: BenchOptions) -> None:
    """Measure every drafter of `config` alone, none, and all together. Print a table."""
    warn_of_load()
    config = with_bench_context(config)
    names = drafters_of(config)
    paths = {NOTHING: drafting(config, _NONE)}
    paths |= {str(name): drafting(config, (name,)) for name in names}
    if len(names) > 1:
        paths[TOGETHER] = drafting(config, names)
    work = Workload(
        texts=(*demo_prompts("code")[:N_PROMPTS], *demo_prompts("prose")[:N_PROMPTS]),
        long_text="\n".join(demo_prompts("code")),
        n_predict=own.n_predict,
        n_long=1,  # drafters do not change the speed of prompts
    )
    watch = Watch()
    with report.progress("comparing drafters"):
        by_drafter = measure_in_turns(
            {name: functools.partial(_opened, path) for name, path in paths.items()},
            work,
            repetitions=own.repetitions,
            together=fit_together(config, len(paths)),
            on_left_out=lambda name, e: report.note(f"{name} is left out: {e}"),
        )
    doubtful = doubts(by_drafter, watch.others(), of_prefill=False)
    result = compared(by_drafter)
    _show(result, doubtful)
    conditions = {"machine": machine(), "commit": commit(), "model": config.model.name}
    report.data({**result, "unreliable": doubtful, **conditions})


def drafters_of(config: Config) -> tuple[DrafterName, ...]:
    """The drafters that --spec-type names; otherwise all that this model has, and `ngram-mod`."""
    named = config.spec.options.drafters
    if "drafters" in config.spec.options.given:
        return tuple(name for name in named if name is not DrafterName.NONE)
    own = () if no_mtp_reason(target_facts(config)) else (DrafterName.MTP,)
    files = tuple(name for name in named if name in _FILES and config.spec.draft is not None)
    return (*own, *files, DrafterName.NGRAM_MOD)


def drafting(config: Config, names: Sequence[DrafterName]) -> Config:
    """Returns `config` with these drafters, and without a draft model that none of them uses."""
    spec = config.spec
    options = replace(spec.options, drafters=tuple(names))
    draft = spec.draft if _FILES & set(names) else None
    return replace(config, spec=replace(spec, options=options, draft=draft))


@contextmanager
def _opened(config: Config) -> Iterator[SessionPath]:
    with Session(config, keeps_hits=False) as session:
        if session.speculation is None:
            show_always_shown(session.notes)
        yield SessionPath(session)


def compared(by_drafter: Mapping[str, Measured]) -> dict[str, Any]:
    """Speeds by drafter, and the speed of all together over that of the best alone. Pure.

    A ratio that means nothing is None.
    """
    speeds = {name: measured.median.tokens_per_s for name, measured in by_drafter.items()}
    alone = {name: speed for name, speed in speeds.items() if name != TOGETHER}
    best = max(alone, key=lambda name: alone[name])
    rows = {
        name: {
            "decode_tps": speeds[name],
            "acceptance_rate": measured.median.acceptance_rate,
            "tokens_per_round": measured.median.tokens_per_round,
            "vs_best": compared_decodes(measured, by_drafter[best]),
            "shown_tps": speed_words(
                [stats.tokens_per_s for stats in measured.written], speeds[name]
            ),
        }
        for name, measured in by_drafter.items()
    }
    out: dict[str, Any] = {"drafters": rows, "best_alone": best}
    return out | ({"together_vs_best": rows[TOGETHER]["vs_best"]} if TOGETHER in rows else {})


def _show(result: Mapping[str, Any], doubtful: Sequence[str]) -> None:
    mark = " ?" if doubtful else ""
    rows = []
    for name, row in result["drafters"].items():
        accepted = row["acceptance_rate"]
        rows.append(
            (
                name,
                row["shown_tps"],
                "" if accepted is None else f"{accepted:.0%}",
                f"{row['tokens_per_round']:.2f}",
                "-" if row["vs_best"] is None else f"{row['vs_best']:.2f}{mark}",
            )
        )
    heads = ("drafts by", "answer t/s", "accepted", "tokens/round", "x best alone")
    report.table("drafters, each with the default policy", heads, rows)
    for doubt in doubtful:
        report.paragraph(f"? not reliable: {doubt}")
