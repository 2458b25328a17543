"""Sampler chains of libllama: what they draw from, penalties, grammars, and drafts under them."""

from __future__ import annotations

import json
import re
from contextlib import closing

import numpy as np
import pytest
from resolved import config_of
from sampler_parts import FIXED, PROMPT, row_of
from speculation_parts import Sampler

from offload.errors import BadRequest
from offload.ggml.sampler import SamplerChain
from offload.sampling.options import SamplingOptions
from specoffload.generation.generation import GenerateOptions
from specoffload.generation.statistics import GenerationStats
from specoffload.session.infill import Fill
from specoffload.session.session import Session

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "on": {"type": "boolean"}},
        "required": ["n", "on"],
    }
)


def write(session: Session, **options: object) -> tuple[str, list[int], GenerationStats]:
    session.forget()
    pieces = list(session.generate(PROMPT, GenerateOptions(**options)))  # type: ignore[arg-type]
    stats = pieces[-1].stats
    assert stats is not None
    return "".join(p.text for p in pieces), [t for p in pieces for t in p.tokens], stats


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(0.5, 40, 0.95, 0.05), (1.0, 0, 1.0, 0.0), (1.5, 7, 1.0, 0.0), (0.8, 0, 0.5, 0.0),
     (1.0, 0, 1.0, 0.2), (0.0, 40, 0.95, 0.05)],
)  # fmt: skip
def test_a_chain_names_the_distribution_that_our_own_sampler_computes(
    plain: Session, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    row = row_of(plain)
    options = SamplingOptions(temperature, top_k, top_p, min_p, seed=1)
    with closing(SamplerChain(plain.target.model, options)) as chain:
        p = chain.probabilities(row, ())
    ours = Sampler(temperature, top_k=top_k, top_p=top_p, min_p=min_p).probabilities(row)
    assert p.sum() == pytest.approx(1.0)
    assert np.abs(p - ours).max() < 1e-5


def test_a_chain_draws_what_it_names(plain: Session) -> None:
    row = row_of(plain)
    options = SamplingOptions(1.0, 8, 1.0, 0.0, repeat_penalty=1.3, presence_penalty=0.4, seed=3)
    n = 20_000
    with closing(SamplerChain(plain.target.model, options)) as chain:
        for token in np.argsort(-row)[:3].tolist() * 2:
            chain.accepted(token)
        p = chain.probabilities(row, ())
        drawn = np.bincount([chain.choose(row, ()) for _ in range(n)], minlength=len(row))
    assert (drawn[p == 0.0] == 0).all()
    kept = p > 0
    chi_square = float((((drawn - n * p) ** 2)[kept] / (n * p)[kept]).sum())
    assert chi_square < 24.3  # 7 degrees of freedom, 0.1 %


def test_penalties_lower_what_was_accepted_as_llama_cpp_does(plain: Session) -> None:
    row = row_of(plain)
    token = int(row.argmax())
    options = SamplingOptions(
        1.0, 0, 1.0, 0.0, repeat_penalty=1.5, frequency_penalty=0.25, presence_penalty=0.5
    )
    with closing(SamplerChain(plain.target.model, options)) as chain:
        chain.accepted(token)
        chain.accepted(token)
        p = chain.probabilities(row, ())
    changed = row.astype(np.float64)
    changed[token] = changed[token] / 1.5 - 2 * 0.25 - 0.5
    wanted = np.exp(changed - changed.max())
    assert np.abs(p - wanted / wanted.sum()).max() < 1e-5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["plain", "matching", "rejecting"])
def test_a_grammar_holds_with_and_without_drafts(
    request: pytest.FixtureRequest, name: str, temperature: float
) -> None:
    session = request.getfixturevalue(name)
    text, _, stats = write(
        session,
        grammar='root ::= " " [a-z]+ " = " [0-9] [0-9]? "\\n"',
        n_predict=60,
        temperature=temperature,
        seed=11,
    )
    # The model may write letters until it reaches n_predict, so the rest is optional.
    assert re.fullmatch(r" [a-z]+( = ?[0-9]{0,2}\n?)?", text)
    assert (stats.n_drafted > 0) == (name != "plain")


def test_a_grammar_that_ends_inside_a_draft_ends_the_answer_there(
    plain: Session, matching: Session
) -> None:
    grammar = 'root ::= "    return n" "\\n"?'
    wanted = write(plain, grammar=grammar, n_predict=60)
    got = write(matching, grammar=grammar, n_predict=60)
    assert got[:2] == wanted[:2]
    assert got[0].rstrip("\n") == "    return n"
    assert got[2].n_tokens < 60
    assert got[2].n_drafted > 0


@pytest.mark.parametrize("name", ["matching", "rejecting"])
def test_a_json_schema_gives_json(request: pytest.FixtureRequest, name: str) -> None:
    session = request.getfixturevalue(name)
    text, _, _ = write(session, json_schema=SCHEMA, n_predict=300, temperature=0.7, seed=4)
    answer = json.loads(text)
    assert isinstance(answer["n"], int)
    assert isinstance(answer["on"], bool)


@pytest.mark.parametrize("options", [
    {"repeat_penalty": 1.3},
    {"frequency_penalty": 0.7, "repeat_last_n": -1},
    {"presence_penalty": 1.0, "temperature": 0.8, "seed": 5},
    {"temperature": 1.0, "top_k": 5, "seed": 9},
])  # fmt: skip
def test_penalties_and_a_seed_give_the_text_of_plain_decoding(
    plain: Session, matching: Session, options: dict[str, object]
) -> None:
    wanted = write(plain, n_predict=24, **options)
    got = write(matching, n_predict=24, **options)
    assert got[1] == wanted[1]
    assert got[2].n_drafted > 0


def test_all_tokens_count_where_repeat_last_n_says_so(plain: Session) -> None:
    def text(last_n: int) -> list[int]:
        return write(plain, n_predict=60, repeat_penalty=1.8, repeat_last_n=last_n)[1]

    assert text(-1) == text(512)
    assert text(2**32 + 4) == text(512)
    assert text(-1) != text(0)


def test_a_temperature_near_zero_is_greedy_also_under_a_grammar(
    plain: Session, rejecting: Session
) -> None:
    for session in (plain, rejecting):
        grammar = "root ::= [a-z \\n]+"
        cold = write(session, n_predict=16, temperature=1e-39, grammar=grammar)
        assert cold[1] == write(session, n_predict=16, temperature=0.0, grammar=grammar)[1]


def test_a_token_that_the_grammar_refuses_is_an_error_and_no_abort(plain: Session) -> None:
    options = SamplingOptions(0.0, grammar='root ::= "a" "b"')
    with closing(SamplerChain(plain.target.model, options)) as chain:
        wrong = plain.tokenize("zebra", add_special=False, parse_special=False)[0]
        with pytest.raises(BadRequest, match="the grammar refuses it"):
            chain.accepted(wrong)


def test_a_generation_begun_before_another_goes_on_where_it_was(plain: Session) -> None:
    plain.forget()
    first = plain.generate(PROMPT, GenerateOptions(n_predict=20))
    tokens = list(next(first).tokens)
    wanted = write(plain, n_predict=20)[1]
    for piece in first:
        tokens += piece.tokens
    assert tokens == wanted
    assert write(plain, n_predict=20)[1] == wanted


def test_rejection_sampling_keeps_to_penalties(rejecting: Session, plain: Session) -> None:
    greedy = {"n_predict": 24, "repeat_penalty": 1.3}
    assert write(rejecting, **greedy)[1] == write(plain, **greedy)[1]


def test_a_seed_repeats_rejection_sampling_with_a_draft_model(rejecting: Session) -> None:
    texts = [write(rejecting, n_predict=32, temperature=1.0, seed=seed)[1] for seed in (42, 42, 43)]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_a_flag_that_another_leaves_without_effect_is_named() -> None:
    given = FIXED | {
        "--spec-accept": "reject", "--spec-draft-n-min": 2, "--spec-policy": "p-min"
    }  # fmt: skip
    config = config_of(device="cpu", threads=1, ctx_size=512, spec_given=given)
    assert any("--spec-draft-n-min ignored" in reason for reason in config.spec.reasons)


@pytest.mark.parametrize("suffix_first", [False, True])
def test_a_session_writes_the_suffix_first_only_if_it_is_asked_to(
    suffix_first: bool, plain: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedded model has no tokens for infilling, so three others stand for them."""
    before_prefix, before_suffix, before_middle = 21, 22, 23
    monkeypatch.setattr(
        plain.target.model,
        "fim_tokens",
        lambda: (before_prefix, before_suffix, before_middle, -1, -1),
    )
    prefix, suffix = (
        plain.tokenize(text, add_special=False, parse_special=False)
        for text in ("def f(", "return")
    )
    tokens = plain.fill_tokens(Fill("def f(", "return"), GenerateOptions(spm_infill=suffix_first))
    parts = [before_prefix, *prefix], [before_suffix, *suffix]
    first, second = parts[::-1] if suffix_first else parts
    assert tokens[-len([*first, *second, 0]) :] == [*first, *second, before_middle]
