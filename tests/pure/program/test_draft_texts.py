"""What a draft model holds is saved beside a slot, and never stands in the way of the slot."""

from __future__ import annotations

from typing import Any, cast

import pytest

from offload.errors import DeviceFailed, DoesNotFit
from specdec.drafters.memory import DraftMemory
from specoffload.slots.choosing import SavedDraft
from specoffload.slots.draft_texts import DraftTexts


class Model:
    """Holds [1, 2] in each sequence. Saving and loading raise `error`, if there is one."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def length(self, sequence: int) -> int:
        return 2

    def rewind(self, sequence: int, length: int) -> None:
        pass

    def save(self, sequence: int) -> bytes:
        if self.error is not None:
            raise self.error
        return b"state"

    def load(self, sequence: int, state: bytes, tokens: Any) -> None:
        if self.error is not None:
            raise self.error

    def saved_bytes(self, sequence: int) -> int:
        return 5


class Memory:
    """Knows the tokens of all sequences."""

    def __init__(self) -> None:
        self.known: list[tuple[int, ...]] = []  # what was told, in order

    def settled(self, sequence: int) -> tuple[int, ...]:
        return (1, 2)

    def loaded(self, sequence: int, tokens: Any) -> None:
        self.known.append(tuple(tokens))


def test_a_draft_model_that_is_known_is_saved_and_loaded() -> None:
    memory = Memory()
    texts = DraftTexts(Model(), cast(DraftMemory, memory))
    saved = texts.saved(0)
    assert saved == SavedDraft((1, 2), b"state")
    assert texts.saved_bytes(0) == 5
    texts.load(0, saved)
    assert memory.known == [(), (1, 2)]
    assert DraftTexts(Model(), None).saved(0) is None


def test_nothing_is_known_of_a_text_whose_client_left_while_its_parts_were_loaded() -> None:
    class InParts(Model):
        def saving(self, sequence: int) -> Any:
            yield

        def loading(self, sequence: int, state: bytes, tokens: Any, parts: Any = ()) -> Any:
            yield
            yield

    memory = Memory()
    loading = DraftTexts(InParts(), cast(DraftMemory, memory)).loading(0, SavedDraft((1, 2), b""))
    next(loading)
    assert memory.known == [()]


@pytest.mark.parametrize("error", [DeviceFailed("the card is gone"), DoesNotFit("no memory")])
def test_a_failure_of_the_draft_alone_keeps_the_targets_prompt(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    memory = Memory()
    texts = DraftTexts(Model(error), cast(DraftMemory, memory))
    assert texts.saved(0) is None
    texts.load(0, SavedDraft((1, 2), b"state"))
    assert memory.known == [()]
    assert [str(error) in record.message for record in caplog.records] == [True, True]
