"""Files that are there whole or not at all, whoever else writes them at the same time."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file that becomes `path` when the block ends well, and is gone when it does not.

    Raises OSError. The name beside it is nobody else's: servers share profiles.
    """
    beside = path.with_name(f"{path.name}.{secrets.token_hex(6)}.new")
    try:
        with beside.open("wb") as f:
            yield f
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def write_json(path: Path, data: object) -> None:
    """JSON for people to look into, whole or not at all. Raises OSError."""
    with whole_file(path) as f:
        f.write((json.dumps(data, indent=1) + "\n").encode())
