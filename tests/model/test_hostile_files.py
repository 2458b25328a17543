"""Hostile files are refused in one sentence within seconds, and nothing is lost."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from gguf.constants import GGUFValueType

from offload.errors import BadModel, OffloadError
from offload.model_file import read_facts
from offload.trace.report import read_report
from specdec.costs.profile_io import MOST_PROFILE_BYTES, load
from specdec.drafters.ngram_cache import LookupCache
from specdec.errors import BadOption, BadProfile
from specdec.whole_file import read_text, write_text
from specoffload.config.environment import read_environment
from specoffload.config.values import contents
from specoffload.errors import UsageError


def header_with(path: Path, **changed: object) -> Path:
    """A header of a few keys, some changed, and one weight."""
    writer = GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in changed.items():
        writer.add_key_value(key.replace("__", "."), value, _kind(value))
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _kind(value: object) -> GGUFValueType:
    kinds = {float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING, list: GGUFValueType.ARRAY}
    return kinds[type(value)]


def with_eps(path: Path, eps: float) -> Path:
    raw = bytearray(header_with(path).read_bytes())
    key = b"llama.attention.layer_norm_rms_epsilon"
    at = raw.find(key) + len(key) + 4
    raw[at : at + 4] = struct.pack("<f", eps)
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize("eps", [float("nan"), float("inf"), -1e-5])
def test_an_epsilon_that_the_library_asserts_on(tmp_path: Path, eps: float) -> None:
    with pytest.raises(BadModel, match="layer_norm_rms_epsilon"):
        read_facts(with_eps(tmp_path / "eps.gguf", eps))


def test_more_layers_than_weights(tmp_path: Path) -> None:
    path = header_with(tmp_path / "layers.gguf")
    raw = bytearray(path.read_bytes())
    key = b"llama.block_count"
    at = raw.find(key) + len(key) + 4
    for n_layers in (2, 2**32 - 1):  # one number per layer would fill the memory
        raw[at : at + 4] = struct.pack("<I", n_layers)
        path.write_bytes(raw)
        with pytest.raises(BadModel, match=rf"block_count is {n_layers} for 1 weights; the file"):
            read_facts(path)


def empty_array(path: Path, element: int) -> Path:
    """The same header with one empty numeric array, which gguf's writer refuses to write."""
    whole = header_with(path)
    raw = bytearray(whole.read_bytes())
    (n_kv,) = struct.unpack_from("<Q", raw, 16)
    struct.pack_into("<Q", raw, 16, n_kv + 1)
    key = b"llama.rope.dimension_sections"
    entry = struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", 9, element, 0)
    first = GGUFReader(str(whole)).tensors[0].name.encode()
    at = bytes(raw).find(struct.pack("<Q", len(first)) + first)
    # The added bytes at the end pad the data, which begins at a multiple of 32 bytes. The old file
    # is unlinked instead of overwritten, because the reader still maps it.
    path.unlink()
    path.write_bytes(bytes(raw[:at]) + entry + bytes(raw[at:]) + bytes(64))
    return path


@pytest.mark.parametrize("element", [0, 4, 5, 6, 7, 10, 12])
def test_an_empty_array_of_numbers_is_read_as_empty(tmp_path: Path, element: int) -> None:
    facts = read_facts(empty_array(tmp_path / "empty.gguf", element))
    assert facts.header.metadata["llama.rope.dimension_sections"] == ()


def test_a_sentencepiece_vocabulary_without_bytes(tmp_path: Path) -> None:
    path = header_with(
        tmp_path / "mute.gguf", tokenizer__ggml__model="llama", tokenizer__ggml__tokens=["a", "b"]
    )
    with pytest.raises(BadModel, match="single bytes"):
        read_facts(path)


def test_arrays_of_a_vocabulary_that_do_not_belong_together(tmp_path: Path) -> None:
    path = header_with(
        tmp_path / "short.gguf",
        tokenizer__ggml__model="gpt2",
        tokenizer__ggml__tokens=["a", "b", "c"],
        tokenizer__ggml__token_type=[1, 1],
    )
    with pytest.raises(BadModel, match=r"token_type has 2 entries for 3 tokens"):
        read_facts(path)


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """A FIFO without a writer. An ordinary open of it would wait for ever."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


@pytest.mark.timeout(20)
def test_pipes_and_devices_are_no_files(pipe: Path) -> None:
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(BadModel, match="not a regular file"):
            read_facts(path)
        with pytest.raises(ValueError, match="not a regular file"):
            contents(str(path))
        with pytest.raises(BadProfile, match="not a regular file"):
            load(path)
        with pytest.raises(BadOption, match="not a regular file"):
            LookupCache.load(path)
        with pytest.raises(OffloadError, match="not a regular file"):
            read_report(path)


def test_a_profile_that_is_far_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    path.write_bytes(b"[" * (MOST_PROFILE_BYTES + 1))
    with pytest.raises(BadProfile, match=str(MOST_PROFILE_BYTES)):
        load(path)


def test_json_nested_without_end_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "nested.json"
    path.write_bytes(b"[" * 200_000)
    with pytest.raises(OffloadError, match="not a trace"):
        read_report(path)
    with pytest.raises(BadProfile, match="damaged"):
        load(path)


@pytest.mark.parametrize("number", ["Infinity", "1e400", "NaN", "1" + "0" * 400])
def test_a_trace_of_numbers_that_are_none_is_damage(tmp_path: Path, number: str) -> None:
    path = tmp_path / "trace.json"
    other = f'{{"producer": "specoffload", "dropped_events": {number}}}'
    path.write_text(f'{{"otherData": {other}, "traceEvents": []}}')
    if number.startswith("1" + "0"):
        assert read_report(path).n_dropped == int(number)
        return
    with pytest.raises(OffloadError, match="damaged trace"):
        read_report(path)


def test_a_user_without_a_home_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", none)
    with pytest.raises(UsageError, match="set HOME"):
        read_environment({})


def test_a_folder_whose_name_is_too_long() -> None:
    with pytest.raises(UsageError, match="SPECOFFLOAD_PROFILE_DIR"):
        read_environment({"SPECOFFLOAD_PROFILE_DIR": "/" + "x" * 5000})


TOO_LARGE = """
import resource, signal, sys
from pathlib import Path
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
path = Path(sys.argv[1])
"""
TEXT = "from specdec.whole_file import write_text; write_text(path, 'x' * 1000)"
SLOT = """
from specoffload.slots.slot_files import StoredPrompt, write_sequence
write_sequence(path, StoredPrompt((1, 2, 3), bytes(1000)), {})
"""
TRACE = """
from offload.trace.trace import Trace, LANES
from specdec.whole_file import named_file
trace = Trace(1000)
for i in range(500):
    trace.add(LANES[0], "x", i, i + 1)
trace.write(path, named_file)
"""


@pytest.mark.parametrize(
    ("write", "before", "said"),
    [
        (TEXT, "old", "File too large"),
        (SLOT, "the one before", "File too large"),
        (TRACE, "the trace before", "could not be written"),
    ],
    ids=["text", "slot", "trace"],
)
def test_a_write_that_fails_leaves_what_was_there(
    write: str, before: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "kept"
    write_text(path, before)
    command = [sys.executable, "-c", TOO_LARGE + write, str(path)]
    assert said in subprocess.run(command, capture_output=True, text=True).stderr
    assert [read_text(p) for p in tmp_path.iterdir()] == [before]


@pytest.mark.slow
def test_measurements_that_cannot_be_kept_are_shown_with_the_reason(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("", encoding="ascii")
    done = subprocess.run(
        [sys.executable, "-m", "specoffload", "profile"],
        capture_output=True,
        text=True,
        env={**os.environ, "SPECOFFLOAD_PROFILE_DIR": str(blocked / "profiles")},
    )
    assert done.returncode == 0, done.stderr
    assert "milliseconds of a decode" in done.stdout
    assert "measurements are not kept" in done.stderr
    assert "SPECOFFLOAD_PROFILE_DIR" in done.stderr
    assert "Traceback" not in done.stderr
