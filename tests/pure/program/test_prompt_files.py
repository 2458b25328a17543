"""Prompts in files: whole or not there, within limits, found again, and never a wrong one."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import stat
import time
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.sequences.sequences import Checkpoint
from specoffload.slots import prompt_files
from specoffload.slots.choosing import StoredPrompt
from specoffload.slots.prompt_files import LEAST_TOKENS, PromptFolder

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
    assert "2 prompts" in again.words
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
    (file,) = (tmp_path / "new").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


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
    (file,) = path.iterdir()
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
    assert not list(path.iterdir()), "it is deleted, so it is told of once"
    assert again.find([*one.tokens, 5]) is None


def test_a_damaged_file_is_one_line_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept(tmp_path, prompt(1))
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    for _ in range(2):
        folder(tmp_path)
    (line,) = [r.getMessage() for r in caplog.records]
    assert file.name in line
    assert "its size differs" in line


def test_links_pipes_and_folders_are_not_followed(tmp_path: Path) -> None:
    kept(tmp_path, prompt(1))
    (file,) = tmp_path.iterdir()
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
        for file in tmp_path.iterdir():  # times of files differ by as much as a clock's tick
            if file.stat().st_mtime > 1000:
                os.utime(file, (i, i))
        first = opened.find([*many[0].tokens, 5])
        assert first is not None
        assert opened.read(first.name) is not None, "it was used, so it stays"
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 3 << 20
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
    assert len(list(tmp_path.iterdir())) == len(folder(tmp_path)) == 1


def test_two_servers_share_a_folder(tmp_path: Path) -> None:
    a, b = folder(tmp_path), folder(tmp_path)
    one = prompt(1)
    a.keep(one)
    a.settle()
    found = b.find([*one.tokens, 5])
    assert found is not None
    assert same(b.read(found.name), one)
    for file in tmp_path.iterdir():
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
