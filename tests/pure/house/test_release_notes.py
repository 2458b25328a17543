"""The notes of a release say what is in it, what was checked, and what has changed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "release_notes.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release_notes", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules["release_notes"] = made
    spec.loader.exec_module(made)
    return made


def test_notes_of_a_later_release_have_what_is_new_since_the_last(script: ModuleType) -> None:
    made = script.Made(
        "0.2.0", "abc1234", "2026-11-28", [("a.whl", 30_400_000)], ["haswell"], ["alderlake"]
    )
    text = script.notes(made, "v0.1.0", ["Keep the cache", "Fix a word"], ["A try (2026-11-27)"])
    for words in (
        "# specoffload 0.2.0", "Commit abc1234, 2026-11-28.", "| a.whl | 30.4 |",
        "These CPU backends decoded: haswell.", "Nobody has run these for this release: alderlake.",
        "## Changes since v0.1.0", "- Keep the cache\n- Fix a word", "- A try (2026-11-27)",
    ):  # fmt: skip
        assert words in text


def test_wheels_for_gpus_say_what_they_hold_and_that_no_gpu_ran_them(script: ModuleType) -> None:
    line = "a.whl: CUDA 13, code for compute capability 8.9; was run on no device"
    made = script.Made("0.2.0", "abc1234", "2026-11-28", [], [], [], [line])
    text = script.notes(made, "v0.1.0", [], [])
    assert f"No GPU has run them for this release:\n\n- {line}\n" in text


def test_a_first_release_shows_few_changes(script: ModuleType) -> None:
    made = script.Made("0.1.0", "abc1234", "2026-11-28", [], [], [])
    text = script.notes(made, "", [f"Change {i}" for i in range(500)], [])
    assert text.count("\n- ") == 30
    assert "CPU backends" not in text
    assert "for GPUs" not in text


def test_new_entries_of_the_log_are_those_that_a_diff_adds(script: ModuleType) -> None:
    diff = """ - **Old** (2026-11-01). Stays.
-- **Gone** (2026-11-02). Left.
+- **Passes** (2026-11-27, *went*). Text with **bold** (2026-11-20).
+  **not an entry** (2026-11-03)
"""
    assert script.new_entries(diff) == ["Passes (2026-11-27)"]


def test_a_source_archive_has_to_have_all_files_of_the_program(script: ModuleType) -> None:
    wheel = ["offload/engine.py", "llama_cpp/lib/libllama.so", "offload/ggml/libplayer-1.so.1"]
    assert script.lacking(["offload/engine.py"], wheel) == []
    assert script.lacking([], wheel) == ["offload/engine.py"]


def test_a_wheel_from_another_machine_has_the_same_program(script: ModuleType) -> None:
    ours = {"offload/engine.py": 1, "offload/": 0, "specoffload/ui/page.js": 2}
    its_own = {"llama_cpp/lib/libggml-cuda.so": 3, "specoffload-0.1.0.dist-info/METADATA": 4}
    assert script.differing(ours, ours | its_own) == []
    assert script.differing(ours, ours | {"offload/engine.py": 5}) == ["offload/engine.py"]
    assert script.differing(ours | {"offload/new.py": 6}, ours) == ["offload/new.py"]
