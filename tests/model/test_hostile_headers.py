"""A small part of the lab's attack by model files: one field of the header of each is changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random

from gguf import GGUFReader

from lab.attack.header_fields import fields_of, mutated
from lab.synth import write_preset


def test_a_changed_header_runs_or_is_refused_in_one_sentence() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lab.attack", "--part", "headers", "--only", "0-60"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_key_and_tensor_of_a_header_is_a_field(tmp_path: Path) -> None:
    path = write_preset("qwen3-30b-a3b", tmp_path / "tiny.gguf", size="tiny", seed=1)
    data = path.read_bytes()
    fields = fields_of(data)
    reader = GGUFReader(str(path))
    names = {field.name for field in fields}
    keys = [key for key in reader.fields if not key.startswith("GGUF.")]
    assert {f"{key}, its type" for key in keys} <= names
    assert {f"{tensor.name}, its offset" for tensor in reader.tensors} <= names
    for field in fields:
        changed = mutated(Random(field.at), data, field)
        assert len(changed) in (len(data), *range(field.at, field.at + field.size + 1))
