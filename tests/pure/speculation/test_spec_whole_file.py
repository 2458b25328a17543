"""Files are written completely or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from specdec.whole_file import whole_file, write_json, write_text


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
    tmp_path: Path,
) -> None:
    """As root, replacing /dev/null would break the machine."""
    os.mkfifo(pipe := tmp_path / "pipe")
    with pytest.raises(OSError, match="No such device"):  # nobody reads it
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


def test_a_folder_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), whole_file(tmp_path / "none" / "p.json"):
        pass
