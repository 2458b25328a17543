"""Measures how good a draft model is for a target, and whether that predicts what it then brings.

The target first writes greedy texts after some of the embedded prompts, and both models read them.
Then it continues other prompts with drafts, of 8 tokens and by the default policy. Their acceptance
and their speed are compared with what the first texts predict.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
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
    by_position,
    compared,
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
from specdec.types import Policy, Round
from specoffload import report
from specoffload.config.resolution import demo_prompts
from specoffload.opening.draft_model import DraftModel
from specoffload.session.session import SEQUENCE

_N_TOKENS = 48  # tokens written after each prompt
_N_TEXTS = (3, 12)  # fewest and most texts of each of the three parts
_PART_S = 15.0  # seconds that a part may take beyond its fewest texts
_MOST_PROMPT = 512  # tokens of a prompt


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

    @property
    def best(self) -> BlockLength:
        """The draft length that is predicted to be fastest."""
        return max(self.lengths, key=lambda length: length.gain)

    def as_data(self) -> dict[str, Any]:
        """The result as data for scripts."""
        n_best = self.best.n_drafted
        return {
            "n_texts": self.n_texts,
            "n_tokens": self.n_tokens,
            "positions": [asdict(at) for at in self.positions],
            "lengths": [asdict(length) for length in self.lengths],
            "best_length": n_best,
            "sampled_tokens_per_round": sampled_tokens_per_round(self.positions, n_best),
            "blocks": asdict(self.blocks),
            "default": asdict(self.default),
            "n_other_tokens": self.n_other_tokens,
        }


def measured_quality(target: Engine, draft: DraftModel, profile: CostProfile) -> DraftQuality:
    """Measure a pair whose vocabularies are the same. `profile` has T(n) and the draft's step.

    The target's and the draft's first sequence are used, and emptied afterwards.
    """
    prompts = _prompts(target)
    texts: list[TextCompared] = []
    for prompt in _as_time_allows(prompts):
        texts.append(_compared(target, draft, prompt))
    n_most = min(N_POSITIONS, profile.n_max - 1)
    policies = {"plain": None, "blocks": Fixed(n_most), "default": Throughput(profile)}
    rounds: dict[str, list[list[Round]]] = {name: [] for name in policies}
    for prompt in _as_time_allows(prompts):
        for name, policy in policies.items():  # by turns, as other work may slow down either
            rounds[name].append(_rounds(target, draft, policy, prompt))
    for model in (target, draft):
        model.sequences.rewind(SEQUENCE, 0)
    return DraftQuality(
        len(texts),
        sum([len(text.agrees) for text in texts]),
        sum([len(r.emitted) for text in rounds["plain"] for r in text]),
        tuple(by_position(texts)),
        tuple(block_lengths(texts, profile)),
        _played(rounds["blocks"], rounds["plain"]),
        _played(rounds["default"], rounds["plain"]),
    )


def _prompts(target: Engine) -> Iterator[list[int]]:
    """The embedded prompts, code and prose in turn, each once and then from the first again."""
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
    its = draft.sequences.extend(SEQUENCE, text[len(prompt) - 1 : -1], _N_TOKENS)
    return compared(np.stack(rows), its)


def _rounds(
    target: Engine, draft: DraftModel, policy: Policy | None, prompt: Sequence[int]
) -> list[Round]:
    """Continue a prompt greedily, with drafts by `policy` or without."""
    drafting = None
    if policy is not None:
        drafter = ModelDrafter(draft.sequences, n_vocab=target.n_vocab)
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
    report.table(
        f"how well the draft guesses the target: {quality.n_tokens} tokens of the target's own "
        f"texts, and {quality.n_other_tokens} of other texts, in drafts of {N_POSITIONS} tokens",
        ("position", "tokens", "first choices agree", "KL, nats", "1 - TV", "then accepted"),
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
    sampled = sampled_tokens_per_round(quality.positions, best.n_drafted)
    report.line(
        f"best fixed length, predicted: {_length(best.n_drafted)}, with "
        f"{best.tokens_per_round:.2f} tokens a round and {best.gain:.2f} times the speed without "
        f"drafts; {sampled:.2f} tokens a round at temperature 1 with --spec-accept reject"
    )
    report.line(
        f"the default policy, measured: {default.tokens_per_round:.2f} tokens a round and "
        f"{default.gain:.2f} times the speed without drafts"
    )
    if not profile.draft_step_s:
        report.line("the draft's step is unknown, so these speeds take it as free")


def _length(n_drafted: int) -> str:
    return report.plural(n_drafted, "token") if n_drafted else "no drafts"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
