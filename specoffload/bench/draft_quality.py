"""Measures how good a draft model is for a target, and whether that predicts what it then brings.

The target first writes greedy texts after some of the embedded prompts, and both models read them.
If the draft has another vocabulary, the logits of both models cannot be compared. Translated drafts
are then verified along these texts. At last, the target continues other prompts with drafts, of 8
tokens and by the default policy. Their acceptance and their speed are compared with what the first
texts predict.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from offload.engine import Engine
from specdec.costs.draft_quality import (
    N_POSITIONS,
    AtPosition,
    BlockLength,
    TextCompared,
    block_lengths,
    block_lengths_of,
    by_position,
    compared,
    positions_of,
    sampled_tokens_per_round,
)
from specdec.costs.profile import CostProfile
from specdec.decoding.acceptance import Greedy, MatchAcceptance
from specdec.decoding.drafting import ChainDrafting
from specdec.decoding.loop import DecodingLoop
from specdec.decoding.member import BatchMember
from specdec.drafters.model import ModelDrafter
from specdec.policies.rules import Fixed
from specdec.policies.throughput import Throughput
from specdec.types import Drafter, Policy, Round
from specoffload import report
from specoffload.config.resolution import demo_prompts
from specoffload.opening.draft_model import DraftModel
from specoffload.session.session import SEQUENCE

_N_TOKENS = 48  # tokens written after each prompt
_N_TEXTS = (3, 12)  # fewest and most texts of each of the three parts
_PART_S = 15.0  # seconds that a part may take beyond its fewest texts
_MOST_PROMPT = 512  # tokens of a prompt
_LEAST_ACCEPTED = 1.02  # tokens of a round below which a policy practically drafts nothing

Translate = Callable[[Drafter], Drafter]  # makes a drafter draft in the target's tokens


@dataclass(frozen=True)
class Played:
    """What a policy's drafts brought on texts that were also decoded without drafts.

    `gain` is the speed in units of decoding without drafts, as the median of the texts.
    `acceptance` is by position, of the drafts whose tokens before it were right.
    """

    tokens_per_round: float
    gain: float
    acceptance: tuple[float | None, ...]


@dataclass(frozen=True)
class DraftQuality:
    """The result for one pair of target and draft."""

    n_texts: int
    n_tokens: int
    n_other_tokens: int  # tokens of the other texts
    positions: tuple[AtPosition, ...]
    lengths: tuple[BlockLength, ...]
    blocks: Played  # drafts of 8 tokens, on other texts
    default: Played  # the default policy, on other texts
    # Seconds of one of the target's tokens in a translated draft; None: nothing is translated.
    translated_token_s: float | None = None

    @property
    def pays(self) -> bool | None:
        """True if drafts are faster than none by T(n), the draft's step and the agreement.

        None if the default policy was measured, and did not confirm it.
        """
        if not self.best.n_drafted:
            return False
        drafts = self.default.tokens_per_round >= _LEAST_ACCEPTED
        return True if drafts and self.default.gain > 1.0 else None

    @property
    def verdict(self) -> str:
        """A sentence whether the draft pays on this machine, and how much."""
        best, reached = self.best, f"reached {self.default.gain:.2f} times the speed without drafts"
        if self.default.tokens_per_round < _LEAST_ACCEPTED:  # its speed only differs by noise
            reached = "drafted next to nothing"
        if self.pays is False:
            return (
                "the draft does not pay here: no draft length is expected to be faster than no "
                f"drafts, and the default policy {reached}"
            )
        expected = (
            f"drafts of {report.plural(best.n_drafted, 'token')} are expected to reach "
            f"{best.gain:.2f} times the speed without drafts"
        )
        if self.pays:
            return f"the draft pays here: {expected}, and the default policy {reached}"
        return (
            f"it is not certain that the draft pays here: {expected}, but the default policy "
            f"{reached}; measure again when the machine is idle"
        )

    @property
    def best(self) -> BlockLength:
        """The draft length that is predicted to be fastest."""
        return max(self.lengths, key=lambda length: length.gain)

    @property
    def sampled_tokens_per_round(self) -> float | None:
        """Tokens of a round of the best length by rejection sampling; None: not known."""
        if self.translated_token_s is not None:
            return None
        return sampled_tokens_per_round(self.positions, self.best.n_drafted)

    def as_data(self) -> dict[str, Any]:
        """The result as data for scripts."""
        return {
            "pays": self.pays,
            "n_texts": self.n_texts,
            "n_tokens": self.n_tokens,
            "positions": [asdict(at) for at in self.positions],
            "lengths": [asdict(length) for length in self.lengths],
            "best_length": self.best.n_drafted,
            "sampled_tokens_per_round": self.sampled_tokens_per_round,
            "translated_token_s": self.translated_token_s,
            "blocks": asdict(self.blocks),
            "default": asdict(self.default),
            "n_other_tokens": self.n_other_tokens,
        }


def measured_quality(
    target: Engine,
    draft: DraftModel,
    profile: CostProfile,
    own_prompts: Sequence[Sequence[int]] = (),
    translate: Translate | None = None,
) -> DraftQuality:
    """Measure a pair. `profile` has T(n) and the draft's step.

    The texts begin with `own_prompts`, or with the embedded ones if there are none. `translate` is
    given if the draft has another vocabulary. The first sequences of the target and the draft are
    used, and emptied afterwards.
    """
    prompts = _prompts(target, own_prompts)
    first = _first_texts(target, draft, profile, _as_time_allows(prompts), translate)
    policies = {
        "plain": None, "blocks": Fixed(_n_most(profile)), "default": Throughput(first.profile),
    }  # fmt: skip
    rounds: dict[str, list[list[Round]]] = {name: [] for name in policies}
    for prompt in _as_time_allows(prompts):
        for name, policy in policies.items():  # by turns, as other work may slow down either
            rounds[name].append(_rounds(target, draft, policy, prompt, translate))
    for model in (target, draft):
        model.sequences.rewind(SEQUENCE, 0)
    return DraftQuality(
        first.n_texts,
        first.n_tokens,
        sum([len(r.emitted) for text in rounds["plain"] for r in text]),
        first.positions,
        first.lengths,
        _played(rounds["blocks"], rounds["plain"]),
        _played(rounds["default"], rounds["plain"]),
        None if translate is None else first.profile.draft_step_s,
    )


def _n_most(profile: CostProfile) -> int:
    """The tokens of the longest drafts that are measured."""
    return min(N_POSITIONS, profile.n_max - 1)


@dataclass(frozen=True)
class _FirstTexts:
    """The first texts' verdict on a pair. `profile` has the price of a drafted token."""

    n_texts: int
    n_tokens: int
    positions: tuple[AtPosition, ...]
    lengths: tuple[BlockLength, ...]
    profile: CostProfile


def _first_texts(
    target: Engine,
    draft: DraftModel,
    profile: CostProfile,
    prompts: Iterator[list[int]],
    translate: Translate | None,
) -> _FirstTexts:
    """Compare the logits of both models, or verify translated drafts."""
    if translate is None:
        texts = [_compared(target, draft, prompt) for prompt in prompts]
        n_tokens = sum([len(text.agrees) for text in texts])
        lengths = tuple(block_lengths(texts, profile))
        return _FirstTexts(len(texts), n_tokens, tuple(by_position(texts)), lengths, profile)
    longest = Fixed(_n_most(profile))
    drafted = [_rounds(target, draft, longest, prompt, translate) for prompt in prompts]
    accepted = _accepted(drafted)
    profile = replace(profile, draft_step_s=_drafted_token_s(drafted))
    return _FirstTexts(
        len(drafted),
        sum([len(r.emitted) for text in drafted for r in text]),
        tuple(positions_of(accepted)),
        tuple(block_lengths_of(accepted, profile)),
        profile,
    )


def _prompts(target: Engine, own: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """The prompts in turn, each once and then from the first again.

    Without prompts of the user's these are the embedded ones, code and prose in turn.
    """
    if own:
        yield from map(list, itertools.cycle(own))
    code, prose = demo_prompts("code"), demo_prompts("prose")
    while True:
        for i in range(max(len(code), len(prose))):
            for text in (code[i % len(code)], prose[i % len(prose)]):
                tokens = target.tokenize(text, add_special=True, parse_special=False)
                yield tokens[: min(_MOST_PROMPT, target.n_ctx - 2 * _N_TOKENS)]


def _as_time_allows(prompts: Iterator[list[int]]) -> Iterator[list[int]]:
    """The next prompts, until there are enough or the time of a part has passed."""
    began = perf_counter()
    for n in range(_N_TEXTS[1]):
        if n >= _N_TEXTS[0] and perf_counter() - began > _PART_S:
            return
        yield next(prompts)


def _compared(target: Engine, draft: DraftModel, prompt: Sequence[int]) -> TextCompared:
    """Both models along the greedy text of the target after `prompt`."""
    rows, text = [], list(prompt)
    target.sequences.rewind(SEQUENCE, 0)
    if len(prompt) > 1:
        target.sequences.extend(SEQUENCE, prompt[:-1], 0)
    for _ in range(_N_TOKENS):
        rows.append(target.sequences.extend(SEQUENCE, text[-1:], 1)[0])
        text.append(int(rows[-1].argmax()))
    draft.sequences.rewind(SEQUENCE, 0)
    if len(prompt) > 1:
        draft.sequences.extend(SEQUENCE, prompt[:-1], 0)
    drafted = draft.sequences.extend(SEQUENCE, text[len(prompt) - 1 : -1], _N_TOKENS)
    return compared(np.stack(rows), drafted)


def _rounds(
    target: Engine,
    draft: DraftModel,
    policy: Policy | None,
    prompt: Sequence[int],
    translate: Translate | None,
) -> list[Round]:
    """Continue a prompt greedily, with drafts by `policy` or without."""
    drafting = None
    if policy is not None:
        n_vocab = target.n_vocab if translate is None else None
        drafter: Drafter = ModelDrafter(draft.sequences, n_vocab=n_vocab)
        if translate is not None:
            drafter = translate(drafter)
        draft.sequences.rewind(SEQUENCE, 0)
        drafting = ChainDrafting(target.sequences, drafter, policy)
    target.sequences.rewind(SEQUENCE, 0)
    loop = DecodingLoop(target.sequences, drafting)
    accept = MatchAcceptance(Greedy())
    loop.add(BatchMember(SEQUENCE, list(prompt), accept, _N_TOKENS, lambda _: False))
    rounds: list[Round] = []
    while not loop.is_idle:
        step = loop.step()
        for _, error in step.failed:
            raise error
        rounds += [round_ for _, round_ in step.rounds]
    return rounds


def _accepted(texts: Sequence[Sequence[Round]]) -> list[int]:
    """The accepted tokens of each draft, without those that a text's end cut short."""
    every = [r for text in texts for r in text]
    return [r.n_accepted for r in every if not r.end] or [r.n_accepted for r in every]


def _drafted_token_s(texts: Sequence[Sequence[Round]]) -> float:
    """Median seconds of a drafted token, in the target's tokens; 0 if nothing was drafted."""
    token_s = [r.draft_s / r.n_drafted for text in texts for r in text if r.n_drafted]
    return median(token_s) if token_s else 0.0


def _played(drafted: Sequence[Sequence[Round]], plain: Sequence[Sequence[Round]]) -> Played:
    """Sum up texts with drafts; `plain` are the same texts without."""
    every = [round_ for text in drafted for round_ in text]
    n_tokens = sum([len(r.emitted) for r in every])
    pairs = zip(plain, drafted, strict=True)
    gain = median([_token_s(without) / _token_s(with_drafts) for without, with_drafts in pairs])
    return Played(n_tokens / len(every), gain, tuple(_acceptance(every)))


def _token_s(rounds: Sequence[Round]) -> float:
    """Seconds per token."""
    took_s = sum([r.draft_s + r.verify_s + r.rollback_s for r in rounds])
    return took_s / sum([len(r.emitted) for r in rounds])


def _acceptance(rounds: Sequence[Round]) -> Iterator[float | None]:
    for k in range(N_POSITIONS):
        reached = [r.n_accepted > k for r in rounds if r.n_drafted > k and r.n_accepted >= k]
        yield sum(reached) / len(reached) if reached else None


# -- showing ---------------------------------------------------------------------------------------


def show(quality: DraftQuality, profile: CostProfile) -> None:
    """Print the table by position, and what it predicts beside what was seen."""
    draft, agreement = "draft", "first choices agree"
    if quality.translated_token_s is not None:
        draft, agreement = "translated draft", "accepted"
    report.table(
        f"how well the {draft} guesses the target: {quality.n_tokens} tokens of the target's own "
        f"texts, and {quality.n_other_tokens} of other texts, in drafts of {N_POSITIONS} tokens",
        ("position", "tokens", agreement, "KL, nats", "1 - TV", "then accepted"),
        [
            (
                str(at.position),
                str(at.n_tokens),
                _number(at.agreement),
                _number(at.kl),
                _number(at.overlap),
                _number(seen),
            )
            for at, seen in zip(quality.positions, quality.blocks.acceptance, strict=True)
        ],
    )
    best, default = quality.best, quality.default
    blocks = quality.lengths[-1]
    report.line(
        f"drafts of {blocks.n_drafted} tokens: {quality.blocks.tokens_per_round:.2f} tokens a "
        f"round ({blocks.tokens_per_round:.2f} predicted) and {quality.blocks.gain:.2f} times the "
        f"speed without drafts ({blocks.gain:.2f} predicted)"
    )
    line = (
        f"best fixed length, predicted: {_length(best.n_drafted)}, with "
        f"{best.tokens_per_round:.2f} tokens a round and {best.gain:.2f} times the speed without "
        "drafts"
    )
    if (sampled := quality.sampled_tokens_per_round) is not None:
        line += f"; {sampled:.2f} tokens a round at temperature 1 with --spec-accept reject"
    report.line(line)
    if quality.translated_token_s is not None:
        report.line(
            f"a drafted token of the target's takes {1e3 * quality.translated_token_s:.2f} ms, "
            "with its translation"
        )
    report.line(
        f"the default policy, measured: {default.tokens_per_round:.2f} tokens a round and "
        f"{default.gain:.2f} times the speed without drafts"
    )
    report.line(quality.verdict)
    if not (profile.draft_step_s or quality.translated_token_s):
        report.line("the draft's step is unknown, so these speeds take it as free")


def _length(n_drafted: int) -> str:
    return report.plural(n_drafted, "token") if n_drafted else "no drafts"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
