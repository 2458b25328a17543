"""Model files with one changed header field run or are refused: a part of the lab's attack."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random

from gguf import GGUFReader

from lab.attack.headers import fields_of, mutated
from lab.synth import write_preset


def test_a_changed_header_runs_or_is_refused_in_one_sentence() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lab.attack", "--part", "headers", "--only", "0-20"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_key_and_tensor_of_a_header_has_fields(tmp_path: Path) -> None:
    path = write_preset("qwen3-30b-a3b", tmp_path / "tiny.gguf", size="tiny", seed=1)
    data, reader, fields = path.read_bytes(), GGUFReader(str(path)), fields_of(path)
    names = [field.name for field in fields]
    assert all(names.count(key) >= 3 for key in reader.fields if not key.startswith("GGUF."))
    assert all(names.count(tensor.name) >= 5 for tensor in reader.tensors)
    assert sum(field.size for field in fields) < reader.data_offset
    for field in fields:
        changed = mutated(Random(field.at), data, field)
        assert len(changed) in (len(data), *range(field.at, field.at + field.size + 1))
        assert changed[: field.at] == data[: field.at]
