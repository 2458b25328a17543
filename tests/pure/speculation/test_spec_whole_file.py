"""Files are written completely or not at all."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.whole_file import named_descriptor, real_path, whole_file, write_json, write_text


def test_writers_at_the_same_time_leave_one_of_their_files(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    with whole_file(path) as f:
        f.write(b"a" * 10)
        with whole_file(path) as g:
            g.write(b"b" * 20)
        assert path.read_bytes() == b"b" * 20
        f.write(b"a" * 10)
    assert path.read_bytes() == b"a" * 20
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, error: type[BaseException]
) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(b"before")

    def write() -> None:
        with whole_file(path) as f:
            f.write(b"half")
            raise error

    with pytest.raises(error):
        write()
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_a_mount_of_its_own_is_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers mount single files, and nothing can take the place of a mount."""
    path = tmp_path / "trace.json"
    path.write_bytes(b"a longer text of an earlier run")
    number = path.stat().st_ino

    def busy(*_: object) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(os, "replace", busy)
    with whole_file(path) as f:
        f.write(b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_ino == number
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_that_the_user_named_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    (real := tmp_path / "real").write_text("before")
    (link := tmp_path / "link").symlink_to("real")
    (dangling := tmp_path / "dangling").symlink_to("new")
    write_text(link, "after")
    write_json(dangling, 7)
    assert link.readlink() == Path("real")
    assert (real.read_text(), (tmp_path / "new").read_text()) == ("after", "7\n")
    assert len(list(tmp_path.iterdir())) == 4


def test_a_device_or_pipe_that_the_user_named_is_written_to_and_never_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root, replacing /dev/null would break the machine."""
    replace = os.replace

    def guarded(source: Path, target: Path) -> None:
        assert not os.fspath(target).startswith("/dev/")
        replace(source, target)

    monkeypatch.setattr(os, "replace", guarded)
    os.mkfifo(pipe := tmp_path / "pipe")
    with pytest.raises(OSError, match="a FIFO that no program reads"):
        write_text(pipe, "lost")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "told")
    assert os.read(reader, 99) == b"told"
    os.close(reader)
    (full := tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write_text(full, "lost")
    modes = [path.stat().st_mode for path in (pipe, full, Path("/dev/full"))]
    assert [stat.S_IFMT(mode) for mode in modes] == [stat.S_IFIFO, stat.S_IFCHR, stat.S_IFCHR]


WRITES = """
import sys
from pathlib import Path
from specdec.whole_file import write_text
print("before", flush=True)
write_text(Path(sys.argv[1]), "content\\n")
print("after")
"""


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "link"])
@pytest.mark.parametrize("mode", ["a", "w"])
def test_what_standard_output_was_directed_to_keeps_its_other_lines(
    name: str, mode: str, tmp_path: Path
) -> None:
    (notes := tmp_path / "notes.txt").write_text("mine\n")
    (tmp_path / "link").symlink_to("/dev/stdout")
    with notes.open(mode) as out:
        command = [sys.executable, "-c", WRITES, str(tmp_path / name)]
        subprocess.run(command, stdout=out, check=True)
    own = "mine\n" if mode == "a" else ""
    assert notes.read_text() == f"{own}before\ncontent\nafter\n"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_name_of_a_descriptor_is_told_from_other_paths(tmp_path: Path) -> None:
    (loop := tmp_path / "loop").symlink_to("loop")
    for path in (loop, tmp_path, tmp_path / "none" / "x", Path("/proc/self/fd"), Path("/dev/null")):
        assert named_descriptor(path) is None
    assert named_descriptor(Path("/dev/fd/99")) == 99


def test_a_link_of_another_user_in_a_shared_folder_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shared := tmp_path / "shared").mkdir()
    (link := shared / "link").symlink_to("real")
    (own := tmp_path / "own").symlink_to(link)
    lstat, another = os.lstat, os.geteuid() + 1

    def owned_by_another(path: Path, **given: int) -> os.stat_result:
        about = [*lstat(path, **given)]
        if Path(path) == link:
            about[stat.ST_UID] = another
        return os.stat_result(about)

    monkeypatch.setattr(os, "lstat", owned_by_another)
    for mode in (0o777, 0o1755):  # not sticky, and not for all to write
        shared.chmod(mode)
        assert real_path(own) == shared / "real"
    shared.chmod(0o1777)
    for path in (link, own):
        with pytest.raises(PermissionError, match="it is a link of another user"):
            write_text(path, "lost")
    assert [*shared.iterdir()] == [link]
    monkeypatch.setattr(os, "geteuid", lambda: another)
    assert real_path(own) == shared / "real"


def test_a_folder_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), whole_file(tmp_path / "none" / "p.json"):
        pass
