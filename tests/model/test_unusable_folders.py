"""A cache folder that cannot be written is one sentence, and an exit code that systemd heeds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from offload.errors import LibraryMismatch, UnusableFolder
from offload.images.building import image_library
from specoffload.errors import meaning_of

REFUSED = 2  # specoffload.service has RestartPreventExitStatus=2 203 216


@pytest.fixture
def caches(tmp_path: Path) -> Path:
    """A file in the place of a folder, which root cannot write to either."""
    file = tmp_path / "caches"
    file.touch()
    return file


def test_prompts_without_a_folder_are_refused_once(tiny_dense: Path, caches: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "specoffload", "serve", "-m", tiny_dense, "--cache-disk", "1GiB",
         "--device", "cpu", "--port", "0"],
        env={**os.environ, "XDG_CACHE_HOME": str(caches)}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == REFUSED, done.stderr
    last = done.stderr.splitlines()[-1]
    assert "--cache-disk: no prompts can be kept in" in last
    assert "Traceback" not in done.stderr


def test_slots_without_a_folder_are_refused_at_the_start(tiny_dense: Path, caches: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "specoffload", "serve", "-m", tiny_dense, "--slot-save-path",
         str(caches / "slots"), "--device", "cpu", "--port", "0"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == REFUSED, done.stderr
    last = done.stderr.splitlines()[-1]
    assert f"--slot-save-path: no slots can be saved in {caches / 'slots'}: Not a directory" in last
    assert "Traceback" not in done.stderr


def test_libmtmd_without_a_folder_is_refused_once(
    caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(caches))
    with pytest.raises(LibraryMismatch, match=r"libmtmd cannot be compiled into .*XDG_CACHE_HOME"):
        image_library()
    assert meaning_of(LibraryMismatch()).exit_code == REFUSED
    assert meaning_of(UnusableFolder()).exit_code == REFUSED
