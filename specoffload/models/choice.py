"""Which files of a repository are the model that is meant: llama.cpp's rules. Pure.

llama.cpp's common/download.cpp: a quantisation is found anywhere in a file's path, in any case, in
front of a dot or a dash; without one it is Q4_K_M, then Q8_0, then the first model that is listed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from specoffload.errors import UsageError

DEFAULT_QUANTS = ("Q4_K_M", "Q8_0")
_NO_MODELS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")
_PART = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_QUANT = re.compile(
    r"(?:UD-)?(?:I?Q\d[A-Z0-9_]*|TQ\d_\d|BF16|F16|F32|MXFP4[A-Z0-9_]*|NVFP4)$", re.I
)


def choose(files: Sequence[str], quant: str, whose: str) -> tuple[str, ...]:
    """The model's file, or all of its parts in order; `whose` is for messages.

    Raises UsageError naming what there is.
    """
    models = [file for file in files if is_model(file)]
    if not models:
        raise UsageError(f"{whose} has no GGUF model{_others(files)}")
    for wanted in (quant,) if quant else DEFAULT_QUANTS:
        pattern = re.compile(re.escape(wanted) + "[.-]", re.IGNORECASE)
        if found := _first(file for file in models if pattern.search(file)):
            return parts_of(found, models, whose)
    if quant:
        raise UsageError(f"{whose} has no {quant}; it has {', '.join(quants(models))}")
    first = _first(models)
    if first is None:
        raise UsageError(f"{whose} lacks the first part of every model")
    return parts_of(first, models, whose)


def choose_file(files: Sequence[str], name: str, whose: str) -> tuple[str, ...]:
    """The file of that name, with its other parts where it is one of several."""
    if name not in files:
        listed = ", ".join(sorted(file for file in files if file.endswith(".gguf"))) or "no .gguf"
        raise UsageError(f"{whose} has no file {name}; it has {listed}")
    return parts_of(name, files, whose)


def is_model(file: str) -> bool:
    """False for projectors, importance matrices and what only drafts for another model."""
    name = file.rpartition("/")[2]
    return name.endswith(".gguf") and not any(word in name for word in _NO_MODELS)


def parts_of(file: str, files: Sequence[str], whose: str) -> tuple[str, ...]:
    """All parts of a split model from any of them. Raises UsageError naming a missing one."""
    split = _PART.fullmatch(file)
    if split is None:
        return (file,)
    count = int(split["count"])
    parts = tuple(f"{split['prefix']}-{n:05d}-of-{count:05d}.gguf" for n in range(1, count + 1))
    missing = [part for part in parts if part not in files]
    if missing:
        raise UsageError(f"{whose} lacks {len(missing)} of {count} parts, the first {missing[0]}")
    return parts


def quants(models: Sequence[str]) -> list[str]:
    """The quantisations by their names, or the files' where these name none."""
    found = []
    for file in models:
        split = _PART.fullmatch(file)
        stem = split["prefix"] if split else file.removesuffix(".gguf")
        named = re.search(r"[-.]((?:UD-)?[A-Za-z0-9_]+)$", stem)
        found.append(named[1] if named and _QUANT.search(named[1]) else stem)
    return sorted(dict.fromkeys(found))


def _first(models: Iterable[str]) -> str | None:
    for file in models:
        split = _PART.fullmatch(file)
        if split is None or int(split["number"]) == 1:
            return file
    return None


def _others(files: Sequence[str]) -> str:
    kinds = sorted({file.rpartition(".")[2] for file in files if "." in file})
    return (
        f", only {', '.join(kinds)} files; look for its name with -GGUF behind it" if kinds else ""
    )
