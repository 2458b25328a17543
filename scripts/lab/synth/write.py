"""Writes the files, tensor by tensor: what is in memory is one pool of blocks, not the model."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lab.synth.discover import Plan, plan
from lab.synth.header import ALIGNMENT, write_header
from lab.synth.pool import Source
from lab.synth.shape import Shape, resolve
from lab.synth.vocabulary import byte_level, copied, no_tokenizer, size_of
from offload.errors import BadRequest

OnProgress = Callable[[str, int], None]  # (tensor, bytes just written)


def plan_preset(
    preset: str, *, size: str = "tiny", vocab: str | Path = "bytes", **overrides: Any
) -> Plan:
    """The file that write_preset would write."""
    return plan_shape(resolve(preset, size, **overrides), vocab, overrides.get("n_vocab"))


def plan_shape(shape: Shape, vocab: str | Path = "bytes", n_vocab: int | None = None) -> Plan:
    """The plan of `shape` with the tokenizer `vocab` ("bytes", "none" or a GGUF file).

    A copied tokenizer decides the number of tokens. Raises BadRequest when `n_vocab` differs.
    """
    if vocab == "none":
        tokenizer = no_tokenizer()
    elif vocab == "bytes":
        tokenizer = byte_level(shape.n_vocab)
    else:
        tokenizer = copied(Path(vocab))
        n_listed = size_of(tokenizer) or 0
        if n_vocab not in (None, n_listed):
            raise BadRequest(f"--vocab {vocab} has {n_listed} tokens, not {n_vocab} (--n-vocab)")
        shape = dataclasses.replace(shape, n_vocab=n_listed)
    return plan(shape, tuple(tokenizer), isolated=shape.unchecked)


def write_preset(
    preset: str,
    path: Path | str,
    *,
    size: str = "tiny",
    seed: int = 0,
    vocab: str | Path = "bytes",
    on_progress: OnProgress | None = None,
    **overrides: Any,
) -> Path:
    """Write a random-weight GGUF of a named shape and return its path.

    `size` is "tiny", "tiny-vulkan" or "full"; overrides are those of shape.resolve. Equal arguments
    give equal bytes. Raises UnknownPreset, ImpossibleShape, BadRequest, or BadModel when the
    library refuses the shape.
    """
    planned = plan_preset(preset, size=size, vocab=vocab, **overrides)
    return write(planned, Path(path), seed, on_progress)


def write_header_only(planned: Plan, path: Path) -> Path:
    """Write the header of a planned file; its data is a hole, which takes no room on the disk.

    For whatever reads headers: plans, listings. The weights read as zeros, so a model of them
    computes nothing. Raises BadRequest when the folder does not exist or holds no sparse files of
    that size.
    """
    _check_place(path)
    with _begun(planned, path) as partial:
        try:
            os.truncate(partial, planned.size_bytes)
        except OSError as e:
            size = f"{planned.size_bytes / 1e9:.0f} GB"
            raise BadRequest(f"{path}: no sparse file of {size} can be made there ({e})") from e
    return path


@contextlib.contextmanager
def _begun(planned: Plan, path: Path) -> Iterator[Path]:
    """A file with the header, which becomes `path` when the block ends well, else is gone."""
    partial = path.with_name(path.name + ".partial")
    try:
        write_header(partial, planned.shape, planned.tokenizer, planned.tensors)
        yield partial
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()
        raise


def _check_place(path: Path) -> None:
    if not path.resolve().parent.is_dir() or path.is_dir():
        raise BadRequest(f"{path}: not a file in an existing folder")


def write(planned: Plan, path: Path, seed: int = 0, on_progress: OnProgress | None = None) -> Path:
    """Write a planned file. It appears under its name only when it is whole.

    Raises BadRequest when the folder does not exist or its disk has too little room.
    """
    _check_place(path)
    free = shutil.disk_usage(path.resolve().parent).free
    if planned.size_bytes > free:
        raise BadRequest(
            f"{path}: needs {planned.size_bytes / 1e9:.2f} GB but its disk has {free / 1e9:.2f} GB "
            "free; lower --layers, --experts or --scale"
        )
    with _begun(planned, path) as partial:
        _append_tensors(partial, planned, Source(seed), on_progress)
    return path


def _append_tensors(
    path: Path, planned: Plan, source: Source, on_progress: OnProgress | None
) -> None:
    with path.open("ab") as file:
        for tensor in planned.tensors:
            for piece in source.pieces(tensor):
                file.write(piece.data)
                if on_progress is not None:
                    on_progress(tensor.name, len(piece))
            file.write(bytes(-tensor.n_bytes % ALIGNMENT))
