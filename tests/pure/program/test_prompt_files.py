"""Prompts in files: whole or not there, within limits, found again, and never a wrong one."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import stat
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.errors import NotWritten
from offload.notes import NoteKind, kind_of
from offload.sequences.sequences import Checkpoint
from specoffload.slots import prompt_files
from specoffload.slots.choosing import StoredPrompt
from specoffload.slots.own_folder import foreign_writers, secret_of
from specoffload.slots.prompt_files import LEAST_TOKENS, PromptFolder
from specoffload.slots.prompt_format import key_of, unsealed_key_of, write_prompt

MADE_BY = {"model (hash)": "abc", "library": "1"}


def prompt(seed: int, n_tokens: int = 600, n_bytes: int = 5000, marks: tuple[int, ...] = ()) -> Any:
    drawn = Random(seed)
    row = np.arange(4, dtype=np.float32).reshape(1, 4)
    return StoredPrompt(
        tuple(drawn.randrange(1000) for _ in range(n_tokens)),
        drawn.randbytes(n_bytes),
        tuple(Checkpoint(m, drawn.randbytes(100), row=row if m % 2 else None) for m in marks),
    )


def folder(path: Path, limit: int = 1 << 30, *, can_cut: bool = True, **by: str) -> PromptFolder:
    return PromptFolder(path, limit, {**MADE_BY, **by}, can_cut=can_cut)


def kept(path: Path, *prompts: StoredPrompt, limit: int = 1 << 30, can_cut: bool = True) -> None:
    opened = folder(path, limit, can_cut=can_cut)
    for one in prompts:
        opened.keep(one)
        opened.settle()
    opened.close()


def same(a: StoredPrompt | None, b: StoredPrompt) -> bool:
    if a is None or (a.tokens, a.state) != (b.tokens, b.state):
        return False
    pairs = zip(a.checkpoints, b.checkpoints, strict=True)
    return all(
        (x.length, x.state, x.serial) == (y.length, y.state, 0)
        and np.array_equal(x.row if x.row is not None else (), y.row if y.row is not None else ())
        for x, y in pairs
    )


@pytest.mark.parametrize("can_cut", [True, False])
def test_the_next_start_finds_what_was_kept(tmp_path: Path, can_cut: bool) -> None:
    one, two = prompt(1, marks=(300, 401)), prompt(2)
    kept(tmp_path, one, two, can_cut=can_cut)
    again = folder(tmp_path, can_cut=can_cut)
    assert len(again) == 2
    assert any("2 prompts" in note for note in again.notes)
    found = again.find([*one.tokens, 5, 6])
    assert found is not None
    assert found.n_tokens == 600
    assert same(again.read(found.name), one)
    part = again.find([*one.tokens[:450], 1001, 1002])
    assert part is not None
    assert part.n_tokens == (450 if can_cut else 401)
    assert again.find(prompt(3).tokens) is None


def test_only_the_owner_can_read_the_files(tmp_path: Path) -> None:
    kept(tmp_path / "new", prompt(1))
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    files = list((tmp_path / "new").iterdir())
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [
        0o600,
        0o600,
    ]  # with its secret


def test_a_prompt_that_somebody_else_wrote_is_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A checksum would not reveal it: the file is whole, and of this model."""
    one, other = prompt(1), prompt(2)
    kept(tmp_path, one)
    (path,) = tmp_path.glob("*.prompt")
    for secret in (b"", b"a guess"):
        with path.open("wb") as file:
            write_prompt(file, key_of(MADE_BY), other, lambda _: None, secret)
        assert len(folder(tmp_path)) == 0
        assert "sealed by somebody else" in caplog.messages[-1]
    kept(tmp_path, one, other)
    paths = sorted(tmp_path.glob("*.prompt"))
    whole = [path.read_bytes() for path in paths]
    begin_bytes = len(whole[0]) - 5000 - 32  # all but the state and the last seal
    paths[0].write_bytes(whole[0][:begin_bytes] + whole[1][begin_bytes:])
    again = folder(tmp_path)
    found = {again.find([*p.tokens, 5]).name: p for p in (one, other)}  # type: ignore[union-attr]
    assert again.read(paths[0].name) is None, "a payload belongs to its own head"
    assert same(again.read(paths[1].name), found[paths[1].name])


def test_the_secret_of_a_folder_is_its_users_own(tmp_path: Path) -> None:
    secret = secret_of(tmp_path)
    assert len(secret) == 32
    assert secret_of(tmp_path) == secret
    (path,) = tmp_path.glob(".seal-*")
    path.chmod(0o640)
    with pytest.raises(NotWritten, match=r"--cache-disk: .*other users may read or change \.seal-"):
        secret_of(tmp_path)
    path.chmod(0o600)
    os.link(path, tmp_path / "second")
    with pytest.raises(NotWritten, match="is not this user's own file"):
        secret_of(tmp_path)
    path.unlink()
    path.symlink_to(tmp_path / "second")
    with pytest.raises(NotWritten, match="Too many levels|symbolic"):
        secret_of(tmp_path)
    path.unlink()
    path.write_bytes(b"short")
    path.chmod(0o600)
    with pytest.raises(NotWritten, match=r"\.seal-[0-9]+ has no 32 bytes: delete it"):
        secret_of(tmp_path)


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o707, 0o777, 0o1777])
def test_a_folder_that_others_may_write_to_is_told_of(tmp_path: Path, mode: int) -> None:
    place = tmp_path / "prompts"
    place.mkdir()
    place.chmod(mode)
    warnings = [n for n in folder(place).notes if kind_of(n) is NoteKind.WARNING]
    assert len(warnings) == bool(mode & 0o002)
    for words in warnings:
        assert words == (
            f"warning: other users may write to {place} and delete the prompts in it: chmod 700 "
            f"{place}"
        )
    assert foreign_writers("--slot-save-path", tmp_path / "missing", "x") is None


def test_prompts_without_seals_are_deleted_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for n in range(3):
        (tmp_path / f"{unsealed_key_of(MADE_BY)}-{n:016x}.prompt").write_bytes(b"sopromp1")
    (tmp_path / f"{'0' * 16}-{'1' * 16}.prompt").write_bytes(b"of another model")
    assert len(folder(tmp_path)) == 0
    (line,) = caplog.messages
    assert "without seals are deleted, and evaluated again: 3" in line
    assert len(list(tmp_path.glob("*.prompt"))) == 1


def test_prompts_with_different_salts_do_not_know_of_each_other(tmp_path: Path) -> None:
    plain, mine = prompt(1), replace(prompt(1), salt="mine", state=b"another")
    kept(tmp_path, plain, mine, replace(plain, tokens=(*plain.tokens, 7), salt="yours"))
    again = folder(tmp_path)
    assert len(again) == 3, "a longer text with another salt replaces none"
    for salt, wanted in (("", plain), ("mine", mine)):
        found = again.find([*plain.tokens, 5], salt)
        assert found is not None
        read = again.read(found.name)
        assert read is not None
        assert (read.salt, read.state) == (salt, wanted.state)
    assert again.find([*plain.tokens, 5], "no one's") is None


def test_short_prompts_are_not_kept(tmp_path: Path) -> None:
    kept(tmp_path, prompt(1, LEAST_TOKENS - 1), prompt(2, LEAST_TOKENS))
    assert len(folder(tmp_path)) == 1


def test_a_longer_prompt_replaces_its_beginning_and_a_beginning_is_not_kept_again(
    tmp_path: Path,
) -> None:
    long = prompt(1)
    short = StoredPrompt(long.tokens[:400], b"short")
    kept(tmp_path, short, long, short, prompt(2))
    again = folder(tmp_path)
    assert len(again) == 2
    found = again.find([*short.tokens, 5])
    assert found is not None
    assert same(again.read(found.name), long)


def test_a_memory_that_cannot_be_cut_keeps_both(tmp_path: Path) -> None:
    long = prompt(1)
    kept(tmp_path, StoredPrompt(long.tokens[:400], b"short"), long, can_cut=False)
    assert len(folder(tmp_path, can_cut=False)) == 2


@pytest.mark.parametrize("by", [{"library": "2"}, {"type of cached keys": "q8_0"}])
def test_prompts_of_other_settings_are_not_seen(tmp_path: Path, by: dict[str, str]) -> None:
    kept(tmp_path, prompt(1))
    other = folder(tmp_path, **by)
    assert (len(other), other.find(prompt(1).tokens)) == (0, None)


@settings(max_examples=60, deadline=None)
@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), cut=st.booleans())
def test_a_damaged_file_is_never_a_wrong_prompt(
    tmp_path_factory: pytest.TempPathFactory, at: float, bit: int, cut: bool
) -> None:
    path, one = tmp_path_factory.mktemp("damaged"), prompt(1, marks=(301,))
    kept(path, one)
    (file,) = path.glob("*.prompt")
    raw = bytearray(file.read_bytes())
    where = int(at * len(raw))
    if cut:
        del raw[where:]
    else:
        raw[where] ^= 1 << bit
    file.write_bytes(raw)
    again = folder(path)
    found = again.find([*one.tokens, 5])
    assert found is None or again.read(found.name) is None
    assert not list(path.glob("*.prompt")), "it is deleted, so it is told of once"
    assert again.find([*one.tokens, 5]) is None


def test_a_damaged_file_is_one_line_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept(tmp_path, prompt(1))
    (file,) = tmp_path.glob("*.prompt*")
    file.write_bytes(file.read_bytes()[:-1])
    for _ in range(2):
        folder(tmp_path)
    (line,) = [r.getMessage() for r in caplog.records]
    assert file.name in line
    assert "its size differs" in line


def test_links_pipes_and_folders_are_not_followed(tmp_path: Path) -> None:
    kept(tmp_path, prompt(1))
    (file,) = tmp_path.glob("*.prompt*")
    names = [file.name.replace("-", f"-{i}") for i in range(3)]
    (tmp_path / names[0]).symlink_to("/dev/zero")
    os.mkfifo(tmp_path / names[1])
    (tmp_path / names[2]).mkdir()
    assert len(folder(tmp_path)) == 1


def test_the_limit_holds_and_the_oldest_prompts_go(tmp_path: Path) -> None:
    opened = folder(tmp_path, 3 << 20)
    many = [prompt(i, n_bytes=500_000) for i in range(8)]
    for i, one in enumerate(many):
        opened.keep(one)
        opened.settle()
        for file in tmp_path.glob(
            "*.prompt*"
        ):  # times of files differ by as much as a clock's tick
            if file.stat().st_mtime > 1000:
                os.utime(file, (i, i))
        first = opened.find([*many[0].tokens, 5])
        assert first is not None
        assert opened.read(first.name) is not None, "it was used, so it stays"
        assert sum(file.stat().st_size for file in tmp_path.glob("*.prompt*")) <= 3 << 20
    left = {i for i, one in enumerate(many) if opened.find([*one.tokens, 5]) is not None}
    assert 0 in left
    assert 7 in left
    assert 1 not in left


def test_a_full_disk_is_told_of_once_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened = folder(tmp_path)
    with monkeypatch.context() as full:
        full.setattr(prompt_files, "_SPARE_BYTES", 1 << 60)
        for i in range(3):
            opened.keep(prompt(i))
            opened.settle()
    (line,) = [r.getMessage() for r in caplog.records]
    assert "--cache-disk" in line
    opened.keep(prompt(9))
    opened.close()
    assert len(folder(tmp_path)) == 1


def test_a_disk_that_takes_no_byte_more_loses_only_the_new_prompt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import resource

    kept(tmp_path, prompt(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
        kept(tmp_path, prompt(2, n_bytes=100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert any("is not kept on the disk" in r.getMessage() for r in caplog.records)
    assert len(list(tmp_path.glob("*.prompt*"))) == len(folder(tmp_path)) == 1


def test_two_servers_share_a_folder(tmp_path: Path) -> None:
    a, b = folder(tmp_path), folder(tmp_path)
    one = prompt(1)
    a.keep(one)
    a.settle()
    found = b.find([*one.tokens, 5])
    assert found is not None
    assert same(b.read(found.name), one)
    for file in tmp_path.glob("*.prompt*"):
        file.unlink()
    assert b.read(found.name) is None
    assert a.find([*one.tokens, 5]) is None


def _write_for_ever(path: Path, limit: int) -> None:
    opened, seed = folder(path, limit), os.getpid()
    while True:
        seed += 1
        opened.keep_now(prompt(seed % 50, n_bytes=300_000, marks=(301,)), lambda share: None)


@pytest.mark.parametrize("n", [30])
def test_a_server_killed_at_any_moment_loses_only_what_it_was_writing(
    tmp_path: Path, n: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Two servers write to one folder. One of them is killed 30 times at random moments."""
    context, drawn = multiprocessing.get_context("fork"), Random(4)
    beside = context.Process(target=_write_for_ever, args=(tmp_path, 5 << 20), daemon=True)
    beside.start()
    try:
        for _ in range(n):
            process = context.Process(target=_write_for_ever, args=(tmp_path, 5 << 20))
            process.start()
            time.sleep(drawn.uniform(0.0, 0.08))
            process.kill()
            process.join()
            with caplog.at_level(logging.WARNING):
                opened = folder(tmp_path)
            for seed in range(50):
                one = prompt(seed, n_bytes=300_000, marks=(301,))
                found = opened.find([*one.tokens, 5])
                if found is not None:
                    read = opened.read(found.name)  # None: the other server has evicted it
                    assert read is None or same(read, one)
    finally:
        beside.kill()
        beside.join()
    assert not caplog.records, "no file was half written under its name"
    old = time.time() - 2 * 3600
    for rest in tmp_path.glob("*.new"):
        os.utime(rest, (old, old))
    folder(tmp_path)
    assert not list(tmp_path.glob("*.new")), "unfinished files go when they are old"
