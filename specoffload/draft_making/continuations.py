"""Lets a target continue prompts greedily, and keeps its texts and probabilities in a file.

A file grows by whole records, so that an interrupted run goes on where it ended. What the records
belong to stands in a JSON file beside it.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offload.engine import Engine
from offload.model import ModelFacts
from offload.model_file import behaviour_hash
from specdec.whole_file import write_json
from specoffload.draft_making.corpus import CutPrompts
from specoffload.errors import UsageError

N_PROMPT, N_NEW = 96, 96  # tokens of a record that are a user's, and that the target wrote
LENGTH = N_PROMPT + N_NEW
N_TOP = 8  # likeliest tokens whose probabilities are kept
N_PARALLEL = 16  # prompts that are continued at once
N_CTX = N_PARALLEL * 256  # context for all of them

# `ids` and `probabilities` at i belong to the token after tokens[: i + 1].
RECORD = np.dtype(
    [
        ("tokens", "<u4", (LENGTH,)),
        ("ids", "<u4", (LENGTH - 1, N_TOP)),
        ("probabilities", "<f2", (LENGTH - 1, N_TOP)),
    ]
)
Records = NDArray[np.void]


def about_records(target: ModelFacts, prompts: CutPrompts) -> dict[str, Any]:
    """The origin of records: the target, the prompts, and the lengths in a record."""
    return {
        "target": behaviour_hash(target),
        "prompts": hashlib.sha256(prompts.tokens.tobytes()).hexdigest()[:24],
        "lengths": [N_PROMPT, N_NEW, N_TOP],
    }


class ContinuationFile:
    """A file of records, in the order of the prompts."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        """Open the file of `path`, or begin it.

        `about` says by which target and of which texts the records are. Raises UsageError if those
        in the file are of others.
        """
        self.path, self._state_path = path, path.with_suffix(".json")
        self.about, self.took_s = about, 0.0
        if self._state_path.exists():
            state = json.loads(self._state_path.read_text())
            self.took_s = float(state["took_s"])
            if state["about"] != about:
                raise UsageError(
                    f"{path} was made by another target or of other texts; name another file with "
                    "-o, or delete its folder"
                )
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")
            self._write_state()
        whole_bytes = len(self) * RECORD.itemsize
        if path.stat().st_size > whole_bytes:  # a run ended while it wrote a record
            with path.open("r+b") as f:
                f.truncate(whole_bytes)

    def __len__(self) -> int:
        return self.path.stat().st_size // RECORD.itemsize

    def records(self, first: int, end: int | None = None) -> Records:
        """The records from `first` to before `end`, mapped from the file."""
        end = len(self) if end is None else min(end, len(self))
        if end <= first:
            return np.empty(0, RECORD)
        offset = first * RECORD.itemsize
        return np.memmap(self.path, RECORD, "r", offset, (end - first,))

    def append(self, records: Records, took_s: float) -> None:
        """Add records that took `took_s` seconds."""
        with self.path.open("ab") as f:
            f.write(records.tobytes())
        self.took_s += took_s
        self._write_state()

    def _write_state(self) -> None:
        write_json(self._state_path, {"about": self.about, "took_s": self.took_s})


def continue_prompts(
    engine: Engine,
    prompts: CutPrompts,
    file: ContinuationFile,
    limit_s: float,
    on_progress: Callable[[float], None],
) -> None:
    """Continue the prompts that the file lacks, until `limit_s` seconds have passed in all runs.

    Those that are held out, and a first batch for training, are continued in any case.
    """
    n, least = len(prompts.tokens), prompts.n_held_out + N_PARALLEL
    while (at := len(file)) < n and (at < least or file.took_s < limit_s):
        on_progress(min(1.0, max(at / n, file.took_s / limit_s)))
        began = time.monotonic()
        records = continued(engine, prompts.tokens[at : at + N_PARALLEL])
        file.append(records, time.monotonic() - began)


def continued(engine: Engine, prompts: NDArray[np.uint32]) -> Records:
    """Continue each prompt of [n, N_PROMPT] greedily. `n` is at most the engine's sequences."""
    records = np.zeros(len(prompts), RECORD)
    records["tokens"][:, :N_PROMPT] = prompts
    for i, prompt in enumerate(prompts.tolist()):
        engine.sequences.rewind(i, 0)
        _keep(records[i : i + 1], 0, engine.sequences.extend(i, prompt, N_PROMPT)[None])
    for at in range(N_PROMPT, LENGTH - 1):
        parts = [(i, [int(token)], 1) for i, token in enumerate(records["tokens"][:, at])]
        _keep(records, at, np.stack(engine.sequences.extend_batch(parts)))
    for i in range(len(prompts)):
        engine.sequences.rewind(i, 0)
    return records


def _keep(records: Records, at: int, logits: NDArray[np.float32]) -> None:
    """Keep the likeliest tokens of logits [n records, n tokens, n_vocab], from token `at` on.

    The likeliest of the last row is the next token.
    """
    ids, probabilities = likeliest(logits, N_TOP)
    end = min(at + logits.shape[1], LENGTH - 1)
    records["ids"][:, at:end], records["probabilities"][:, at:end] = ids, probabilities
    records["tokens"][:, end] = ids[:, -1, 0]


def likeliest(
    logits: NDArray[np.float32], n: int
) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    """The ids and probabilities [..., n] of the likeliest tokens of logits [..., n_vocab].

    The first is the token that a greedy text takes. The probabilities are those among all tokens.
    """
    top = np.argpartition(-logits, n - 1, axis=-1)[..., :n]
    values = np.take_along_axis(logits, top, -1)
    order = np.lexsort((top, -values), axis=-1)  # equal ones by id, as argmax chooses
    top, values = np.take_along_axis(top, order, -1), np.take_along_axis(values, order, -1)
    most = logits.max(axis=-1, keepdims=True)
    total = np.exp(logits - most).sum(axis=-1, keepdims=True, dtype=np.float64)
    return top.astype(np.uint32), (np.exp(values - most) / total).astype(np.float32)
