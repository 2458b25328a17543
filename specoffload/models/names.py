"""Reads names of models, and chooses the files of a repository or folder that they mean.

All functions are pure, except `model_in`. The rules are llama.cpp's (common/download.cpp). A
quantisation may be anywhere in a file's path, in any case, before a dot or a dash. A name without
one means Q4_K_M, else Q8_0, else the first model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specoffload.errors import UsageError

_WORD = r"[A-Za-z0-9][\w.-]*"
_HUB = re.compile(rf"(?:(?:https://)?(?:hf\.co|huggingface\.co)/)?({_WORD}/{_WORD})(?::({_WORD}))?")
_OLLAMA = re.compile(rf"ollama:((?:{_WORD}/)*{_WORD})(?::({_WORD}))?")
OLLAMA_TAG = "latest"


@dataclass(frozen=True)
class HubName:
    """A repository of the Hugging Face hub, and the quantisation or the file in it."""

    repo: str  # user/name
    quant: str = ""
    file: str = ""

    def __str__(self) -> str:
        return f"{self.repo}:{self.quant}" if self.quant else self.repo


@dataclass(frozen=True)
class OllamaName:
    """A model that ollama has fetched; `name` may have a namespace and a host in front."""

    name: str
    tag: str = OLLAMA_TAG

    def __str__(self) -> str:
        return f"ollama:{self.name}:{self.tag}"


def read_hub_name(text: str, file: str = "") -> HubName | None:
    """Read `user/repo[:quant]`, which may begin with the hub's address. None for other text."""
    found = _HUB.fullmatch(text)
    return HubName(found[1], found[2] or "", file) if found else None


def read_name(text: str) -> HubName | OllamaName | None:
    """The model that `text` names; None if it can only be a path or a prompt."""
    ollama = _OLLAMA.fullmatch(text)
    if ollama:
        return OllamaName(ollama[1], ollama[2] or OLLAMA_TAG)
    return None if text.endswith(".gguf") else read_hub_name(text)


DEFAULT_QUANTS = ("Q4_K_M", "Q8_0")
_NO_MODELS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")
_PART = re.compile(r"(?P<prefix>.*)-\d{5}-of-(?P<count>\d{5})\.gguf")
_QUANT = re.compile(
    r"(?:UD-)?(?:I?Q\d[A-Z0-9_]*|TQ\d_\d|BF16|F16|F32|MXFP4[A-Z0-9_]*|NVFP4)$", re.I
)


def choose(files: Sequence[str], quant: str, whose: str) -> tuple[str, ...]:
    """The model's file, or all of its parts in order.

    `quant` may be "". Messages name the place of the files with `whose`. Raises UsageError
    if there is no such model.
    """
    models = [file for file in files if is_model(file)]
    if not models:
        raise UsageError(f"{whose} has no GGUF model{_others(files)}")
    firsts = [file for file in models if is_first_part(file)]
    for wanted in (quant,) if quant else DEFAULT_QUANTS:
        pattern = re.compile(re.escape(wanted) + "[.-]", re.IGNORECASE)
        if found := [file for file in firsts if pattern.search(file)]:
            return parts_of(found[0], models, whose)
    if quant:
        raise UsageError(f"{whose} has no {quant}; it has {', '.join(quants(models))}")
    if not firsts:
        raise UsageError(f"{whose} lacks the first part of every model")
    return parts_of(firsts[0], models, whose)


def choose_file(files: Sequence[str], name: str, whose: str) -> tuple[str, ...]:
    """The file `name`, or all parts of the split model that it belongs to. Raises UsageError."""
    if name not in files:
        listed = ", ".join(sorted(file for file in files if file.endswith(".gguf"))) or "no .gguf"
        raise UsageError(f"{whose} has no file {name}; it has {listed}")
    return parts_of(name, files, whose)


def is_model(file: str) -> bool:
    """False for projectors, importance matrices and models that can only draft for another."""
    name = file.rpartition("/")[2]
    return name.endswith(".gguf") and not any(word in name for word in _NO_MODELS)


def parts_of(file: str, files: Sequence[str], whose: str) -> tuple[str, ...]:
    """All parts of the split model that `file` belongs to, or `file` itself if it is not split.

    Raises UsageError, which names the first missing part.
    """
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
    """The names of the files' quantisations. A file that names none is listed by its own name."""
    found = []
    for file in models:
        split = _PART.fullmatch(file)
        stem = split["prefix"] if split else file.removesuffix(".gguf")
        named = re.search(r"[-.]((?:UD-)?[A-Za-z0-9_]+)$", stem)
        found.append(named[1] if named and _QUANT.search(named[1]) else stem)
    return sorted(dict.fromkeys(found))


def _others(files: Sequence[str]) -> str:
    kinds = sorted({file.rpartition(".")[2] for file in files if "." in file})
    return (
        f", only {', '.join(kinds)} files; look for its name with -GGUF behind it" if kinds else ""
    )


_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")


def is_first_part(name: str) -> bool:
    """True for the first part of a split model, and for a model in one file."""
    return not _LATER_PART.search(name)


def model_in(folder: Path) -> Path:
    """The file, or first part, of the only model in `folder`. Raises UsageError otherwise."""
    files = sorted(path for path in folder.glob("*.gguf") if is_model(path.name))
    firsts = [path for path in files if is_first_part(path.name)] or files[:1]
    if not firsts:
        raise UsageError(f"{folder}: no .gguf model lies in this folder")
    if len(firsts) > 1:
        names = ", ".join(path.name for path in firsts)
        raise UsageError(f"{folder}: several models lie in this folder, name one: {names}")
    return firsts[0]
