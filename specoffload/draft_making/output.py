"""The file that a command makes for drafts: checked before long work, and written at its end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from specoffload.errors import NotStored, UsageError
from specoffload.output_file import check_output


def check_draft_output(output: Path, made_of: Iterable[Path]) -> None:
    """Raise UsageError if `output` is one of the files that are read, or cannot be written."""
    check_output("-o", output)
    try:
        is_read = output.exists() and any(p.exists() and output.samefile(p) for p in made_of)
    except OSError as e:
        raise UsageError(f"{e.filename or output}: {e.strerror or e}") from e
    if is_read:
        raise UsageError(f"-o {output}: would overwrite what it is made of; name another file")


@contextmanager
def writing(output: Path) -> Iterator[None]:
    """Raise NotStored for an error of the system while `output` is written in the block."""
    try:
        yield
    except OSError as e:
        raise NotStored(f"{output}: cannot be written ({e.strerror}); name another -o") from e
