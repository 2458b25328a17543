"""The file that a command makes for drafts: checked before long work, and written at its end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from specoffload import output_file
from specoffload.errors import NotStored, UsageError


def check_output(output: Path, made_of: Iterable[Path]) -> None:
    """Raise UsageError if `output` is one of the files that are read, or cannot be written."""
    if output.exists() and any(path.exists() and output.samefile(path) for path in made_of):
        raise UsageError(f"-o {output}: would overwrite what it is made of; name another file")
    output_file.check_output("-o", output)


@contextmanager
def writing(output: Path) -> Iterator[None]:
    """Raise NotStored for an error of the system while `output` is written in the block."""
    try:
        yield
    except OSError as e:
        raise NotStored(f"{output}: cannot be written ({e.strerror}); name another -o") from e
