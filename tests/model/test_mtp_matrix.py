"""Greedy texts with a model's own layers (MTP) equal those of plain decoding, in all combinations.

A case is an architecture, where its weights are, the number of requests at a time, the longest
draft, and what happened before. Every run plays a sample that has each pair of these values.
WHOLE_MATRIX=1 plays all of them with 40 prompts each, and prints one line for each test.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations, islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mtp_parts import LONGEST, WAYS, open_mtp, prompts, written
from numpy.typing import NDArray
from test_slots import Plain, answer_of

from lab.synth.mtp import ARCHITECTURES, write_mtp
from offload.sequences.block_draft import BlockDraft, DraftedBlock
from specoffload.generation.generation import GenerateOptions
from specoffload.session.session import Session

IS_WHOLE = bool(os.environ.get("WHOLE_MATRIX"))
N_CTX = 256
N_PROMPTS = 40
N_PREDICT = 12
SIZES = (1, 4)  # requests at a time
BLOCKS = tuple(range(1, LONGEST + 1))
# "kept": the prompt continues a text that other prompts have since moved to host memory.
# "full": the context fills up. A single request ends. If there are several, some wait.
EVENTS = ("fresh", "cancelled", "kept", "full")
RIGHT = 0.75  # probability with which a drafted token is replaced by the right one
Group = tuple[str, str, int]  # architecture, way, requests at a time: the cases of one session
GROUPS: list[Group] = list(product(ARCHITECTURES, WAYS, SIZES))


@dataclass(frozen=True)
class Case:
    block: int  # most tokens of a draft
    event: str
    texts: tuple[int, ...]  # the prompts that run at the same time


def whole(size: int) -> list[Case]:
    texts = [tuple(range(i, i + size)) for i in range(0, N_PROMPTS, size)]
    return [Case(*case) for case in product(BLOCKS, EVENTS, texts)]


@cache
def sample() -> dict[Group, list[Case]]:
    """A session for each architecture and way. Sizes and events alternate."""
    rng, found = np.random.default_rng(23), {}
    for a, architecture in enumerate(ARCHITECTURES):
        numbers = iter(rng.permutation(N_PROMPTS).tolist() * 3)
        for w, way in enumerate(WAYS):
            size = SIZES[(a + w) % 2]
            found[architecture, way, size] = [
                Case(block, EVENTS[(block + w + a) % 4], tuple(islice(numbers, size)))
                for block in BLOCKS
            ]
    return found


def test_the_sample_has_each_pair_of_values() -> None:
    seen = {
        pair
        for group, cases in sample().items()
        for case in cases
        for pair in combinations(enumerate((*group, case.block, case.event)), 2)
    }
    values = (ARCHITECTURES, [*WAYS], SIZES, BLOCKS, EVENTS)
    assert seen == {
        ((i, x), (j, y))
        for (i, first), (j, second) in combinations(enumerate(values), 2)
        for x, y in product(first, second)
    }


class Plainly:
    """The answers of one model without drafts, each computed once."""

    def __init__(self, path: Path) -> None:
        self._session = open_mtp(path, "resident", plain=True, ctx_size=N_CTX)
        self._judge = Plain(path)
        self._known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def answer(self, text: Sequence[int], n: int) -> list[int]:
        key = tuple(text), n
        if key not in self._known:
            self._session.forget()
            self._known[key] = written(self._session, text, n)
        return self._known[key]

    def close(self) -> None:
        self._session.close()

    def is_near_tie(self, text: Sequence[int], got: list[int], n: int) -> bool:
        try:
            self._judge.check(text, got, self.answer(text, n))
        except (AssertionError, ValueError):
            return False
        return True


@dataclass
class _OftenRight:
    """A block whose places often have the text's next token."""

    block: DraftedBlock
    text: Sequence[int]
    rng: np.random.Generator

    def place(self, index: int, before: int | None) -> tuple[NDArray[np.float32], float | None]:
        logits, confidence = self.block.place(index, before)
        if index < len(self.text) and self.rng.random() < RIGHT:
            logits[self.text[index]] = logits.max() + 1
        return logits, confidence


@dataclass
class Player:
    """Plays cases in one session, and compares each answer with plain decoding's."""

    session: Session
    plainly: Plainly
    size: int
    n_texts: int = 0
    n_tokens: int = 0
    n_accepted: int = 0
    n_cached: int = 0  # tokens of kept prompts that were not evaluated again
    ties: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._texts = prompts(N_PROMPTS)
        self._wanted: dict[tuple[int, ...], list[int]] = {}
        self._rng = np.random.default_rng(self.size)
        layers = self.session.target.opened.row_draft
        assert layers is not None
        if isinstance(layers, BlockDraft):
            self._correct_blocks(layers)
            return
        extend_batch = layers.extend_batch

        def often_right(parts: Sequence[tuple[int, Sequence[int], int]]) -> list[Any]:
            """Raise the logit of the text's next token, so that drafts of any length are kept."""
            rows = extend_batch(parts)
            histories = {s: self._whole(s) for s, *_ in parts}
            for (s, *_), row in zip(parts, rows, strict=True):
                at = layers.length(s)
                if at < len(histories[s]) and self._rng.random() < RIGHT:
                    row[0, histories[s][at]] = row.max() + 1
            return rows

        layers.extend_batch = often_right  # type: ignore[method-assign]

    def _correct_blocks(self, layers: BlockDraft) -> None:
        """Let blocks draft the text's next tokens often."""
        draft_blocks = layers.draft_blocks

        def often_right(parts: Sequence[tuple[int, Sequence[int]]], n_tokens: int) -> list[Any]:
            blocks = draft_blocks(parts, n_tokens)
            return [
                _OftenRight(block, self._whole(s)[layers.length(s) + 1 :], self._rng)
                for (s, _), block in zip(parts, blocks, strict=True)
            ]

        layers.draft_blocks = often_right  # type: ignore[method-assign]

    def _whole(self, sequence: int) -> list[int]:
        """The prompt of the request that has this sequence, and its answer by plain decoding."""
        for request in self.session.batcher._running.values():
            if request.slot is not None and request.slot.number == sequence:
                prompt = request.history[: request.n_prompt]
                return [*prompt, *self._wanted[tuple(prompt)]]
        return []

    def play(self, case: Case) -> None:
        texts = [self._texts[i] for i in case.texts]
        match case.event:
            case "fresh":
                self._compare(case, texts)
            case "cancelled":
                self._compare(case, texts, n_cancelled=1)
                self._compare(case, texts[:1])
            case "kept":
                others = [self._texts[(i + self.size) % N_PROMPTS] for i in case.texts]
                self._compare(case, texts)
                self._compare(case, others)
                longer = [
                    [*text, *self.plainly.answer(text, N_PREDICT), *other[:8]]
                    for text, other in zip(texts, others, strict=True)
                ]
                self._compare(case, longer)
            case "full":
                room = [2 + i % 9 for i in case.texts]
                long = [
                    (t * N_CTX)[: N_CTX // self.size - n] for t, n in zip(texts, room, strict=True)
                ]
                self._compare(case, long, n=2 * N_PREDICT)

    def _compare(
        self, case: Case, texts: Sequence[list[int]], n: int = N_PREDICT, n_cancelled: int = 0
    ) -> None:
        options = GenerateOptions(n_predict=n, ignore_eos=True, draft_max=case.block)
        wanted = [self.plainly.answer(text, n) for text in texts]
        self._wanted |= {tuple(t): w for t, w in zip(texts, wanted, strict=True)}
        requests = [self.session.start(text, options) for text in texts]
        if n_cancelled:
            for _ in range(2 + case.block % 3):
                self.session.step()
            for request in requests[:n_cancelled]:
                self.session.cancel(request)
        while not self.session.is_idle:
            self.session.step()
        for text, request, right in [*zip(texts, requests, wanted, strict=True)][n_cancelled:]:
            answer = answer_of(request)
            self.n_texts += 1
            self.n_tokens += len(answer.tokens)
            self.n_accepted += answer.stats.n_accepted
            if case.event == "kept":
                self.n_cached += answer.stats.n_cached_tokens
            if answer.tokens != right:
                is_tie = self.plainly.is_near_tie(text, answer.tokens, n)
                (self.ties if is_tie else self.wrong).append(
                    f"{case} {len(text)}: {answer.tokens} instead of {right}"
                )


@pytest.fixture(scope="module", autouse=True)
def nothing_kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measurements of other runs would change how layers are split."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECOFFLOAD_PROFILE_DIR", str(tmp_path_factory.mktemp("profiles")))
        yield


@pytest.fixture(scope="module")
def plainly(request: pytest.FixtureRequest, models: Path) -> Iterator[Plainly]:
    found = Plainly(write_mtp(models, request.param))
    yield found
    found.close()


@pytest.mark.timeout(24 * 3600 if IS_WHOLE else 300)
@pytest.mark.parametrize(
    ("plainly", "group"),
    [(group[0], group) for group in (GROUPS if IS_WHOLE else sample())],
    indirect=["plainly"],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_greedy_texts_are_those_of_plain_decoding(
    plainly: Plainly, group: Group, models: Path
) -> None:
    architecture, way, size = group
    path = write_mtp(models, architecture)
    with open_mtp(path, way, size, ctx_size=N_CTX, cache_ram_bytes=None) as session:
        if session.target.opened.weights.hybrid is not None:
            ways = session.target.opened.weights.ways
            ways.change(unsplit=frozenset())  # even if splitting is slower
            assert ways.now.splits(1)
        player = Player(session, plainly, size)
        for case in whole(size) if IS_WHOLE else sample()[group]:
            player.play(case)
        assert session.target.opened.row_draft is not None
        n_unknown = session.target.opened.row_draft.n_unknown_rows
    if IS_WHOLE:
        print(
            f"\n{'-'.join(map(str, group))}: {player.n_texts} texts, {player.n_tokens} tokens, "
            f"{player.n_accepted} drafted tokens accepted, {player.n_cached} of kept prompts, "
            f"{len(player.wrong)} texts differ, {len(player.ties)} at near ties, "
            f"{n_unknown} rows unknown"
        )
    assert not player.wrong
    assert not player.ties
    assert player.n_accepted > player.n_texts
    assert player.n_cached
    assert not n_unknown
