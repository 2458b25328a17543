"""doctor ends with one line: ready, or the first thing to do."""

from __future__ import annotations

import os
from datetime import date
from pathlib import Path

import pytest

from numa.doctor import Finding
from specoffload.commands.doctor import KeptModel, last_line, not_kept_reason

BAD = Finding("memlock", "bad", "64 KiB may be locked", "set LimitMEMLOCK=infinity")
WARN = Finding("smt", "warn", "threads share a core", "use --threads 8")


def test_nothing_in_the_way_is_ready() -> None:
    assert last_line((), (), "", is_tuned=True).startswith("ready: ")
    assert last_line((), [WARN], "", is_tuned=True).startswith("ready: ")


def test_the_first_step_is_the_one_that_matters_most() -> None:
    build, kept = "an NVIDIA driver is here", "measurements cannot be stored"
    assert last_line([build], [BAD], kept, is_tuned=False) == f"next: {build}"
    assert last_line((), [WARN, BAD], kept, is_tuned=False) == (
        "next: 64 KiB may be locked: set LimitMEMLOCK=infinity"
    )
    assert last_line((), [WARN], kept, is_tuned=False) == f"next: {kept}"
    assert last_line((), (), "", is_tuned=False).startswith("next: specoffload tune numa")


def test_a_folder_that_can_be_made_is_writable(tmp_path: Path) -> None:
    assert not_kept_reason(tmp_path / "not" / "yet") == ""


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_rights_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "SPECOFFLOAD_PROFILE_DIR" in not_kept_reason(tmp_path / "profiles")


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="ascii")
    assert "SPECOFFLOAD_PROFILE_DIR" in not_kept_reason(tmp_path / "file" / "profiles")


@pytest.mark.parametrize("measured_on", ["", "2026-03-01"])
def test_a_model_without_times_has_a_sentence(measured_on: str) -> None:
    words = KeptModel("tiny-oss", measured_on).words(date(2026, 3, 2))
    assert words == "speeds of tiny-oss: none measured yet"
