"""Notes are sentences that keep their kinds on the way to whoever shows them."""

from __future__ import annotations

import json
import pickle

from offload.notes import Note, NoteKind, kind_of


def test_a_note_crosses_a_pipe_with_its_kind() -> None:
    note = Note(NoteKind.DISK, "disk sda is remote")
    again = pickle.loads(pickle.dumps(note))
    assert (again, again.kind) == ("disk sda is remote", NoteKind.DISK)
    assert json.dumps([note]) == '["disk sda is remote"]'


def test_other_sentences_are_of_no_special_kind_whatever_they_say() -> None:
    assert kind_of("disk sda is remote") is NoteKind.OTHER
    assert kind_of(Note(NoteKind.LOST, "x")) is NoteKind.LOST
