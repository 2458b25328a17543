"""Options: llama.cpp's names, and nothing inert."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specdec.build import build_acceptance, build_drafter, build_policy
from specdec.costs.profile import CostProfile
from specdec.costs.profile_io import published_curves
from specdec.decoding.accept import Greedy, MatchAcceptance
from specdec.drafters.chain import ChainDrafter
from specdec.drafters.model import ModelDrafter
from specdec.drafters.none import NoDrafter
from specdec.errors import BadOption
from specdec.options import (
    DRAFTERS,
    OPTIONS,
    POLICIES,
    SpecOptions,
    inert_flags,
    parse_draft_params,
    parse_words,
    resolve,
)
from specdec.policies.fixed import Fixed
from specdec.simulation.fake import FakeTarget
from specdec.simulation.synthetic import SyntheticAcceptance

PROFILE = published_curves()["deepseek-r1-0528-q4_x"]


def options(text: str, has_draft: bool = False) -> SpecOptions:
    return resolve(parse_words(text.split()), has_draft=has_draft)


def test_older_names_mean_the_same() -> None:
    old = parse_words(["--draft-max", "16", "--draft-p-min=0.5", "--draft-min", "2"])
    new = parse_words(
        ["--spec-draft-n-max=16", "--spec-draft-p-min", "0.5", "--spec-draft-n-min", "2"]
    )
    assert old == new


def test_no_name_is_used_twice() -> None:
    names = [n for o in OPTIONS for n in (o.flag, *o.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--spec-nonsense 1", "no option here"),
        ("--draft-max", "needs a value"),
        ("--draft-max x", "whole number"),
        ("--draft-max -1", "between 0 and 1023"),
        ("--spec-draft-p-min 1.5", "between 0 and 1"),
        ("--spec-tree=1", "takes no value"),
        ("--spec-type nonsense", "unknown"),
        ("--spec-type draft", "needs a draft model"),
        ("--spec-type ngram-mod,ngram-mod", "twice"),
        ("--spec-type none,ngram-mod", "stands alone"),
        ("--spec-policy nonsense", "unknown"),
        ("--spec-accept nonsense", "must be one of"),
    ],
)
def test_malformed_options_are_refused(text: str, message: str) -> None:
    with pytest.raises(BadOption, match=message):
        options(text)


@pytest.mark.parametrize(
    ("text", "has_draft", "message"),
    [
        ("--draft-p-min 0.5", True, "--spec-policy p-min"),
        ("--spec-ngram-mod-n-max 8 --spec-type ngram-simple", False, "--spec-type ngram-mod"),
        ("--spec-draft-p-split 0.2", True, "--spec-tree"),
        ("--spec-tree --spec-type ngram-mod", False, "--spec-tree needs the draft model"),
        ("--spec-look-ahead 2", True, "--spec-policy costs"),
        ("-lcs x --spec-type ngram-mod", False, "ngram-cache"),
        ("--spec-type none --draft-max 8", False, "nothing drafts"),
        ("--spec-type ngram-mod", True, "--model-draft takes no effect"),
    ],
)
def test_a_flag_that_cannot_take_effect_is_an_error(
    text: str, has_draft: bool, message: str
) -> None:
    with pytest.raises(BadOption, match=message):
        options(text, has_draft)


def test_batch_costs_in_the_environment_select_their_policy() -> None:
    assert resolve({}, has_draft=True, batch_costs=True).policy == "costs"
    assert resolve({}, has_draft=True).policy == "throughput"


def test_draft_params_are_a_command_line_of_their_own() -> None:
    supported = frozenset({"--seed", "--batch-size", "--gpu-layers"})
    given = parse_draft_params("--seed 3407 -b 4096 -ngl 99", supported)
    assert given == {"--seed": 3407, "--batch-size": 4096, "--gpu-layers": 99}
    with pytest.raises(BadOption, match="takes no effect on a draft"):
        parse_draft_params("-ctk q4_0", supported)
    with pytest.raises(BadOption, match="no option here"):
        parse_draft_params("-khad", supported)
    with pytest.raises(BadOption, match="quotation"):
        parse_draft_params('--device "x', supported)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_is_built_and_honours_the_longest_draft(name: str) -> None:
    policy = build_policy(options(f"--spec-policy {name} --draft-max 3", True), PROFILE)
    assert policy.name == name
    walk = policy.begin(64, "draft")
    n = 0
    while walk.wants and n < 10:
        walk.feed(1.0)
        n += 1
    assert n <= 3


def test_a_draft_longer_than_the_profile_is_refused() -> None:
    with pytest.raises(BadOption, match="batches up to 64"):
        build_policy(options("--draft-max 100", True), PROFILE)


@pytest.mark.parametrize("name", [d for d in DRAFTERS if d not in ("none", "draft", "synthetic")])
def test_every_drafter_is_built_and_drafts_a_repetition(name: str) -> None:
    flags = {
        "ngram-simple": "--spec-ngram-simple-size-n 3",
        "ngram-map-k": "--spec-ngram-map-k-size-n 3",
        "ngram-map-k4v": "--spec-ngram-map-k4v-size-n 3 --spec-ngram-map-k4v-size-m 2",
        "ngram-mod": "--spec-ngram-mod-n-match 3",
    }
    drafter = build_drafter(options(f"--spec-type {name} {flags.get(name, '')}"))
    assert drafter.name == name
    history = [0, *([1, 2, 3, 4, 5] * 5), 1, 2, 3]
    assert drafter.propose(0, history, Fixed(2), 2).tokens == (4, 5)


def test_several_drafters_make_a_chain_and_none_makes_none() -> None:
    model = ModelDrafter(FakeTarget())
    assert isinstance(build_drafter(options("--spec ngram-mod,draft", True), model), ChainDrafter)
    assert build_drafter(options("", True), model) is model
    assert isinstance(build_drafter(options("--spec none")), NoDrafter)
    with pytest.raises(BadOption, match="needs a draft model"):
        build_drafter(options("", True))


def test_a_corpus_is_read_and_a_missing_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("abcdef")
    parsed = parse_words(["--spec", "suffix", "--spec-suffix-corpus", str(path)])
    drafter = build_drafter(
        resolve(parsed, has_draft=False), tokenize=lambda t: [ord(c) for c in t]
    )
    assert drafter.propose(0, [1, ord("b"), ord("c")], Fixed(2), 2).tokens == (ord("d"), ord("e"))
    path.unlink()
    with pytest.raises(BadOption, match="cannot be read"):
        build_drafter(resolve(parsed, has_draft=False), tokenize=lambda t: [1])


def test_synthetic_acceptance_is_built_from_either_flag() -> None:
    rng = np.random.default_rng(0)
    rates = options("--spec synthetic --spec-synth-rates 0.8,0.5")
    assert isinstance(build_acceptance(rates, Greedy(), rng), SyntheticAcceptance)
    length = options("--spec synthetic --spec-synth-len 3 --draft-max 8")
    assert build_drafter(length).name == "synthetic"
    assert isinstance(build_acceptance(options(""), Greedy(), rng), MatchAcceptance)
    for bad in ("", "--spec-synth-len 2 --spec-synth-rates 0.5", "--spec-synth-rates 0.5,x"):
        with pytest.raises(BadOption):
            build_drafter(options(f"--spec synthetic {bad}"))


def test_an_unknown_flag_of_the_draft_is_answered_with_those_that_work() -> None:
    with pytest.raises(BadOption, match=r"^--draft-params: '--bogus' .* there are --threads$"):
        parse_draft_params("--bogus 3", frozenset({"--threads"}))
    assert parse_draft_params("-c 0", frozenset({"--ctx-size"})) == {"--ctx-size": 0}


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--spec-draft-p-min", 7.0),
        ("--spec-draft-p-min", float("nan")),
        ("--spec-draft-n-min", -3),
        ("--spec-ngram-simple-size-n", 0),
        ("--spec-ngram-map-k-size-m", -1),
        ("--spec-ngram-mod-n-match", 0),
        ("--spec-suffix-min-match", -1),
        ("--spec-rs-snapshots", 1000),
        ("--spec-look-ahead", -3),
        ("--spec-draft-p-split", 5.0),
    ],
)
def test_numbers_out_of_range_are_refused_wherever_they_come_from(flag: str, value: float) -> None:
    with pytest.raises(BadOption, match=f"{flag} is {value}; it must be"):
        resolve({flag: value}, has_draft=False)


@pytest.mark.parametrize(
    "given",
    [
        {"--spec-policy": "p-min", "--spec-draft-n-min": 20},
        {"--spec-policy": "p-min", "--spec-draft-n-min": 20, "--spec-draft-n-max": 4},
        {"--spec-type": "ngram-mod", "--spec-ngram-mod-n-min": 100, "--spec-ngram-mod-n-max": 10},
    ],
)
def test_a_least_length_above_the_longest_is_refused(given: dict[str, int | str]) -> None:
    with pytest.raises(BadOption, match="no draft could be verified"):
        resolve(given, has_draft=False)


def test_lists_of_drafters_may_have_blanks_and_aliases() -> None:
    given = {"--spec-type": "ngram-mod, lookup , draft-simple"}
    assert resolve(given, has_draft=True).drafters == ("ngram-mod", "ngram-cache", "draft")


def test_drafts_are_no_longer_than_a_verification_batch_has_room_for() -> None:
    long = CostProfile(tuple(1.0 + 0.01 * n for n in range(200)), 0.01)
    for policy in ("throughput", "p-mins", "speed-a", "costs"):
        assert build_policy(resolve({"--spec-policy": policy}, has_draft=True), long).n_max == 63


def test_flags_that_are_inert_are_named_with_the_reason() -> None:
    given = {"--spec-draft-p-min": 0.5, "--spec-draft-n-max": 8, "--spec-draft-p-split": 0.2}
    assert set(inert_flags(given, has_draft=True)) == {
        "--spec-draft-p-min",
        "--spec-draft-p-split",
    }
    assert not inert_flags({**given, "--spec-policy": "p-min"}, has_draft=True).keys() & {
        "--spec-draft-p-min"
    }
