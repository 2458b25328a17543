"""The speed of the disk, measured with a real file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from offload.errors import BadModel
from offload.store.disk_speed import READ_BYTES, disk_speed


def test_bytes_that_were_read_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(2 * READ_BYTES + 100))
    real, counted = os.preadv, [0]

    def preadv(descriptor: int, buffers: list[object], offset: int) -> int:
        n = real(descriptor, buffers, offset)  # type: ignore[arg-type]
        assert offset % 4096 == 0
        assert n == READ_BYTES, "no read is cut short by the file's end"
        counted[0] += n
        return n

    monkeypatch.setattr(os, "preadv", preadv)
    speed = disk_speed(path, 3, least_s=0.05)
    assert 0 < speed < counted[0] / 0.05
    assert counted[0] >= 3 * READ_BYTES


def test_a_file_that_is_too_short_or_missing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(b"GGUF")
    with pytest.raises(BadModel, match=r"short: is too short"):
        disk_speed(path, 1)
    with pytest.raises(BadModel, match=r"none: cannot be read"):
        disk_speed(tmp_path / "none", 1)
