"""A folder as a model: the one that lies in it."""

from __future__ import annotations

import re
from pathlib import Path

from specoffload.errors import UsageError
from specoffload.models.choice import is_model

_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")


def is_first_part(name: str) -> bool:
    """True for a whole model too."""
    return not _LATER_PART.search(name)


def model_in(folder: Path) -> Path:
    """Its model's file, or first part. Raises UsageError where there is none, or several."""
    files = sorted(path for path in folder.glob("*.gguf") if is_model(path.name))
    firsts = [path for path in files if is_first_part(path.name)] or files[:1]
    if not firsts:
        raise UsageError(f"{folder}: no .gguf model lies in this folder")
    if len(firsts) > 1:
        names = ", ".join(path.name for path in firsts)
        raise UsageError(f"{folder}: several models lie in this folder, name one: {names}")
    return firsts[0]
