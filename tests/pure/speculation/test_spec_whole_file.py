"""Files are written completely or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.whole_file import whole_file


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


def test_a_folder_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), whole_file(tmp_path / "none" / "p.json"):
        pass
