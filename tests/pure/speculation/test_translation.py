"""Translation between vocabularies: what a draft model reads, and what becomes of its drafts."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fake_target import FakeTarget
from hypothesis import given, settings
from hypothesis import strategies as st
from parts import Proposes
from speculation_parts import proposed

from specdec.drafters.memory import DraftMemory
from specdec.drafters.model import ModelDrafter
from specdec.drafters.translate import TranslatedDrafter
from specdec.drafters.vocabulary import Vocabulary, survival
from specdec.policies.rules import Fixed
from specdec.types import Draft, DraftRequest

BOS, END = 900, 901
SPECIAL = {BOS: "<s>", END: "<end>"}


def letters(n: int = 1, *, adds_space: bool = False, bos: bool = False) -> Vocabulary:
    """Tokens of up to `n` characters of a word, which are numbered as they come up."""
    ids: dict[str, int] = {}

    def tokenize(text: str) -> list[int]:
        pieces = re.findall(rf"\x01|\s?[^\s\x01]{{1,{n}}}|\s", f" {text}" if adds_space else text)
        return [ids.setdefault(piece, len(ids)) for piece in pieces]

    def detokenize(tokens: Sequence[int]) -> str:
        spelled = {number: piece for piece, number in ids.items()} | SPECIAL
        return "".join(spelled[token] for token in tokens)

    return Vocabulary.probed(tokenize, detokenize, (BOS,) if bos else ())


class Reads(Proposes):
    """Remembers what it was asked to continue."""

    read: list[int]
    n_same: int | None

    def _propose(self, asked: DraftRequest) -> Draft:
        self.read, self.n_same = list(asked.history), asked.n_same
        return super()._propose(asked)


def reader(tokens: Sequence[int] = ()) -> Reads:
    return Reads("draft", list(tokens), 0.5)


def test_blanks_that_a_tokenizer_adds_are_found() -> None:
    plain, pieces = letters(3), letters(3, adds_space=True)
    assert (plain.adds_space, plain.anchor) == (False, "")
    assert (pieces.adds_space, pieces.anchor) == (True, "\x01")
    assert pieces.text_of(pieces.tokenize("abc def"), begins=True) == "abc def"
    assert pieces.text_of(pieces.continuation("abc def")) == "abc def"


def test_words_in_several_tokens_are_read_as_the_draft_reads_them() -> None:
    """The target spells letter by letter, and the draft's tokens have up to four letters."""
    target, draft = letters(1), letters(4, adds_space=True)
    inner = reader()
    drafter = TranslatedDrafter(inner, target, draft)
    text = "some words, and others"
    history: list[int] = []
    for token in target.tokenize(text):
        history.append(token)
        proposed(drafter, 0, history, Fixed(2), 2)
        seen = text[: len(target.detokenize(history))]
        assert inner.read == draft.tokenize(seen), "as if the text so far were tokenised whole"


def test_a_draft_that_cannot_rewind_reads_tokens_that_stay() -> None:
    target, draft = letters(1), letters(4)
    inner = reader()
    drafter = TranslatedDrafter(inner, target, draft, only_appends=True)
    history: list[int] = []
    before: list[int] = []
    for token in target.tokenize("some words"):
        history.append(token)
        proposed(drafter, 0, history, Fixed(2), 2)
        assert inner.read[: len(before)] == before
        before = inner.read


@settings(deadline=None)
@given(st.lists(st.sampled_from(["a", "bcd", " ", " ef", "\n", "ghijklmnop" * 9]), max_size=90))
def test_a_long_text_costs_a_short_tail_and_loses_nothing(parts: list[str]) -> None:
    target, draft = letters(2), letters(5, adds_space=True)
    inner = reader()
    drafter = TranslatedDrafter(inner, target, draft)
    history: list[int] = target.tokenize("begin")
    read: list[int] = []
    for part in parts:
        history += target.tokenize(part)
        proposed(drafter, 0, history, Fixed(2), 2)
        assert inner.n_same is not None
        assert inner.read[: inner.n_same] == read[: inner.n_same], "the part that stays stays"
        read = inner.read
        assert draft.text_of(read, begins=True) == target.detokenize(history)
    open_chars = len(draft.detokenize(read[inner.n_same or 0 :])) if parts else 0
    assert open_chars <= 256 + max(map(len, parts), default=0) + 5 * len(parts)


def test_special_tokens_are_exchanged_by_their_meaning() -> None:
    target, draft = letters(2), letters(3, adds_space=True, bos=True)
    inner = reader()
    drafter = TranslatedDrafter(inner, target, draft, marks={700: END}, marks_back={END: 700})
    ours = [*target.tokenize("question"), 700, *target.tokenize("answer")]
    inner._tokens = (*draft.continuation(" yes"), END, *draft.tokenize("no"))
    got = proposed(drafter, 0, ours, Fixed(9), 9)
    assert inner.read == [BOS, *draft.tokenize("question"), END, *draft.tokenize("answer")]
    assert list(got.tokens) == [*target.tokenize(" yes"), 700, *target.tokenize("no")]
    assert len(got.probs) == len(got.tokens)
    short = proposed(drafter, 0, ours, Fixed(9), 3)
    assert got.tokens[:3] == short.tokens, "the limit is one of the target's tokens"


def test_the_target_s_first_token_is_the_draft_s_own() -> None:
    target, draft = letters(2, bos=True), letters(3)
    inner = reader()
    proposed(
        TranslatedDrafter(inner, target, draft), 0, [BOS, *target.tokenize("ab c")], Fixed(2), 2
    )
    assert inner.read == draft.tokenize("ab c")


def test_a_pair_without_a_text_of_the_draft_only_removes() -> None:
    target, draft = letters(1), letters(1)
    inner = reader(draft.tokenize("xy"))
    drafter = TranslatedDrafter(inner, target, draft, [("#", "")])
    got = proposed(drafter, 0, target.tokenize("a#b"), Fixed(4), 4)
    assert draft.detokenize(inner.read) == "ab"
    assert target.detokenize(got.tokens) == "xy", "nothing is put between drafted characters"


def test_held_tokens_after_an_edit_are_compared_again() -> None:
    class Model:
        n_ctx, n_vocab, can_rewind, held = 99, 99, True, 0

        def length(self, _: int) -> int:
            return self.held

        def rewind(self, _: int, n: int) -> None:
            self.held = n

    model = Model()
    memory = DraftMemory(model)  # type: ignore[arg-type]
    assert memory.tail(0, [1, 2, 3, 4])[0] == [1, 2, 3, 4]
    memory.fed(0, [1, 2, 3, 4])
    model.held = 4
    memory.mark(0)
    memory.forget(0, 2)
    assert memory.tail(0, [1, 2, 7, 8, 9])[0] == [7, 8, 9]
    assert model.held == 2


def test_an_edit_is_heard_in_a_round_that_drafts_nothing() -> None:
    model = FakeTarget()
    drafter = ModelDrafter(model)
    first = DraftRequest(0, [1, 2, 3, 4, 5], Fixed(2), 2).reading([1, 2, 3, 4, 5], 0)
    drafter.propose([first])
    nothing = DraftRequest(0, [], Fixed(2), 0).reading([1, 2, 7, 8, 9, 1], 2)
    drafter.propose([nothing])
    longer = [1, 2, 7, 8, 9, 1, 2]
    drafter.propose([DraftRequest(0, [], Fixed(2), 2).reading(longer, 6)])
    held = [token for _, token in model._cells[0]]
    assert held[: len(longer)] == longer


def test_what_survives_is_counted_by_tokens() -> None:
    same = survival(letters(3), letters(3), "abcdef abc")
    assert same == (1.0, 1.0, 1.0)
    finer = survival(letters(3), letters(1), "abcdef abc")
    assert finer.kept == 1.0
    assert finer.whole == 0.0
    assert finer.draft_tokens == 3.0

    def small(text: str) -> list[int]:
        return [ord(c) for c in text.lower()]

    lossy = Vocabulary.probed(small, lambda tokens: "".join(map(chr, tokens)))
    assert survival(letters(1), lossy, "Ab cd").kept == 0.5, "a word with a capital is lost"
