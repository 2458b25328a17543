"""Says what a GGUF file is, from the first entries of its header. Needs no native library.

The server's API process lists the models of a folder, and must never load the library. What the
header does not say here is found when the file is opened (`offload/header_check.py`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from offload.regular_file import open_regular

_READ_BYTES = 64 << 10  # general.* come first, before the vocabulary
_STRING, _ARRAY = 8, 9
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
# By general.type, or by general.architecture.
_NO_MODELS = {
    "adapter": "an adapter (LoRA)",
    "clip": "a projector",
    "controlvector": "a control vector",
    "dflash": "a draft model",
    "dspark": "a draft model",
    "eagle3": "a draft model",
    "imatrix": "an importance matrix",
    "medusa": "a draft model",
    "mmproj": "a projector",
}


def no_model_reason(path: Path) -> str:
    """Return what a file is if it is no model of its own, or "". Files are not waited for."""
    try:
        with open_regular(path) as file:
            head = file.read(_READ_BYTES)
    except FileNotFoundError:
        return "a link to no file"
    except OSError as e:
        return e.strerror or str(e)
    if head[:4] != b"GGUF" or len(head) < 24:
        return ""  # it is refused when it is opened, with the reason
    version, n_tensors, n_entries = struct.unpack_from("<IQQ", head, 4)
    for key, text in _texts(head, min(n_entries, 64)):
        if key in ("general.type", "general.architecture") and text in _NO_MODELS:
            return _NO_MODELS[text]
    return "a vocabulary without weights" if version >= 2 and n_tensors == 0 else ""


def _texts(head: bytes, n_entries: int) -> Iterator[tuple[str, str]]:
    """Yield the texts of a header by their keys, up to the first array or the end of `head`."""
    at = 24
    try:
        for _ in range(n_entries):
            key, at = _text(head, at)
            (kind,) = struct.unpack_from("<I", head, at)
            at += 4
            if kind == _STRING:
                text, at = _text(head, at)
                yield key, text
            elif kind == _ARRAY:
                at = _after_array(head, at)
            else:
                at += _SCALAR_BYTES[kind]
    except (struct.error, KeyError):
        return  # the header goes on after `head`, or is damaged


def _text(head: bytes, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", head, at)
    end = at + 8 + length
    if end > len(head):
        raise struct.error
    return head[at + 8 : end].decode("utf-8", "replace"), end


def _after_array(head: bytes, at: int) -> int:
    """Return the place after an array. general.tags and the like are arrays of texts."""
    kind, length = struct.unpack_from("<IQ", head, at)
    at += 12
    if kind != _STRING:
        return at + int(_SCALAR_BYTES[kind] * length)
    for _ in range(min(length, len(head))):
        _, at = _text(head, at)
    return at
