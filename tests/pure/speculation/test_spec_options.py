"""Policies, drafters and acceptance rules are built from the given options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fake_target import FakeTarget
from speculation_parts import proposed

from lab.simulation import published_curves
from specdec.build import build_acceptance, build_drafter, build_policy
from specdec.costs.profile import CostProfile
from specdec.decoding.acceptance import Greedy, MatchAcceptance
from specdec.drafters.chain import ChainDrafter
from specdec.drafters.model import ModelDrafter
from specdec.drafters.synthetic import SyntheticAcceptance
from specdec.errors import BadOption
from specdec.options import FROM_ROWS, DrafterName, PolicyName, SpecOptions
from specdec.policies.rules import Fixed

PROFILE = published_curves()["deepseek-r1-0528-q4_x"]
SYNTHETIC = SpecOptions(drafters=(DrafterName.SYNTHETIC,))
DRAFT = SpecOptions(drafters=(DrafterName.DRAFT,))


@pytest.mark.parametrize("name", PolicyName)
def test_every_policy_is_built_and_honours_the_longest_draft(name: PolicyName) -> None:
    policy = build_policy(SpecOptions(policy=name, n_max=3), PROFILE)
    assert policy.name == name
    walk = policy.begin(64, "draft")
    n = 0
    while walk.wants and n < 10:
        walk.feed(1.0)
        n += 1
    assert n <= 3


def test_throughput_drafts_no_more_than_was_measured_and_fits_a_batch() -> None:
    short = CostProfile((1.0, 1.2, 1.4, 1.6), 0.1)
    assert build_policy(SpecOptions(n_max=100), short).n_max == 3
    assert build_policy(SpecOptions(n_max=2), short).n_max == 2
    long = CostProfile(tuple(1.0 + 0.01 * n for n in range(200)), 0.01)
    assert build_policy(SpecOptions(), long).n_max == 63


FREE = [n for n in DrafterName if n not in ("none", "draft", *FROM_ROWS, "synthetic")]


@pytest.mark.parametrize("name", FREE)
def test_every_drafter_is_built_and_drafts_a_repetition(name: DrafterName) -> None:
    sizes = SpecOptions(
        drafters=(name,),
        ngram_simple_size_n=3,
        ngram_map_k_size_n=3,
        ngram_map_k4v_size_n=3,
        ngram_map_k4v_size_m=2,
        ngram_mod_n_match=3,
    )
    drafter = build_drafter(sizes)
    assert drafter.name == name
    history = [0, *([1, 2, 3, 4, 5] * 5), 1, 2, 3]
    assert proposed(drafter, 0, history, Fixed(2), 2).tokens == (4, 5)


def test_several_drafters_make_a_chain() -> None:
    model = ModelDrafter(FakeTarget())
    both = SpecOptions(drafters=(DrafterName.NGRAM_MOD, DrafterName.DRAFT))
    assert isinstance(build_drafter(both, model), ChainDrafter)
    assert build_drafter(DRAFT, model) is model
    for nothing in ((), (DrafterName.NONE,)):
        assert not SpecOptions(drafters=nothing).is_on
    with pytest.raises(BadOption, match="needs a draft model"):
        build_drafter(DRAFT)


def test_a_corpus_is_read_and_a_missing_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("abcdef")
    suffix = SpecOptions(drafters=(DrafterName.SUFFIX,), suffix_corpus=path)
    drafter = build_drafter(suffix, tokenize=lambda t: [ord(c) for c in t])
    assert proposed(drafter, 0, [1, ord("b"), ord("c")], Fixed(2), 2).tokens == (ord("d"), ord("e"))
    path.unlink()
    with pytest.raises(BadOption, match="cannot be read"):
        build_drafter(suffix, tokenize=lambda t: [1])


def test_a_lookup_cache_in_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "cache.bin"
    cache = SpecOptions(drafters=(DrafterName.NGRAM_CACHE,), lookup_dynamic=path)
    with pytest.raises(BadOption, match="its folder does not exist"):
        build_drafter(cache)


def test_synthetic_acceptance_is_built_from_rates_or_a_length() -> None:
    rng = np.random.default_rng(0)
    rates = replace(SYNTHETIC, synth_rates=(0.8, 0.5))
    assert isinstance(build_acceptance(rates, Greedy(), rng), SyntheticAcceptance)
    assert build_drafter(replace(SYNTHETIC, synth_len=3, n_max=8)).name == "synthetic"
    assert isinstance(build_acceptance(DRAFT, Greedy(), rng), MatchAcceptance)
    both = replace(SYNTHETIC, synth_len=2, synth_rates=(0.5,))
    for bad in (SYNTHETIC, both, replace(SYNTHETIC, synth_rates=(0.5, 1.5))):
        with pytest.raises(BadOption):
            build_drafter(bad)
