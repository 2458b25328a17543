"""Sentences for the user, with their kinds, and the progress of long steps."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

OnProgress = Callable[[str, float], None]  # gets a step's name and the fraction that is done


class NoteKind(StrEnum):
    """The subject of a note."""

    DEVICE = "device"  # devices, and what lies on them
    CONTEXT = "context"
    WEIGHTS = "weights"
    UNUSED = "unused"  # hardware that the library was not compiled for
    FLAGS = "flags"  # given flags that slow it, spoil its texts, or are not followed as given
    MEMORY = "memory"  # weights that memory cannot hold
    DISK = "disk"
    PROMPTS = "prompts"  # prompts that are kept on the disk
    MIN_BATCH = "min-batch"
    PASSES = "passes"  # batches that use more experts than have slots
    COPIES = "copies"  # how weights are copied
    WARNING = "warning"  # what others could do with this program
    LOST = "lost"  # what the next start has to do again, since it could not be kept
    OTHER = "other"


class Note(str):
    """A sentence for the user. Whoever shows only some chooses by `kind`, never by the words."""

    kind: NoteKind

    def __new__(cls, kind: NoteKind, words: str) -> Note:
        note = super().__new__(cls, words)
        note.kind = kind
        return note

    def __getnewargs__(self) -> tuple[NoteKind, str]:  # type: ignore[override]
        return self.kind, str(self)

    def __repr__(self) -> str:
        return f"Note({self.kind!r}, {str(self)!r})"


def kind_of(words: str) -> NoteKind:
    """Return the kind of a note. Other sentences are of kind OTHER."""
    return words.kind if isinstance(words, Note) else NoteKind.OTHER
