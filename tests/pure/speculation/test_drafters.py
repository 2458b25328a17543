"""Proposals of each drafter. The texts that they lead to are tested in test_decoding_loop.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean

import pytest
from fake_target import FakeTarget
from hypothesis import given, settings
from hypothesis import strategies as st
from parts import Proposes
from speculation_parts import proposed

from specdec.costs.profile import CostProfile
from specdec.drafters.chain import ChainDrafter
from specdec.drafters.model import ModelDrafter
from specdec.drafters.ngram_cache import LookupCache, NgramCache
from specdec.drafters.ngrams import NgramMapK, NgramMapK4V, NgramMod, NgramSimple, PerSequence
from specdec.drafters.suffix import SuffixAutomaton, SuffixDrafter
from specdec.drafters.translate import TranslatedDrafter
from specdec.drafters.vocabulary import Vocabulary
from specdec.errors import BadOption
from specdec.policies.rules import Fixed
from specdec.policies.throughput import Throughput
from specdec.types import Decision, Draft, Drafter, DraftRequest, Round


def words(n: int) -> Vocabulary:
    """A vocabulary of single characters. Their token ids are shifted by `n`."""
    return Vocabulary(
        lambda text: [(ord(c) - 65 + n) % 16 for c in text],
        lambda tokens: "".join(chr(65 + (t - n) % 16) for t in tokens),
    )


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "ngram-simple": lambda: NgramSimple(2, 6),
    "ngram-map-k4v": lambda: NgramMapK4V(2, 3, 1),
    "ngram-mod": lambda: NgramMod(2, 1, 8, 1 << 10),
    "ngram-cache": lambda: NgramCache(6),
    "suffix": lambda: SuffixDrafter(6, 1, corpus=[[1, 2, 3, 4, 5]]),
}


REPEATING = [5, 1, 2, 3, 4, 9, 8, 1, 2, 3, 4, 9, 7, 1, 2, 3]


@pytest.mark.parametrize(
    ("drafter", "tokens"),
    [
        (NgramSimple(3, 4), (4, 9, 7, 1)),
        (NgramMapK(3, 4), (4, 9, 7, 1)),
        (NgramMod(3, 1, 4, 1 << 12), (4, 9, 7, 1)),
        (SuffixDrafter(4, 2), (4, 9, 7, 1)),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_a_repetition_is_continued(drafter: Drafter, tokens: tuple[int, ...]) -> None:
    assert proposed(drafter, 0, REPEATING, Fixed(4), 4).tokens == tokens


# ngram-map-k is left out: its counts depend on when it is asked.
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_draft_less_drafter_follows_a_growing_text_as_it_would_the_whole(name: str) -> None:
    growing = DRAFTERS[name]()
    text = [(i * i + i // 3) % 7 for i in range(60)]
    for n in range(5, 60):
        whole = DRAFTERS[name]()
        assert proposed(growing, 0, text[:n], Fixed(6), 6).tokens == (
            proposed(whole, 0, text[:n], Fixed(6), 6).tokens
        )


def judged(draft: Draft, n_accepted: int) -> Round:
    emitted = (*draft.tokens[:n_accepted], 99)
    return Round(draft, n_accepted, emitted, 0.0, 1.0)


def test_map_k_shortens_after_rejection_and_recovers() -> None:
    drafter = NgramMapK(2, 8)
    history = [0, *([1, 2, 3, 4, 5, 6, 7, 8] * 3), 1, 2]
    first = proposed(drafter, 0, history, Fixed(8), 8)
    drafter.learn(0, judged(first, 2))
    second = proposed(drafter, 0, history, Fixed(8), 8)
    assert (len(first.tokens), len(second.tokens)) == (8, 2)
    drafter.learn(0, judged(second, 2))
    assert len(proposed(drafter, 0, history, Fixed(8), 8).tokens) == 4


def test_map_k4v_drafts_only_a_dominant_continuation() -> None:
    often = [9, *([1, 2, 3, 4] * 4), 1, 2]
    split = [9, 1, 2, 3, 4, 1, 2, 5, 6, 1, 2, 3, 4, 1, 2, 5, 6, 1, 2]
    assert proposed(NgramMapK4V(2, 2, 2), 0, often, Fixed(4), 4).tokens == (3, 4)
    assert proposed(NgramMapK4V(2, 2, 2), 0, split, Fixed(4), 4).tokens == ()


def test_mod_is_shared_by_sequences_and_reset_by_poor_drafts() -> None:
    drafter = NgramMod(3, 1, 4, 1 << 12)
    proposed(drafter, 0, [1, 2, 3, 4, 5, 6], Fixed(4), 4)
    draft = proposed(drafter, 1, [7, 1, 2, 3], Fixed(4), 4)
    assert draft.tokens == (4, 5, 6)
    for _ in range(5):
        drafter.learn(1, judged(draft, 0))
    assert proposed(drafter, 1, [7, 1, 2, 3], Fixed(4), 4).tokens == ()


def test_mod_drops_a_draft_shorter_than_its_minimum() -> None:
    found = proposed(NgramMod(3, 3, 8, 1 << 12), 0, [1, 2, 3, 4, 9, 1, 2, 3], Fixed(8), 8)
    assert found.tokens == (4, 9, 1, 2, 3, 4, 9, 1)
    found = proposed(NgramMod(3, 3, 8, 1 << 12), 0, [1, 2, 3, 4, 1, 2, 3], Fixed(8), 2)
    assert found.tokens == (4, 1)
    drafter = NgramMod(3, 5, 8, 1 << 12)
    proposed(drafter, 0, [1, 2, 3, 4, 5], Fixed(8), 8)
    assert proposed(drafter, 1, [7, 1, 2, 3], Fixed(8), 8).tokens == ()


@given(text=st.lists(st.integers(0, 3), min_size=1, max_size=60))
@settings(deadline=None, max_examples=60)
def test_the_automaton_finds_the_longest_repeated_suffix(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for i, token in enumerate(text):
        automaton.extend(token)
        length, end = automaton.repeated()
        now = text[: i + 1]
        longest = max(
            (k for k in range(i + 1) if any(
                now[j : j + k] == now[len(now) - k :] for j in range(len(now) - k)
            )),
            default=0,
        )  # fmt: skip
        assert length == longest
        if length:
            assert end < i
            assert now[end - length + 1 : end + 1] == now[len(now) - length :]


def test_a_corpus_is_drafted_from_but_not_across_its_texts() -> None:
    drafter = SuffixDrafter(8, 2, corpus=[[1, 2, 3, 4, 5], [6, 7, 8]])
    assert proposed(drafter, 0, [9, 2, 3], Fixed(8), 8).tokens == (4, 5)


def test_the_lookup_cache_is_saved_and_loaded(tmp_path: Path) -> None:
    cache = LookupCache()
    cache.add([1, 2, 3, 1, 2, 3, 1, 2, 4], 0)
    cache.save(tmp_path / "cache.bin")
    again = LookupCache.load(tmp_path / "cache.bin")
    assert again.counts == cache.counts
    drafter = NgramCache(4, static=again)
    assert proposed(drafter, 0, [7, 1, 2], Fixed(2), 2).tokens[0] == 3


def test_a_damaged_lookup_cache_is_refused(tmp_path: Path) -> None:
    cache = LookupCache()
    cache.add([1, 2, 3, 4], 0)
    path = tmp_path / "cache.bin"
    cache.save(path)
    whole = path.read_bytes()
    for cut in (3, 21, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(BadOption, match=r"damaged: it ends inside the record at byte \d+"):
            LookupCache.load(path)
    path.write_bytes(whole)
    LookupCache.load(path, n_vocab=5)
    with pytest.raises(BadOption, match="another model's: it holds token 4.* has 4"):
        LookupCache.load(path, n_vocab=4)
    with pytest.raises(BadOption, match="cannot be read"):
        LookupCache.load(tmp_path / "none.bin")


def test_the_lookup_cache_counts_a_conversation_once_whatever_its_turns() -> None:
    drafter = NgramCache(4, dynamic=LookupCache())
    assert drafter.dynamic is not None
    history: list[int] = []
    for turn in range(5):
        history += [1, 2, 3, 4, 90 + turn]
        drafter.forget(0)
        proposed(drafter, 0, history, Fixed(2), 2)
        proposed(drafter, 0, [*history, 7], Fixed(2), 2)
        history.append(7)
    assert drafter.dynamic.counts[1, 2, 3] == {4: 5}
    once = LookupCache()
    once.add(history, 0)
    assert drafter.dynamic.counts == once.counts
    # After an edit, the drafter proposes by the new text only.
    drafter.forget(0)
    edited = [*history[:6], 50, 51, 52, 50, 51]
    fresh = proposed(NgramCache(4), 0, edited, Fixed(2), 2).tokens
    assert proposed(drafter, 0, edited, Fixed(2), 2).tokens == fresh


def indexing(name: str) -> Drafter:
    return NgramMapK(2, 8, 1) if name == "ngram-map-k" else DRAFTERS[name]()


@pytest.mark.parametrize("name", sorted({*DRAFTERS, "ngram-map-k"} - {"ngram-simple"}))
@given(
    turns=st.lists(st.lists(st.integers(0, 3), max_size=12), min_size=1, max_size=6),
    cut=st.integers(0, 30),
)
@settings(max_examples=60, deadline=None)
def test_turns_are_drafted_like_one_long_text(name: str, turns: list[list[int]], cut: int) -> None:
    """A drafter that saw the text turn by turn proposes the same as one that sees it at once."""
    kept = indexing(name)
    history: list[int] = []
    for turn in turns:
        history += turn
        kept.forget(0)
        proposed(kept, 0, history, Fixed(4), 4)
    found = proposed(kept, 0, history, Fixed(4), 4).tokens
    assert found == proposed(indexing(name), 0, history, Fixed(4), 4).tokens
    edited = [*history[:cut], 2, *history[cut:]]
    kept.forget(0)
    found = proposed(kept, 0, edited, Fixed(4), 4).tokens
    if name != "ngram-mod":  # its table holds all texts on purpose
        assert found == proposed(indexing(name), 0, edited, Fixed(4), 4).tokens


def test_a_turn_indexes_only_what_is_new_until_the_history_is_another() -> None:
    made: list[int] = []
    kept = PerSequence(lambda: made.append(0) or made)  # type: ignore[func-returns-value]
    kept.of(0, [1, 2, 3])
    kept.forget(0)
    assert kept.of(0, [1, 2, 3, 4]) is kept.get(0)
    assert len(made) == 1
    kept.forget(0)
    kept.of(0, [1, 2, 9, 4, 5])
    assert len(made) == 2
    kept.forget(0)
    kept.of(0, [1, 2])
    assert len(made) == 3
    kept.clear()
    assert kept.get(0) is None


def test_the_chain_takes_the_most_valuable_and_not_the_first() -> None:
    weak, strong = Proposes("a", [1, 1, 1], 0.3), Proposes("b", [2, 2], 0.9)
    assert proposed(ChainDrafter([weak, strong]), 0, [0], Fixed(3), 3).source == "b"


def test_the_chain_spares_the_model_while_a_free_draft_is_better() -> None:
    free, paid = Proposes("a", [1, 1, 1], 0.9), Proposes("draft", [2, 2, 2], 0.5)
    chain = ChainDrafter([free], paid)
    for _ in range(33):  # 132 tokens
        draft = proposed(chain, 0, [0], Fixed(3), 3)
        assert draft.source == "a"
        chain.learn(0, Round(draft, 3, (1, 1, 1, 1), 0.0, 1.0))
    assert 2 <= paid.n_asked <= 6


def test_steps_of_a_model_that_lost_to_a_free_drafter_are_charged_to_the_round() -> None:
    chain = ChainDrafter([Proposes("a", [1, 1, 1], 0.9, 0)], Proposes("draft", [2, 2], 0.2, 1))
    draft = proposed(chain, 0, [0], Fixed(3), 3)
    assert (draft.source, draft.tokens) == ("a", (1, 1, 1))
    assert draft.n_steps == 2
    assert draft.catch_up_s == 0.25


def test_a_model_is_charged_its_own_steps_and_only_if_it_was_asked() -> None:
    chain = ChainDrafter([Proposes("a", [1], 0.2, 0)], Proposes("draft", [2, 2], 0.9, 1))
    draft = proposed(chain, 0, [0], Fixed(3), 3)
    assert (draft.source, draft.n_steps) == ("draft", 2)
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


@pytest.mark.parametrize("paid", [False, True])
def test_a_drafter_that_was_poor_once_is_chosen_again_when_it_is_good(paid: bool) -> None:
    """A drafter's proposals are compared with the text even while another drafter is chosen."""
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
    assert 1 <= n_asked <= 3, "a step costs half a decode and saves nothing"


@pytest.mark.parametrize(("step", "least", "most"), [(0.02, 7.0, 8.0), (0.2, 3.5, 5.5)])
def test_drafts_are_as_long_as_the_time_of_a_step_allows(
    step: float, least: float, most: float
) -> None:
    """A batch of n tokens takes 1 + 0.02 (n - 1), and each drafted token is right in 85 %."""
    model = ModelDrafter(FakeTarget(peak=0.85))
    policy = Throughput(CostProfile(tuple(1.0 + 0.02 * n for n in range(9)), step))
    random, lengths = Random(1), []
    for _ in range(300):
        draft = replace(proposed(model, 0, [1, 2, 3], policy, 8), catch_up_s=0.0)
        n, n_accepted = len(draft.tokens), 0
        while n_accepted < n and random.random() < 0.85:
            n_accepted += 1
        emitted = (*draft.tokens[:n_accepted], -1)
        policy.learn(Round(draft, n_accepted, emitted, step * draft.n_steps, 1.0 + 0.02 * n))
        lengths.append(n)
    assert least <= fmean(lengths[100:]) <= most


@pytest.mark.parametrize("kept_s", [1e-6, 0.02, 0.5])
def test_a_disturbed_step_of_one_of_several_drafters_is_corrected_by_two_rounds(
    kept_s: float,
) -> None:
    steps_s = {"draft": kept_s, "mtp": 0.03}
    policy = Throughput(CostProfile(tuple(1.0 + 0.02 * n for n in range(9))), steps_s=steps_s)
    model = ModelDrafter(FakeTarget(peak=0.85))
    for took_s in (0.01, 0.01, 7.0):  # the last one is interrupted
        draft = replace(proposed(model, 0, [1, 2, 3], policy, 8), step_s=took_s)
        policy.learn(Round(draft, 0, (-1,), took_s * draft.n_steps, 1.0))
    assert steps_s == {"draft": 0.01, "mtp": 0.03}


def test_a_translated_history_that_was_edited_is_read_anew() -> None:
    drafter = TranslatedDrafter(SuffixDrafter(), words(0), words(3))
    assert proposed(drafter, 0, [1, 2, 3, 4, 5, 1, 2], Fixed(2), 2).tokens == (3, 4)
    drafter.forget(0)
    assert proposed(drafter, 0, [1, 2, 7, 8, 5, 1, 2], Fixed(2), 2).tokens == (7, 8)


def test_translation_reads_text_and_applies_the_pairs() -> None:
    target = Vocabulary(
        lambda text: [ord(c) for c in text], lambda tokens: "".join(map(chr, tokens))
    )

    def tokenize(text: str) -> list[int]:
        return [1000 if t == "<end>" else ord(t) for t in _pieces(text)]

    def detokenize(tokens: Sequence[int]) -> str:
        return "".join("<end>" if t == 1000 else chr(t) for t in tokens)

    inner = Proposes("draft", [ord("o"), 1000, ord("k")], 0.5)
    drafter = TranslatedDrafter(inner, target, Vocabulary(tokenize, detokenize), [("#", "<end>")])
    draft = proposed(drafter, 0, [ord("a"), ord("#")], Fixed(3), 3)
    assert draft.tokens == (ord("o"), ord("#"), ord("k"))
    assert len(draft.probs) == 3
    short = proposed(drafter, 0, [ord("a"), ord("#"), ord("b")], Fixed(3), 2)
    assert len(short.tokens) == 2


def test_a_translated_draft_keeps_its_limit_in_the_targets_tokens() -> None:
    """One token of the draft is a word of three characters, each a token of the target."""
    target = Vocabulary(
        lambda text: [ord(c) for c in text], lambda tokens: "".join(map(chr, tokens))
    )
    draft = Vocabulary(lambda text: [0] * len(text), lambda tokens: "abc" * len(tokens))
    drafter = TranslatedDrafter(Proposes("draft", [1, 1], 0.5), target, draft)
    whole = proposed(drafter, 0, [ord("x")], Fixed(2), 2)
    assert whole.tokens == (ord("a"), ord("b"))
    assert len(whole.probs) == 2


def _pieces(text: str) -> list[str]:
    out, at = [], 0
    while at < len(text):
        piece = "<end>" if text.startswith("<end>", at) else text[at]
        out.append(piece)
        at += len(piece)
    return out


def test_counts_at_the_end_of_their_range_are_written(tmp_path: Path) -> None:
    cache = LookupCache()
    cache.counts[1, 2] = {3: 2**31 - 1}
    cache.add([1, 2, 3], 2)
    cache.save(tmp_path / "c.bin")
    assert LookupCache.load(tmp_path / "c.bin").counts[1, 2] == {3: 2**31 - 1}


def test_a_dynamic_cache_forgets_what_is_rare_first() -> None:
    cache = LookupCache()
    cache.add([1, 2, 1, 2, 1, 2], 0)
    kept = {k for k, f in cache.counts.items() if sum(f.values()) > 1}
    cache.add(list(range(10, 60)), 0)
    cache.trim(1000)
    assert len(cache.counts) > 100
    cache.trim(100)
    assert set(cache.counts) == kept


def test_without_a_file_nothing_is_kept_of_earlier_conversations() -> None:
    drafter = NgramCache()
    proposed(drafter, 0, [1, 2, 3, 4, 1, 2, 3], Fixed(2), 2)
    drafter.forget(0)
    assert drafter.dynamic is None
    assert proposed(drafter, 0, [9, 1, 2, 3], Fixed(2), 2).tokens == ()


def test_drafters_that_spend_steps_are_timed_apart() -> None:
    chain = ChainDrafter([], Proposes("draft", [1], 0.9, 1), Proposes("mtp", [2], 0.9, 1))
    draft = proposed(chain, 0, [0], Fixed(2), 2)
    assert draft.step_s != 0
    assert [other.step_s != 0 for other in draft.others] == [True]
    alone = proposed(ChainDrafter([], Proposes("mtp", [2], 0.9, 1)), 0, [0], Fixed(2), 2)
    assert alone.step_s == 0


def test_texts_of_another_salt_are_not_in_the_table() -> None:
    drafter, text = NgramMod(3, 1, 4, 1 << 12), [5, 6, 7, 8, 9, 10]
    for salt, sequence, wanted in ((7, 0, ()), (7, 1, (8, 9, 10)), (0, 2, ()), (1 << 60, 3, ())):
        history = text if not sequence else text[:3]
        request = DraftRequest(sequence, history, Fixed(4), 4, salt=salt)
        assert drafter.propose([request])[0].tokens == wanted, salt
