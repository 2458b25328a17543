"""Each of libllama's samplers leaves the right tokens, and drafts do not change a seed's text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray
from sampler_parts import PROMPT, row_of

from offload.errors import BadRequest
from offload.ggml.sampler import SamplerChain
from offload.sampling.options import SAMPLERS, SamplingOptions, checked, read_logit_bias
from specdec.decoding.acceptance import MatchAcceptance
from specdec.decoding.loop import NO_DRAFT
from specoffload.generation.generation import GenerateOptions
from specoffload.generation.statistics import GenerationStats
from specoffload.session.session import Session

OPEN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
STATEFUL: tuple[dict[str, object], ...] = (
    {"mirostat": 1, "mirostat_tau": 3.0},
    {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.3},
    {"xtc_probability": 0.5, "xtc_threshold": 0.1},
    {"temperature": 0.0, "xtc_probability": 0.5, "xtc_threshold": 0.1},
    {"dry_multiplier": 0.8, "dry_allowed_length": 1},
    {"temperature": 0.0, "dry_multiplier": 0.8, "dry_allowed_length": 1},
    {"samplers": (*SAMPLERS, "adaptive_p"), "adaptive_target": 0.3},
    {"typical_p": 0.7},
    {"top_n_sigma": 1.0},
    {"dynatemp_range": 0.5},
    {"repeat_penalty": 1.3, "repeat_last_n": 8},
    {"logit_bias": ((" ", -3.0), ("\n", 1.5))},
    {"grammar": 'root ::= ([a-m] [a-z]? " "?)+', "xtc_probability": 0.5},
    {"samplers": ("temperature", "top_k"), "top_k": 5},
)


def softmax(x: NDArray[np.float64]) -> NDArray[np.float64]:
    e = np.exp(x - x.max())
    return np.asarray(e / e.sum())


def left_by(
    session: Session, prompt: tuple[int, ...] = (), **options: object
) -> NDArray[np.float64]:
    chosen = SamplingOptions(**{**OPEN, "seed": 3, **options})  # type: ignore[arg-type]
    with closing(SamplerChain(session.target.model, chosen, prompt)) as chain:
        return chain.probabilities(row_of(session), ())


def write(session: Session, **options: object) -> tuple[list[int], GenerationStats]:
    session.forget()
    wanted = GenerateOptions(**{"temperature": 1.0, "n_predict": 40, **options})  # type: ignore[arg-type]
    pieces = list(session.generate(PROMPT, wanted))
    stats = pieces[-1].stats
    assert stats is not None
    return [t for p in pieces for t in p.tokens], stats


# -- with and without drafts -------------------------------------------------------------------


def exact_row(history: Sequence[int], n_vocab: int) -> NDArray[np.float32]:
    """Logits [n_vocab] that depend only on the history."""
    rng = np.random.default_rng([*history[-3:], len(history) % 5])
    row = rng.normal(0, 1.5, n_vocab)
    row[rng.integers(0, n_vocab, 6)] += 9  # a few likely tokens
    return row.astype(np.float32)


def never(_: int) -> bool:
    return False


def decoded(
    session: Session, options: SamplingOptions, n_tokens: int, drafts: Sequence[int] | None
) -> tuple[list[int], int]:
    """Returns `n_tokens` tokens chosen by a sampler chain, and the number of rejected drafts.

    Drafts are taken from the text `drafts`, with a fifth of their tokens replaced by random ones.
    None disables drafts.
    """
    n_vocab = session.target.n_vocab
    history = [1, 2, 3]
    rng = np.random.default_rng(1)
    n_rejected = 0
    with closing(SamplerChain(session.target.model, options, history)) as chain:
        accept = MatchAcceptance(chain)
        while len(history) < n_tokens + 3:
            at = len(history) - 3
            drafted = [] if drafts is None else list(drafts[at : at + int(rng.integers(0, 6))])
            drafted = [int(rng.integers(n_vocab)) if rng.random() < 0.2 else t for t in drafted]
            rows = np.stack(
                [exact_row([*history, *drafted[:i]], n_vocab) for i in range(len(drafted) + 1)]
            )
            draft = replace(NO_DRAFT, tokens=tuple(drafted), probs=(1.0,) * len(drafted))
            verdict = accept(draft, rows, history, never)
            n_rejected += verdict.n_accepted < len(drafted)
    return history[3 : n_tokens + 3], n_rejected


@pytest.mark.parametrize("options", STATEFUL, ids=str)
def test_a_seed_s_text_is_the_same_with_and_without_drafts(
    plain: Session, options: dict[str, object]
) -> None:
    for seed in range(3):
        chosen = SamplingOptions(**{"temperature": 1.0, "seed": seed, **options})  # type: ignore[arg-type]
        wanted, _ = decoded(plain, chosen, 80, None)
        got, n_rejected = decoded(plain, chosen, 80, wanted)
        assert got == wanted
        assert n_rejected > 3  # rejected tokens would show if they changed a state


@pytest.mark.parametrize("options", STATEFUL[:2] + STATEFUL[6:7], ids=str)
def test_a_draw_with_a_memory_is_judged_by_match_where_others_are_by_rejection(
    rejecting: Session, options: dict[str, object]
) -> None:
    chosen = checked(GenerateOptions(**options), 512)  # type: ignore[arg-type]
    with closing(SamplerChain(rejecting.target.model, chosen)) as chain:
        assert not chain.has_distribution
    _, stats = write(rejecting, seed=3, **options)
    assert stats.n_drafted > 0


# -- tokens left by each sampler ---------------------------------------------------------------


def test_typical_keeps_what_is_about_as_surprising_as_the_mean(plain: Session) -> None:
    p = softmax(row_of(plain).astype(np.float64))
    entropy = -(p * np.log(p)).sum()
    order = np.argsort(np.abs(-np.log(p) - entropy), kind="stable")
    kept = order[: int(np.searchsorted(np.cumsum(p[order]), 0.4)) + 1]
    got = left_by(plain, typical_p=0.4)
    assert set(np.flatnonzero(got)) == set(kept)
    assert got[kept] == pytest.approx(p[kept] / p[kept].sum(), rel=1e-4)


def test_top_n_sigma_keeps_what_is_near_the_greatest_logit(plain: Session) -> None:
    x = row_of(plain).astype(np.float64)
    got = left_by(plain, top_n_sigma=1.5)
    assert set(np.flatnonzero(got)) == set(np.flatnonzero(x >= x.max() - 1.5 * x.std()))


def test_dynamic_temperature_follows_the_entropy(plain: Session) -> None:
    x = row_of(plain).astype(np.float64)
    p = softmax(x)
    share = -(p * np.log(p)).sum() / math.log(len(x))
    temperature = 0.5 + 1.0 * share**2.0
    got = left_by(plain, temperature=1.0, dynatemp_range=0.5, dynatemp_exponent=2.0)
    assert np.abs(got - softmax(x / temperature)).max() < 1e-5


def test_xtc_leaves_out_all_but_the_last_of_the_likely_ones_as_often_as_asked(
    plain: Session,
) -> None:
    p = softmax(row_of(plain).astype(np.float64))
    threshold = float(np.sort(p)[-4])  # four tokens reach it
    last = int(np.argsort(-p)[3])
    options = SamplingOptions(
        **OPEN,
        seed=3,
        xtc_probability=0.3,
        xtc_threshold=threshold * 0.999,  # type: ignore[arg-type]
    )
    n = 4000
    with closing(SamplerChain(plain.target.model, options)) as chain:
        cut = 0
        for _ in range(n):
            left = chain.probabilities(row_of(plain), ())
            if left[p.argmax()] == 0:
                cut += 1
                assert left[last] > 0
                assert left.argmax() == last
    assert abs(cut - 0.3 * n) < 4 * math.sqrt(n * 0.3 * 0.7)


def test_dry_lowers_the_token_that_would_lengthen_a_repetition(plain: Session) -> None:
    a, b, c = 100, 101, 102
    options = {"dry_multiplier": 0.8, "dry_base": 1.75, "dry_allowed_length": 2}
    options["dry_sequence_breakers"] = ()
    got = left_by(plain, (a, b, c, a, b), **options)
    x = row_of(plain).astype(np.float64)
    x[c] -= 0.8 * 1.75 ** (2 - 2)
    assert np.abs(got - softmax(x)).max() < 1e-5


def test_a_breaker_ends_a_repetition(plain: Session) -> None:
    (newline,) = plain.tokenize("\n", add_special=False, parse_special=False)
    options: dict[str, object] = {"dry_multiplier": 0.8, "dry_allowed_length": 2}
    broken = left_by(plain, (100, newline, 102, 100, newline), **options)
    assert np.abs(broken - softmax(row_of(plain).astype(np.float64))).max() < 1e-6
    whole = left_by(plain, (100, newline, 102, 100, newline), dry_sequence_breakers=(), **options)
    assert whole[102] < broken[102]


def test_penalties_look_at_the_prompt_as_llama_server_does(plain: Session) -> None:
    token = int(row_of(plain).argmax())
    assert left_by(plain, (token,), repeat_penalty=1.5)[token] < left_by(plain)[token]
    seen = (token, *range(200, 264))  # 64 tokens ago
    assert (
        left_by(plain, seen, repeat_penalty=1.5, repeat_last_n=64)[token]
        > left_by(plain, seen, repeat_penalty=1.5, repeat_last_n=65)[token]
    )


def test_samplers_work_in_the_order_they_are_named(plain: Session) -> None:
    token = int(row_of(plain).argmax())
    penalty = {"presence_penalty": 100.0, "top_k": 1}
    first = left_by(plain, (token,), samplers=("penalties", "top_k"), **penalty)
    last = left_by(plain, (token,), samplers=("top_k", "penalties"), **penalty)
    assert first[token] == 0
    assert last[token] == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_order_holds_for_greedy_choices(plain: Session, temperature: float) -> None:
    token = int(row_of(plain).argmax())
    second = int(np.argsort(-row_of(plain))[1])
    for samplers, wanted in (
        (("penalties", "top_k", "temperature"), second),
        (("top_k", "penalties", "temperature"), token),
        (("temperature", "penalties", "top_k"), token if temperature == 0 else second),
    ):
        options = SamplingOptions(
            temperature, top_k=1, presence_penalty=100.0, samplers=samplers, seed=3
        )
        with closing(SamplerChain(plain.target.model, options, (token,))) as chain:
            assert chain.choose(row_of(plain), ()) == wanted


def test_min_keep_keeps_so_many(plain: Session) -> None:
    assert np.count_nonzero(left_by(plain, top_p=1e-6)) == 1
    assert np.count_nonzero(left_by(plain, top_p=1e-6, min_keep=7)) == 7
    assert np.count_nonzero(left_by(plain, min_p=1.0, min_keep=7)) == 7


def test_mirostat_keeps_to_a_surprise(plain: Session) -> None:
    """Tokens drawn from the same logits have a higher mean surprise if mirostat_tau is higher."""
    row = row_of(plain)
    p = softmax(row.astype(np.float64))
    for version in (1, 2):
        means = []
        for tau in (1.0, 4.0):
            options = SamplingOptions(
                1.0, seed=3, mirostat=version, mirostat_tau=tau, mirostat_eta=0.1
            )
            with closing(SamplerChain(plain.target.model, options)) as chain:
                drawn = [chain.choose(row, ()) for _ in range(600)]
            means.append(float(-np.log2(p[drawn[100:]]).mean()))
        assert means[0] < means[1]


# -- biases ------------------------------------------------------------------------------------


def test_a_bias_is_added_and_false_is_never(plain: Session) -> None:
    x = row_of(plain).astype(np.float64)
    token = int(x.argmax())
    got = left_by(plain, logit_bias=((token, -2.5), (7, 1.0)))
    x[token] -= 2.5
    x[7] += 1.0
    assert np.abs(got - softmax(x)).max() < 1e-5
    assert left_by(plain, logit_bias=((token, -math.inf),))[token] == 0
    for temperature in (0.0, 1.0):
        tokens, _ = write(
            plain, temperature=temperature, seed=3, logit_bias=((" ", -math.inf),), n_predict=60
        )
        (space,) = plain.tokenize(" ", add_special=False, parse_special=False)
        assert space not in tokens


def test_a_bias_can_force_a_token_also_under_a_grammar(plain: Session) -> None:
    grammar = 'root ::= ("a" | "b")+'
    tokens, _ = write(
        plain, temperature=0.0, n_predict=8, grammar=grammar, logit_bias=(("b", 100.0),)
    )
    text = plain.target.detokenize(tokens)
    assert set(text) == {"b"}


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "repeat_penalty": 1.3},
        {"temperature": 0.0, "samplers": ("top_k", "penalties", "temperature"), "top_k": 3},
        {"temperature": 0.0, "grammar": "root ::= [^\\x00]*"},
        {"grammar": "root ::= [^\\x00]*", "top_k": 2},
        {"typical_p": 0.9, "xtc_probability": 0.5},
    ],
)
def test_an_ignored_end_token_is_never_chosen(plain: Session, options: dict[str, object]) -> None:
    """Without `ignore_eos`, the bias makes an end token the first choice."""
    ends = {*plain.target.model.ends}
    options = {"n_predict": 30, "seed": 3, "logit_bias": ((min(ends), 100.0),), **options}
    tokens, _ = write(plain, **options)
    assert len(tokens) == 1
    assert tokens[0] in ends
    tokens, _ = write(plain, ignore_eos=True, **options)
    assert len(tokens) == 30
    assert not ends & {*tokens}


def test_ignored_end_tokens_leave_the_others_probabilities(plain: Session) -> None:
    ends = list(plain.target.model.ends)
    left = softmax(np.delete(row_of(plain).astype(np.float64), ends))
    got = left_by(plain, ignore_eos=True)
    assert np.abs(np.delete(got, ends) - left).max() < 1e-5
    assert not got[ends].any()


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ({"15043": 1, "7": -100}, ((15043, 1.0), (7, -100.0))),
        ({"Hello": -0.5}, (("Hello", -0.5),)),
        ([[15043, 1.0], ["Hello", False]], ((15043, 1.0), ("Hello", -math.inf))),
        ({}, ()),
        ([], ()),
    ],
)
def test_biases_are_read_in_every_form(value: object, wanted: object) -> None:
    assert read_logit_bias(value) == wanted


@pytest.mark.parametrize(
    "value", [5, "a", [5], [[1]], {"1": True}, {"1": "2"}, [[True, 1]], [["", 1]], [[1.5, 1]]]
)
def test_a_bias_that_is_none_is_one_sentence(value: object) -> None:
    with pytest.raises(BadRequest, match="logit_bias"):
        read_logit_bias(value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"grammar": "root ::= ("}, "does not parse"),
        ({"json_schema": "{"}, "is not JSON"),
        ({"json_schema": "{}", "grammar": 'root ::= "a"'}, "exclude each other"),
        ({"temperature": 1e39}, "temperature 1e.39: must be a number up to 1000"),
        ({"temperature": math.nan}, "temperature nan"),
        ({"repeat_penalty": 0.0}, "repeat_penalty 0.0: must be over 0"),
        ({"logit_bias": ((10**6, 1.0),)}, "logit_bias names token 1000000: the vocabulary has"),
        ({"logit_bias": ((1, math.nan),)}, "logit_bias of '1' is nan"),
        ({"mirostat": 3}, "mirostat 3: must be 0"),
        ({"samplers": ("magic",)}, "'magic' is no sampler"),
        ({"min_keep": -1}, "min_keep -1"),
        ({"dry_sequence_breakers": ("a",) * 40}, "40 dry_sequence_breakers: at most 32"),
        ({"xtc_threshold": math.inf}, "xtc_threshold inf"),
    ],
)
def test_bad_sampling_parameters_are_one_sentence(
    plain: Session, options: dict[str, object], words: str
) -> None:
    with pytest.raises(BadRequest, match=words):
        write(plain, **options)


def test_all_tokens_forbidden_is_one_sentence(plain: Session) -> None:
    biases = tuple((i, -math.inf) for i in range(plain.target.n_vocab))
    for temperature in (0.0, 1.0):
        with pytest.raises(BadRequest, match=r"entries: at most|leave no token"):
            write(plain, temperature=temperature, logit_bias=biases)


# -- logprobs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "matching", "rejecting"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_the_model_s_own(
    request: pytest.FixtureRequest, plain: Session, name: str, temperature: float
) -> None:
    session = request.getfixturevalue(name)
    session.forget()
    asked = GenerateOptions(
        n_predict=24, temperature=temperature, top_k=3, seed=3, n_probs=5, ignore_eos=True
    )
    pieces = list(session.generate(PROMPT, asked))
    tokens = [t for p in pieces for t in p.tokens]
    told = [entry for p in pieces for entry in p.logprobs]
    assert [entry.chosen.token for entry in told] == tokens
    prompt = session.tokenize(PROMPT, add_special=True, parse_special=True)
    target = plain.target
    plain.forget()
    rows = target.sequences.extend(0, [*prompt, *tokens])[len(prompt) - 1 : -1]
    plain.forget()
    for row, entry in zip(rows, told, strict=True):
        p = softmax(row.astype(np.float64))
        assert entry.chosen.logprob == pytest.approx(math.log(p[entry.chosen.token]), abs=0.02)
        best = np.argsort(-p)[:5]
        assert [t.logprob for t in entry.top] == pytest.approx(np.log(p[best]), abs=0.02)
        assert all(a.logprob >= b.logprob for a, b in pairwise(entry.top))
        assert entry.chosen.piece == target.model.piece(entry.chosen.token, special=True)


def test_probabilities_after_sampling_are_of_what_is_left(plain: Session) -> None:
    plain.forget()
    asked = GenerateOptions(
        n_predict=16, temperature=1.0, top_k=3, top_p=1.0, min_p=0.0, seed=3,
        n_probs=8, post_sampling_probs=True,
    )  # fmt: skip
    told = [e for p in plain.generate(PROMPT, asked) for e in p.logprobs]
    assert told
    for entry in told:
        assert len(entry.top) == 3
        assert sum(math.exp(t.logprob) for t in entry.top) == pytest.approx(1.0, abs=1e-5)
        assert entry.chosen in entry.top


def test_a_greedy_choice_was_certain_after_sampling(plain: Session) -> None:
    plain.forget()
    asked = GenerateOptions(n_predict=4, temperature=0.0, n_probs=3, post_sampling_probs=True)
    told = [entry for piece in plain.generate(PROMPT, asked) for entry in piece.logprobs]
    assert [[t.logprob for t in entry.top] for entry in told] == [[0.0]] * 4


def test_nobody_who_did_not_ask_is_told_or_pays(plain: Session) -> None:
    with closing(SamplerChain(plain.target.model, SamplingOptions(0.0))) as chain:
        token = chain.choose(row_of(plain), ())
        chain.accepted(token)
        assert chain.take_logprobs() == ()
    assert all(p.logprobs == () for p in plain.generate(PROMPT, GenerateOptions(n_predict=4)))
