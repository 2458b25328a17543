"""A round's price whoever won it, and traces that do not know every token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from drafting_parts import Proposes
from hypothesis import given, settings
from hypothesis import strategies as st
from speculation_parts import proposed

from lab.simulate import simulate_policies
from lab.simulation.simulate import DraftTrace, fixed_oracle, parse_trace, simulate
from specdec.costs.profile import CostProfile
from specdec.drafters.chain import ChainDrafter
from specdec.errors import SpecDecError
from specdec.policies.rules import Fixed
from specdec.policies.throughput import Throughput
from specdec.types import Decision, Draft, Round
from specoffload import report
from specoffload.speculation.round_trace import RoundTrace


def test_steps_of_a_model_that_lost_to_a_free_drafter_are_charged_to_the_round() -> None:
    chain = ChainDrafter([Proposes("a", [1, 1, 1], 0.9, 0)], Proposes("draft", [2, 2], 0.2, 1))
    draft = proposed(chain, 0, [0], Fixed(3), 3)
    assert (draft.source, draft.tokens) == ("a", (1, 1, 1))
    assert draft.n_steps == 2
    assert draft.catch_up_s == 0.25


def test_a_model_that_wins_is_charged_its_own_steps_only() -> None:
    chain = ChainDrafter([Proposes("a", [1], 0.2, 0)], Proposes("draft", [2, 2], 0.9, 1))
    draft = proposed(chain, 0, [0], Fixed(3), 3)
    assert (draft.source, draft.n_steps) == ("draft", 2)


def test_a_free_draft_taken_without_asking_the_model_is_charged_nothing() -> None:
    chain = ChainDrafter([Proposes("a", [1, 1], 0.9, 0)], Proposes("draft", [2], 0.2, 1))
    proposed(chain, 0, [0], Fixed(3), 3)
    assert proposed(chain, 0, [0], Fixed(3), 3).n_steps == 0


def test_charged_steps_lower_the_policys_rate() -> None:
    profile = CostProfile((1.0, 1.1, 1.2, 1.3), 0.2)
    rates = []
    for n_steps in (0, 3):
        policy = Throughput(profile)
        draft = Draft((1, 1), (0.9, 0.9), "a", Decision(2, ""), n_steps=n_steps)
        for _ in range(30):
            policy.learn(Round(draft, 2, (1, 1, 1), 0.0, 1.2))
        rates.append(policy.rate)
    assert rates[1] < rates[0]


def recorded(tmp_path: Path, rounds: Sequence[Round]) -> DraftTrace:
    file = tmp_path / "rounds.jsonl"
    trace = RoundTrace(file)
    for round_ in rounds:
        trace.add(round_)
    trace.write()
    return parse_trace(file.read_text(encoding="utf-8"))


def a_round(probs: Sequence[float], n_accepted: int) -> Round:
    n = len(probs)
    draft = Draft((1,) * n, tuple(probs), "draft", Decision(n, ""), n_steps=n)
    return Round(draft, n_accepted, (*[1] * n_accepted, 0), 0.0, 1.0)


def test_a_recorded_trace_has_every_token_and_knows_which_nobody_drafted(tmp_path: Path) -> None:
    rounds = [a_round([0.9, 0.8], 2), a_round([], 0), a_round([0.7, 0.6], 1)]
    trace = recorded(tmp_path, rounds)
    assert trace.p == (0.9, 0.8, 0.0, 0.0, 0.7, 0.6)
    assert trace.accepted == (True, True, False, False, True, False)
    assert trace.unknown == {2, 3}


def test_a_replay_counts_the_tokens_it_was_asked_for_and_does_not_know() -> None:
    trace = DraftTrace(
        (0.9, 0.9, 0.0) * 4, (True, True, False) * 4, unknown=frozenset({2, 5, 8, 11})
    )
    profile = CostProfile((1.0,) * 8, 0.0)
    long, short = (simulate(trace, profile, Fixed(m)) for m in (4, 2))
    assert long.n_unknown == 3  # the last token of all is never drafted
    assert short.n_unknown == 0
    assert long.n_drafted == short.n_drafted == 8


def test_a_token_that_is_unknown_and_accepted_is_refused() -> None:
    with pytest.raises(SpecDecError, match="line 1"):
        parse_trace('{"p": null, "accepted": true}')
    with pytest.raises(SpecDecError, match="entry 2"):
        DraftTrace((0.5, 0.0), (True, True), unknown=frozenset({1}))


def test_simulate_says_how_much_of_a_trace_is_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known, unknown = '{"p": 0.9, "accepted": true}\n', '{"p": null, "accepted": null}\n'
    file, costs = tmp_path / "t.jsonl", tmp_path / "costs.txt"
    file.write_text((2 * known + unknown) * 9, encoding="utf-8")
    costs.write_text(",".join(f"{1 / n:.4f}" for n in range(1, 9)), encoding="utf-8")
    simulate_policies(profile=costs, trace=file, n_tokens=2000, draft_share=0.05, seed=1)
    out = capsys.readouterr().out
    assert "9 of 27 tokens are unknown" in out
    assert "--spec-draft-n-max 16" in out
    report.only_data(True)
    try:
        simulate_policies(profile=costs, trace=file, n_tokens=2000, draft_share=0.05, seed=1)
    finally:
        report.only_data(False)
    last = json.loads(capsys.readouterr().out)
    assert last["n_unknown"] == 9
    assert last["n_cut_short"]["costs"]["fixed-8"] == 8


@pytest.mark.parametrize(
    "line",
    [
        '{"p": 0.5, "accepted": "false"}',
        '{"p": 0.5, "accepted": [0]}',
        '{"p": "0.5", "accepted": true}',
        '{"p": 0.5, "accepted": null}',
        '{"p": null, "accepted": false}',
        '{"p": true, "accepted": true}',
        '{"p": 1' + "0" * 399 + ', "accepted": true}',
        "[" * 100_000,
    ],
)
def test_a_trace_line_that_means_nothing_is_named(line: str) -> None:
    good = '{"p": 0.5, "accepted": true}'
    with pytest.raises(SpecDecError, match="line 2 of the trace"):
        parse_trace(f"{good}\n{line}\n")


@given(
    st.lists(st.sampled_from(["right", "wrong", "unknown"]), min_size=1, max_size=60),
    st.lists(st.integers(0, 59), max_size=4),
    st.floats(0.0, 0.3),
)
@settings(max_examples=100, deadline=None)
def test_no_fixed_block_beats_the_best_one_in_hindsight_on_one_segment(
    tokens: list[str], cuts: list[int], step: float
) -> None:
    """Unknown tokens end drafts for the oracle as they do for policies."""
    p = tuple(0.0 if t == "unknown" else 0.5 for t in tokens)
    accepted = tuple(t == "right" for t in tokens)
    unknown = frozenset(i for i, t in enumerate(tokens) if t == "unknown")
    profile = CostProfile(tuple(1.0 + 0.1 * n for n in range(12)), step)
    whole = DraftTrace(p, accepted, unknown=unknown)
    best = fixed_oracle(whole, profile, 11)
    for m in range(12):
        assert simulate(whole, profile, Fixed(m)).rate <= best.rate * (1 + 1e-9)
    assert best.n_tokens == len(tokens)
    starts = sorted({0, *(c for c in cuts if c < len(tokens))})
    parts = DraftTrace(p, accepted, tuple((s, str(s)) for s in starts), unknown)
    assert fixed_oracle(parts, profile, 11).n_tokens == len(tokens)  # also segments of one token


@pytest.mark.parametrize("paid", [False, True])
def test_a_drafter_that_was_poor_once_is_chosen_again_when_it_is_good(paid: bool) -> None:
    """Its unchosen proposals are compared with the text, whoever is chosen."""
    good, poor = Proposes("a", [1] * 4, 0.9, 0), Proposes("b", [2] * 4, 0.9, 0)
    chain = ChainDrafter([good], poor) if paid else ChainDrafter([good, poor])
    policy = Throughput(CostProfile(tuple(1.0 + 0.2 * n for n in range(8)), 0.01))
    for _ in range(300):
        policy.calibration.observe("a", 0.9, False)
    chosen = []
    for _ in range(600):
        draft = proposed(chain, 0, [0], policy, 6)
        n = len(draft.tokens) if draft.source == "a" else 0
        policy.learn(Round(draft, n, (1,) * (n + 1), 0.0, 1.0))
        chosen.append(draft.source == "a" and n > 0)
    assert not any(chosen[:5])
    assert sum(chosen[-50:]) >= 45


def test_a_chain_does_not_ask_a_model_whose_steps_cost_more_than_they_bring() -> None:
    free, model = Proposes("a", [1] * 3, 0.9, 0), Proposes("draft", [1] * 6, 0.9, 1)
    chain = ChainDrafter([free], model)
    policy = Throughput(CostProfile(tuple(1.0 + 0.02 * n for n in range(9)), 0.5))
    n_asked = 0
    for _ in range(400):
        draft = proposed(chain, 0, [0], policy, 8)
        n_asked += draft.n_steps > 0
        n = len(draft.tokens)
        policy.learn(Round(draft, n, (1,) * (n + 1), 0.5 * draft.n_steps, 1.0 + 0.02 * n))
    assert 0 < n_asked < 60


def test_rounds_of_several_drafters_are_one_text(tmp_path: Path) -> None:
    rounds = [a_round([0.9], 1), replace(a_round([0.8], 1), draft=Draft((1,), (0.8,), "suffix",
              Decision(1, "")))] * 3  # fmt: skip
    assert recorded(tmp_path, rounds).segments == ((0, "text"),)
