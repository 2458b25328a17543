"""Builds a drafter, a policy and an acceptance from resolved options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from specdec.costs.calibration import Calibration
from specdec.costs.profile import CostProfile, LiveCosts
from specdec.decoding.acceptance import AcceptanceRule, MatchAcceptance
from specdec.drafters.chain import ChainDrafter
from specdec.drafters.ngram_cache import LookupCache, NgramCache
from specdec.drafters.ngrams import NgramMapK, NgramMapK4V, NgramMod, NgramSimple
from specdec.drafters.suffix import SuffixDrafter
from specdec.drafters.synthetic import (
    SyntheticAcceptance,
    SyntheticDrafter,
    check_rates,
    rates_of_length,
)
from specdec.errors import BadOption, BadProfile
from specdec.options import (
    BY_P,
    FROM_ROWS,
    LONGEST,
    MOST_DRAFTED,
    PRICED,
    DrafterName,
    PolicyName,
    SpecOptions,
)
from specdec.policies.cost_curve import N_UNFITTED, CurveFamily, fit
from specdec.policies.published import Bandit, Costs, Fitted, PMinKept, PMins, Ratio, Speed
from specdec.policies.rules import Fixed, PMin
from specdec.policies.throughput import Throughput
from specdec.types import Chooser, Drafter, Policy
from specdec.whole_file import read_text

_BLOCK = 4  # tokens per draft of `fixed`; suits general text, code 8 to 15 (llama.cpp #10466)
_FAMILIES: dict[PolicyName, CurveFamily] = {
    PolicyName.RATIONAL: "rational",
    PolicyName.EXPONENTIAL: "exponential",
    PolicyName.POWER: "power",
}
_UNMEASURED_STEP = 0.05  # time of a draft step in units of T(1), if it was not measured


def build_policy(
    options: SpecOptions,
    profile: CostProfile,
    calibration: Calibration | None = None,
    costs: LiveCosts | None = None,
    steps_s: dict[str, float] | None = None,
) -> Policy:
    """The policy that `options` name. Its drafts have at most `options.n_max` tokens.

    Policies that read T(n) draft no more tokens than the profile has batch sizes for. `throughput`
    reads `costs`, which serving corrects. Without them, it reads `profile`, which stays fixed.
    Published rules always read `profile`. `steps_s` are the seconds of a step of each of several
    drafters that spend steps. Raises BadProfile if no curve of the named family fits the profile.
    """
    if options.policy is PolicyName.THROUGHPUT:
        longest = _longest(options, profile)
        return Throughput(profile, calibration, n_max=longest, costs=costs, steps_s=steps_s)
    policy = _rule(options, profile)
    if options.policy in BY_P:
        policy.p_top_k = options.p_top_k
    return policy


def _longest(options: SpecOptions, profile: CostProfile) -> int:
    """Most tokens of a draft by a policy that reads `profile`."""
    longest = min(profile.n_max - 1, MOST_DRAFTED)
    return longest if options.n_max is None else min(options.n_max, longest)


def _rule(options: SpecOptions, profile: CostProfile) -> Policy:
    n_max = LONGEST if options.n_max is None else options.n_max
    if options.policy in PRICED:
        n_max = _longest(options, profile)
    match options.policy:
        case PolicyName.FIXED:
            return Fixed(_BLOCK if options.n_max is None else options.n_max)
        case PolicyName.P_MIN:
            return PMin(n_max, options.p_min, options.n_min)
        case PolicyName.P_MIN_KEPT:
            return PMinKept(n_max, options.p_min)
        case PolicyName.P_MINS:
            return PMins(profile.normalised, n_max)
        case PolicyName.RATIONAL | PolicyName.EXPONENTIAL | PolicyName.POWER:
            return _fitted(options, profile, n_max)
        case PolicyName.SPEED_A | PolicyName.SPEED_B:
            speeds = [n / profile.time(n) for n in range(1, profile.n_max + 1)]
            step_s = profile.draft_step_s or _UNMEASURED_STEP * profile.step_s[0]
            return Speed(speeds, 1.0 / step_s, options.policy.removeprefix("speed-"), n_max)
        case PolicyName.COSTS:
            return Costs(profile.normalised, options.look_ahead, n_max)
        case PolicyName.RATIO | PolicyName.RATIO_FLAT:
            return Ratio(n_max, is_flat=options.policy is PolicyName.RATIO_FLAT)
        case PolicyName.BANDIT:
            return Bandit(n_max)
        case PolicyName.THROUGHPUT:
            raise AssertionError("throughput is built by its caller")


def _fitted(options: SpecOptions, profile: CostProfile, n_max: int) -> Fitted:
    try:
        curve = fit(profile.normalised[N_UNFITTED:], _FAMILIES[options.policy])
        return Fitted(curve, n_max)
    except BadProfile as e:
        raise BadProfile(
            f"{options.name('policy')} {options.policy}: {e}; p-mins reads the table itself"
        ) from e


def build_drafter(
    options: SpecOptions,
    model: Drafter | None = None,
    tokenize: Callable[[str], Sequence[int]] | None = None,
    n_vocab: int | None = None,
    own: Drafter | None = None,
) -> Drafter:
    """The drafter that `options` name; a chain if they name several.

    `model` drafts with the draft model (`ModelDrafter`, perhaps translated), and `own` from the
    target's hidden rows (`RowDrafter`). `tokenize` converts the corpus of `suffix`. Raises
    BadOption for files that cannot be read, and for lookup caches with tokens beyond `n_vocab`.
    """
    if options.drafters == (DrafterName.SYNTHETIC,):
        return SyntheticDrafter(synthetic_rates(options))
    free = [
        _free(options, name, tokenize, n_vocab)
        for name in options.drafters
        if name not in (DrafterName.DRAFT, *FROM_ROWS)
    ]
    paid = []
    for name, drafter, need in (
        (DrafterName.MTP, own, "a model with layers for it"),
        (DrafterName.EAGLE3, own, "an EAGLE-3 file of the model"),
        (DrafterName.DFLASH, own, "a DFlash file of the model"),
        (DrafterName.DSPARK, own, "a DSpark file of the model"),
        (DrafterName.DRAFT, model, "a draft model"),
    ):
        if name in options.drafters:
            if drafter is None:
                raise BadOption(f"{options.name('drafters')} {name} needs {need}")
            paid.append(drafter)
    every = [*free, *paid]
    return every[0] if len(every) == 1 else ChainDrafter(free, *paid)


def _free(
    o: SpecOptions,
    name: DrafterName,
    tokenize: Callable[[str], Sequence[int]] | None,
    n_vocab: int | None,
) -> Drafter:
    match name:
        case DrafterName.NGRAM_SIMPLE:
            return NgramSimple(o.ngram_simple_size_n, o.ngram_simple_size_m)
        case DrafterName.NGRAM_MAP_K:
            return NgramMapK(o.ngram_map_k_size_n, o.ngram_map_k_size_m, o.ngram_map_k_min_hits)
        case DrafterName.NGRAM_MAP_K4V:
            return NgramMapK4V(
                o.ngram_map_k4v_size_n, o.ngram_map_k4v_size_m, o.ngram_map_k4v_min_hits
            )
        case DrafterName.NGRAM_MOD:
            return NgramMod(o.ngram_mod_n_match, o.ngram_mod_n_min, o.ngram_mod_n_max)
        case DrafterName.NGRAM_CACHE:
            return _lookup(o, n_vocab)
        case DrafterName.SUFFIX:
            return SuffixDrafter(min_match=o.suffix_min_match, corpus=_corpus(o, tokenize))
        case _:  # NONE, SYNTHETIC, and drafters that need a model
            raise AssertionError(f"{name} is not built here")


def _lookup(options: SpecOptions, n_vocab: int | None) -> NgramCache:
    static, dynamic = options.lookup_static, options.lookup_dynamic
    if dynamic is not None and not dynamic.absolute().parent.is_dir():
        raise BadOption(f"{options.name('lookup_dynamic')} {dynamic}: its folder does not exist")
    return NgramCache(
        static=LookupCache.load(static, n_vocab) if static is not None else None,
        dynamic=_dynamic(dynamic, n_vocab) if dynamic is not None else None,
    )


def _dynamic(path: Path, n_vocab: int | None) -> LookupCache:
    """The cache in the file, or an empty one. The session writes it at its end."""
    return LookupCache.load(path, n_vocab) if path.exists() else LookupCache()


def _corpus(
    options: SpecOptions, tokenize: Callable[[str], Sequence[int]] | None
) -> list[Sequence[int]]:
    path = options.suffix_corpus
    if path is None:
        return []
    if tokenize is None:
        raise BadOption(f"{options.name('suffix_corpus')} needs a tokeniser")
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as e:
        raise BadOption(
            f"{options.name('suffix_corpus')} {path}: cannot be read as UTF-8 text ({e})"
        ) from e
    return [tokenize(text)]


def build_acceptance(
    options: SpecOptions, chooser: Chooser, rng: np.random.Generator
) -> AcceptanceRule:
    """Acceptance by match, or at the rates of synthetic drafts.

    For rejection sampling, the caller makes a `RejectionAcceptance` of its sampler instead.
    """
    if options.drafters == (DrafterName.SYNTHETIC,):
        return SyntheticAcceptance(synthetic_rates(options), rng)
    return MatchAcceptance(chooser)


def synthetic_rates(options: SpecOptions) -> tuple[float, ...]:
    """The given rates, or the rates that follow from the given mean length. Raises BadOption."""
    rates, length = options.synth_rates, options.synth_len
    if (rates is None) == (length is None):
        raise BadOption(
            f"{options.name('drafters')} synthetic needs either rates of acceptance or a mean "
            "length (docs/flags.md)"
        )
    try:
        if rates is not None:
            return check_rates(rates)
        assert length is not None
        return rates_of_length(length, LONGEST if options.n_max is None else options.n_max)
    except BadOption as e:
        name = "synth_len" if rates is None else "synth_rates"
        raise BadOption(f"{options.name(name)}: {e}") from None
