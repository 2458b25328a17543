"""From resolved options to a drafter, a policy and an acceptance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from specdec.costs.calibration import Calibration
from specdec.costs.profile import CostProfile
from specdec.decoding.accept import Acceptance, MatchAcceptance
from specdec.drafters.chain import ChainDrafter
from specdec.drafters.lookup import LookupCache, NgramCache
from specdec.drafters.model import ModelDrafter
from specdec.drafters.ngram_map import NgramMapK, NgramMapK4V
from specdec.drafters.ngram_mod import NgramMod
from specdec.drafters.ngram_simple import NgramSimple
from specdec.drafters.none import NoDrafter
from specdec.drafters.suffix import SuffixDrafter
from specdec.errors import BadOption, BadProfile
from specdec.options import LONGEST, MOST_DRAFTED, PRICED, SpecOptions
from specdec.policies.bandit import Bandit
from specdec.policies.cost_curve import N_FUDGED, fit
from specdec.policies.fixed import Fixed
from specdec.policies.p_min import PMin
from specdec.policies.published import Costs, PMins, Ratio, Rational, Speed
from specdec.policies.throughput import Throughput
from specdec.simulation.synthetic import (
    SyntheticAcceptance,
    SyntheticDrafter,
    check_rates,
    rates_of_length,
)
from specdec.types import Chooser, Drafter, Policy

_BLOCK = 4  # general text; code bears 8 to 15 (llama.cpp #10466)


def build_policy(
    options: SpecOptions, profile: CostProfile, calibration: Calibration | None = None
) -> Policy:
    """The policy over a profile, `--spec-draft-n-max` applied where given.

    Raises BadOption when the longest draft exceeds what the profile measured, BadProfile when the
    policy cannot be built on it.
    """
    typed = "--spec-draft-n-max" in options.given
    longest = min(profile.n_max - 1, MOST_DRAFTED)
    n_max = options.integer("--spec-draft-n-max") if typed else None
    if n_max is not None and n_max > longest and options.policy in PRICED:
        raise BadOption(
            f"--spec-draft-n-max {n_max}: the profile has batches up to {profile.n_max}, so "
            f"drafts up to {longest}; lower it, or give a profile of more (specoffload profile)"
        )
    if options.policy == "throughput":
        return Throughput(profile, calibration, n_max=longest if n_max is None else n_max)
    if options.policy == "p-min":
        n_min = options.integer("--spec-draft-n-min")
        p_min = options.number("--spec-draft-p-min")
        return PMin(LONGEST if n_max is None else n_max, p_min, n_min)
    block = {"fixed": Fixed, "ratio": Ratio, "bandit": Bandit}.get(options.policy)
    if block is not None:
        default = _BLOCK if options.policy == "fixed" else LONGEST
        policy: Policy = block(default if n_max is None else n_max)
        return policy
    return _published_rule(options, profile, longest if n_max is None else n_max)


def _published_rule(options: SpecOptions, profile: CostProfile, n_max: int) -> Policy:
    costs = profile.normalised
    if options.policy == "p-mins":
        return PMins(costs, n_max)
    if options.policy == "rational":
        try:
            return Rational(fit(costs[N_FUDGED:]), n_max)
        except BadProfile as e:
            raise BadProfile(
                f"--spec-policy rational: {e}; choose throughput, or p-mins, which needs no curve"
            ) from e
    if options.policy == "costs":
        return Costs(costs, options.integer("--spec-look-ahead"), n_max)
    # v3 needs the draft's speed; a draft that was not measured is taken as a twentieth of T(1).
    step_s = profile.draft_step_s or profile.step_s[0] / 20
    return Speed(profile.tokens_per_s, 1.0 / step_s, options.policy[-1], n_max)


def build_drafter(
    options: SpecOptions,
    model: Drafter | None = None,
    tokenize: Callable[[str], Sequence[int]] | None = None,
    n_vocab: int | None = None,
) -> Drafter:
    """The drafter, a chain where several are named. `model` drafts with the draft model
    (`ModelDrafter`, perhaps translated); `tokenize` reads the corpus of `suffix`; lookup caches
    must be of a vocabulary of `n_vocab`.

    Raises BadOption for files that cannot be read or are another model's.
    """
    if options.drafters == ("none",):
        return NoDrafter()
    if options.drafters == ("synthetic",):
        return SyntheticDrafter(synthetic_rates(options))
    free = [
        _lookup(options, n_vocab) if name == "ngram-cache" else _free(options, name, tokenize)
        for name in options.drafters
        if name != "draft"
    ]
    paid = model if "draft" in options.drafters else None
    if "draft" in options.drafters and paid is None:
        raise BadOption("--spec-type draft needs a draft model")
    if paid is not None and not free:
        return paid
    return free[0] if len(free) == 1 and paid is None else ChainDrafter(free, paid)


def _free(o: SpecOptions, name: str, tokenize: Callable[[str], Sequence[int]] | None) -> Drafter:
    flag = f"--spec-{name}"
    if name == "ngram-simple":
        return NgramSimple(o.integer(f"{flag}-size-n"), o.integer(f"{flag}-size-m"))
    if name in ("ngram-map-k", "ngram-map-k4v"):
        kind = NgramMapK if name == "ngram-map-k" else NgramMapK4V
        sizes = [o.integer(f"{flag}-{part}") for part in ("size-n", "size-m", "min-hits")]
        return kind(*sizes)
    if name == "ngram-mod":
        sizes = [o.integer(f"{flag}-{part}") for part in ("n-match", "n-min", "n-max")]
        return NgramMod(*sizes)
    return SuffixDrafter(min_match=o.integer(f"{flag}-min-match"), corpus=_corpus(o, tokenize))


def _lookup(options: SpecOptions, n_vocab: int | None) -> NgramCache:
    static = options.text("--lookup-cache-static")
    dynamic = options.text("--lookup-cache-dynamic")
    if dynamic is not None and not Path(dynamic).absolute().parent.is_dir():
        raise BadOption(f"--lookup-cache-dynamic {dynamic}: its folder does not exist")
    return NgramCache(
        static=LookupCache.load(Path(static), n_vocab) if static else None,
        dynamic=_dynamic(Path(dynamic), n_vocab) if dynamic else None,
    )


def _dynamic(path: Path, n_vocab: int | None) -> LookupCache:
    """The file's contents; it is written at the end."""
    return LookupCache.load(path, n_vocab) if path.exists() else LookupCache()


def _corpus(
    options: SpecOptions, tokenize: Callable[[str], Sequence[int]] | None
) -> list[Sequence[int]]:
    path = options.text("--spec-suffix-corpus")
    if path is None:
        return []
    if tokenize is None:
        raise BadOption("--spec-suffix-corpus needs a tokeniser")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise BadOption(f"--spec-suffix-corpus {path}: cannot be read as UTF-8 text ({e})") from e
    return [tokenize(text)]


def build_acceptance(
    options: SpecOptions, chooser: Chooser, rng: np.random.Generator
) -> Acceptance:
    """Acceptance by match, or synthetic. Rejection sampling needs a `Distribution`, which only
    the caller can make of its sampler: see `reject.RejectionAcceptance`."""
    if options.drafters == ("synthetic",):
        return SyntheticAcceptance(synthetic_rates(options), rng)
    return MatchAcceptance(chooser)


def synthetic_rates(options: SpecOptions) -> tuple[float, ...]:
    """The rates of `--spec-synth-rates` or `--spec-synth-len`; exactly one is given."""
    rates, length = options.text("--spec-synth-rates"), options.values["--spec-synth-len"]
    if (rates is None) == (length is None):
        raise BadOption("--spec-type synthetic needs --spec-synth-rates or --spec-synth-len")
    if rates is None:
        typed = "--spec-draft-n-max" in options.given
        n_max = options.integer("--spec-draft-n-max") if typed else LONGEST
        return rates_of_length(options.number("--spec-synth-len"), n_max)
    try:
        return check_rates([float(r) for r in rates.split(",")])
    except ValueError as e:
        raise BadOption(f"--spec-synth-rates {rates}: {e}") from None


__all__ = ["ModelDrafter", "build_acceptance", "build_drafter", "build_policy", "synthetic_rates"]
