"""Shapes of architectures without a preset, described in a JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lab.synth.parts import Value
from lab.synth.shape import TINY_VOCAB, Shape, check
from offload.errors import BadRequest

_KEYS = {"architecture", "metadata", "n_vocab", "without", "quant"}


def read_description(path: Path) -> Shape:
    """Read {"architecture", "metadata", "n_vocab", "without", "quant"}; only the first two needed.

    `metadata` has GGUF's keys, with or without the architecture before them. Raises BadRequest for
    anything else than that, ImpossibleShape for sizes that cannot be.
    """
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise BadRequest(f"{path}: is no JSON description ({e})") from e
    if not isinstance(described, dict) or not isinstance(described.get("metadata"), dict):
        raise BadRequest(f'{path}: needs an object with "architecture" and "metadata"')
    if unknown := sorted(described.keys() - _KEYS):
        known = ", ".join(sorted(_KEYS))
        raise BadRequest(f"{path}: unknown key {unknown[0]!r}; known are {known}")
    architecture, n_vocab = described.get("architecture"), described.get("n_vocab", TINY_VOCAB)
    without = described.get("without", [])
    if not isinstance(architecture, str) or not isinstance(n_vocab, int):
        raise BadRequest(f'{path}: "architecture" must be a string and "n_vocab" a number')
    if not isinstance(without, list) or not all(isinstance(w, str) for w in without):
        raise BadRequest(f'{path}: "without" must be a list of patterns')
    prefix = f"{architecture}."
    metadata = {
        key.removeprefix(prefix): _value(f"{path}: {key}", value)
        for key, value in described["metadata"].items()
    }
    quant = str(described.get("quant", "q8_0"))
    shape = Shape(path.stem, architecture, metadata, n_vocab, tuple(without), quant, unchecked=True)
    check(shape)
    return shape


def _value(where: str, value: Any) -> Value:
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list) and value and all(type(v) is int for v in value):
        return tuple(value)
    raise BadRequest(f"{where} must be a number, a string, true, false or a list of whole numbers")


def parse_setting(text: str) -> tuple[str, Value]:
    """Reads KEY=VALUE, the value as JSON if it is JSON, else as a string. Raises BadRequest."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise BadRequest(f"--set {text}: must be KEY=VALUE")
    try:
        parsed = json.loads(value)
    except ValueError:
        parsed = value
    return key, _value(f"--set {key}", parsed)
