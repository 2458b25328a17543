"""A file that a command would write at its end is refused before a model is opened for it."""

from __future__ import annotations

import errno
import json
import os
from functools import partial
from pathlib import Path

import in_process
import pytest

from specdec.drafters.ngram_cache import LookupCache
from specoffload.draft_making.output import check_draft_output
from specoffload.errors import UsageError
from specoffload.output_file import check_output
from specoffload.slots.slot import Slot

PROMPT = ("run", "-p", "x", "-n", "2")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*PROMPT, "--prompt-cache", "none/x"), "--prompt-cache none/x: there is no folder"),
        ((*PROMPT, "--prompt-cache", "."), "--prompt-cache .: is a folder; name a file"),
        ((*PROMPT, "--prompt-cache", "pipe"), "--prompt-cache pipe: it is not a regular file"),
        (
            (*PROMPT, "--prompt-cache", "pipe", "--prompt-cache-ro"),
            "--prompt-cache pipe: it is not a regular file",
        ),
        ((*PROMPT, "--trace", "none/t.json"), "--trace none/t.json: there is no folder"),
        (
            (*PROMPT, "--spec-type", "ngram-cache", "-lcd", "none/x"),
            "-lcd none/x: there is no folder",
        ),
        (("profile", "--export", "none/c.json"), "--export none/c.json: there is no folder"),
        (("profile", "--plot", "none/c.png"), "--plot none/c.png: there is no folder"),
        (
            ("bench", "--route-cached", "0,1", "--plot", "none/c.png"),
            "--plot none/c.png: there is no folder",
        ),
    ],
)
def test_it_is_one_sentence_before_the_model_is_opened(
    words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*_: object) -> None:
        raise AssertionError("the model was opened")

    monkeypatch.setattr("specoffload.session.session.open_target", opened)
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    done = in_process.command(*words)
    assert done.returncode == 2, done.stderr
    assert message in " ".join(done.stderr.split())
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_files_that_may_be_written_are_left_as_they_are(tmp_path: Path) -> None:
    (old := tmp_path / "old").write_text("kept")
    for output in (old, tmp_path / "new", Path("/dev/stdout"), Path("/dev/full")):
        check_output("-o", output)
    assert old.read_text() == "kept"
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


@pytest.mark.parametrize("output", ["old", "new", "link", "dangling"])
@pytest.mark.parametrize("refused", ["folder", "folder/old"])
def test_a_file_without_permission_is_refused(
    output: str, refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing puts a new file into the folder of the real file, so that may not be read-only."""
    (folder := tmp_path / "folder").mkdir()
    (folder / "old").touch()
    (tmp_path / "link").symlink_to("folder/old")
    (tmp_path / "dangling").symlink_to("folder/new")
    at = (tmp_path if output in ("link", "dangling") else folder) / output
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / refused)
    if refused == "folder" or output in ("old", "link"):
        with pytest.raises(UsageError, match=rf"-o .*{output}: cannot be written"):
            check_output("-o", at)
    else:
        check_output("-o", at)


def test_the_folder_behind_a_link_has_to_be_there(tmp_path: Path) -> None:
    (link := tmp_path / "link").symlink_to("missing/x")
    with pytest.raises(UsageError, match=rf"-o .*link: there is no folder {tmp_path}/missing"):
        check_output("-o", link)


def test_a_descriptor_has_to_be_open_for_writing(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    with (tmp_path / "x").open("rb") as read, (tmp_path / "x").open("ab") as appended:
        check_output("-o", Path(f"/dev/fd/{appended.fileno()}"))
        with pytest.raises(UsageError, match="-o /dev/fd/.*: cannot be written"):
            check_output("-o", Path(f"/dev/fd/{read.fileno()}"))
    with pytest.raises(UsageError, match="-o /dev/fd/9999: Bad file descriptor"):
        check_output("-o", Path("/dev/fd/9999"))


def test_a_path_that_cannot_be_looked_at_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 300)
    for check in (partial(check_output, "-o"), partial(check_draft_output, made_of=[tmp_path])):
        with pytest.raises(UsageError, match="-o .*xxx: File name too long"):
            check(path)
    (old := tmp_path / "old").touch()
    with pytest.raises(UsageError, match="xxx: File name too long"):
        check_draft_output(old, [path])


def test_a_file_that_could_not_be_written_at_the_end_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    replace = os.replace

    def guarded(source: Path, target: Path) -> None:
        assert not os.fspath(target).startswith("/dev/")  # as root, this would break the machine
        replace(source, target)

    monkeypatch.setattr(os, "replace", guarded)
    monkeypatch.setattr(LookupCache, "save", full)
    monkeypatch.setattr(Slot, "write", full)
    cache = str(tmp_path / "cache")
    for words, message in (
        (("--trace", "/dev/full"), "the trace could not be written to /dev/full: No space left"),
        (
            ("--spec-type", "ngram-cache", "-lcd", cache),
            f"the lookup cache {cache} was not written: No space left",
        ),
        (("--prompt-cache", cache), f"--prompt-cache {cache}: cannot be written (No space left"),
    ):
        done = in_process.command(*PROMPT, "-p", "def f(", "-t", "1", *words)
        assert (done.returncode, done.stdout.count("\n")) == (1, 1), done.stderr
        assert message in " ".join(f"{done.stderr} {caplog.text}".split())
        caplog.clear()
    assert in_process.command(*PROMPT, "-t", "1").returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_a_link_to_a_kept_prompt_stays(tmp_path: Path) -> None:
    (link := tmp_path / "link").symlink_to("real")
    words = (*PROMPT, "-p", "def f(a, b):", "-t", "1", "--prompt-cache", link, "--json")
    first, second = (json.loads(in_process.command(*words).stdout) for _ in range(2))
    assert link.readlink() == Path("real")
    assert (tmp_path / "real").is_file()
    assert (first["stats"]["n_cached_tokens"], second["stats"]["n_cached_tokens"] > 0) == (0, True)
