"""The player is compiled once per source, and an error says what to do if that fails."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from offload.decode import SMALL_BATCH
from offload.errors import LibraryMismatch
from offload.ggml import player_building as building
from offload.ggml.player import PlayerFunctions
from offload.ggml.player_building import compile_player
from specdec.options import MOST_DRAFTED


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the player's source, which is the one that is compiled."""
    monkeypatch.delenv("PLAYER_SANITIZERS", raising=False)
    copy = tmp_path / "player.c"
    copy.write_bytes(building.SOURCE.read_bytes())
    monkeypatch.setattr(building, "SOURCE", copy)
    return copy


def test_it_is_compiled_once_and_again_when_its_source_changes(
    source: Path, tmp_path: Path
) -> None:
    first = compile_player(tmp_path)
    made_at = first.stat().st_mtime_ns
    assert compile_player(tmp_path) == first
    assert first.stat().st_mtime_ns == made_at
    source.write_text(source.read_text("utf-8") + "int player_is_newer(void) { return 1; }\n")
    second = compile_player(tmp_path)
    assert second != first
    assert ctypes.CDLL(str(second)).player_is_newer() == 1


def test_a_library_whose_structs_differ_from_pythons_is_refused(
    source: Path, tmp_path: Path
) -> None:
    text = source.read_text("utf-8")
    source.write_text(text.replace("struct event { number", "struct event { number new,"))
    with pytest.raises(LibraryMismatch, match="other sources"):
        PlayerFunctions(compile_player(tmp_path))


@pytest.mark.usefixtures("source")
def test_without_a_compiler_the_error_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LibraryMismatch, match=r"no compiler; install a C compiler .*wheel"):
        compile_player(tmp_path)


def test_the_limit_of_a_small_batch_is_one_number(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The player takes the number from the compiler, and a longest draft is verified in one."""
    assert MOST_DRAFTED + 1 == SMALL_BATCH
    assert "SMALL_BATCH" in source.read_text("utf-8")
    flags = tuple(f.replace(f"={SMALL_BATCH}", "=65") for f in building._FLAGS)
    monkeypatch.setattr(building, "_FLAGS", flags)
    with pytest.raises(LibraryMismatch, match="static assertion failed"):
        compile_player(tmp_path)


def test_a_failing_compiler_is_quoted(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.write_text("this is no C\n", "utf-8")
    with pytest.raises(LibraryMismatch, match=r"could not be compiled \(.*player\.c.*\); install"):
        compile_player(tmp_path)
    monkeypatch.setenv("CC", "false")
    with pytest.raises(LibraryMismatch, match=r"\(false ended with status 1\)"):
        compile_player(tmp_path)
    monkeypatch.setenv("CC", str(tmp_path / "none"))
    with pytest.raises(LibraryMismatch, match="No such file"):
        compile_player(tmp_path)
    assert [*tmp_path.iterdir()] == [source]


def test_the_source_compiles_without_warnings(source: Path, tmp_path: Path) -> None:
    command = ["cc", *building._FLAGS, "-Wall", "-Wextra", "-Werror", "-o"]
    sources = str(source), str(building.GRAPHS)
    subprocess.run([*command, str(tmp_path / "out"), *sources], check=True)
