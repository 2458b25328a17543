"""Measures the cost of drafters that never draft, on the embedded target.

T(n) is set to n T(1), at which no draft pays. Texts of each set of drafters are compared with texts
of a session without drafters, by turns. Prints one JSON object.

Usage: scripts/lab/run idle-drafts [REPETITIONS] [TOKENS] [THREADS]
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from lab.timing import by_turns
from offload.errors import OffloadError
from specdec.options import OF_TEXT, DrafterName
from specoffload.config.environment import read_host
from specoffload.config.options import Options
from specoffload.config.resolution import Config, demo_file, demo_prompts, resolve
from specoffload.generation.generation import GenerateOptions
from specoffload.generation.statistics import GenerationStats
from specoffload.session.session import Session

SETS: dict[str, tuple[DrafterName, ...]] = {
    "nothing": (DrafterName.NONE,),
    "nothing again": (DrafterName.NONE,),
    "n-grams": OF_TEXT,
    "mtp": (DrafterName.MTP,),
    "draft": (DrafterName.DRAFT,),
    "all": (*OF_TEXT, DrafterName.MTP, DrafterName.DRAFT),
}
_N_SIZES = 64


def config_with(drafters: Sequence[DrafterName], n_threads: int) -> Config:
    """The embedded pair with these drafters, and a T(n) at which none pays."""
    options = Options(threads=n_threads, device="cpu", draft=demo_file("draft.gguf"), ctx_size=2048)
    options = replace(options, spec=replace(options.spec, drafters=tuple(drafters)))
    config = resolve(options, read_host())
    costs = ",".join(["1"] * _N_SIZES)
    given = None if drafters == (DrafterName.NONE,) else costs
    return replace(config, spec=replace(config.spec, batch_costs=given, use_profile=True))


def generated(session: Session, prompt: str, n_tokens: int) -> GenerationStats:
    session.forget()
    options = GenerateOptions(n_predict=n_tokens, ignore_eos=True)
    *_, last = session.generate(prompt, options)
    assert last.stats is not None
    return last.stats


def measured(n_repeats: int, n_tokens: int, n_threads: int) -> dict[str, Any]:
    """Microseconds per token of each set, in turns, and counters of the last text."""
    counters: dict[str, dict[str, float]] = {}
    with ExitStack() as opened:
        sessions = {}
        for name, drafters in SETS.items():
            try:
                session = Session(config_with(drafters, n_threads), keeps_hits=False)
            except OffloadError as e:
                print(f"{name} is left out: {e}", file=sys.stderr)
                continue
            sessions[name] = opened.enter_context(session)
        prompts = demo_prompts("code")

        def token_us(name: str, nth: int) -> float:
            stats = generated(sessions[name], prompts[nth % len(prompts)], n_tokens)
            counters[name] = {"draft_steps": stats.n_draft_steps, "drafted": stats.n_drafted}
            return stats.decode_s / stats.n_tokens * 1e6

        sets = {name: partial(token_us, name) for name in sessions}
        times_us = by_turns(sets, n_repeats, n_warm=1)
    plain = times_us["nothing"]
    return {
        name: {
            "us_per_token": round(statistics.median(found), 1),
            "over_plain": round(
                statistics.median([a / b for a, b in zip(found, plain, strict=True)]), 4
            ),
        }
        | counters[name]
        for name, found in times_us.items()
    }


def main() -> None:
    given = [int(word) for word in sys.argv[1:]]
    n_repeats, n_tokens, n_threads = (*given, *(9, 400, 1)[len(given) :])
    print(json.dumps(measured(n_repeats, n_tokens, n_threads), indent=1))


if __name__ == "__main__":
    main()
