"""Tokens per second of drafts by libllama and in torch, on one file in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offload.engine import Engine, EngineOptions
from offload.model_file import read_facts
from offload.torch_draft.draft import TorchDraft
from offload.torch_draft.options import TorchDraftOptions
from specdec.drafters.block import BlockDrafter
from specdec.drafters.model import ModelDrafter
from specdec.policies.fixed import Fixed
from specdec.types import Drafter

_BANDWIDTH_BYTES = 512 << 20
_NOT_READ = ("turns", "inputs", "out", "rows", "draws", "kept")


@dataclass(frozen=True)
class Job:
    """What is drafted: `depth` tokens are held before each draft of k."""

    path: Path
    ggml_device: str
    torch_device: str
    k: tuple[int, ...]
    depth: int
    repetitions: int
    n_threads: int

    @property
    def n_ctx(self) -> int:
        needed = self.depth + (self.repetitions + 3) * (max(self.k) + 4)
        return -(-needed // 256) * 256


@dataclass
class Speed:
    """One engine with one setting: tokens per second by k."""

    name: str
    tokens_per_s: dict[int, float] = field(default_factory=dict)
    step_bytes: int = 0  # read for one token, KV of `depth` included
    planned_bytes: int = 0
    taken_bytes: int = 0  # reserved by torch at most
    left_bytes: int = 0  # still reserved after closing
    counters: dict[str, int] = field(default_factory=dict)


def bandwidth(device: str) -> float:
    """Bytes per second of the device's own memory: best of a few copies, read and written."""
    source = torch.zeros(_BANDWIDTH_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(9):
        wait(device)
        began = time.perf_counter()
        target.copy_(source)
        wait(device)
        times.append(time.perf_counter() - began)
    return 2 * _BANDWIDTH_BYTES / min(times)


def wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def by_llama(job: Job) -> Speed:
    speed = Speed("libllama")
    options = EngineOptions(
        device=job.ggml_device, wrapped=False, stream_experts=False, n_ctx=job.n_ctx,
        n_threads=job.n_threads, n_threads_batch=job.n_threads,
    )  # fmt: skip
    speed.step_bytes = read_facts(job.path).size_bytes
    with Engine(job.path, options) as engine:
        for k in job.k:
            drafter = ModelDrafter(engine.sequences)
            speed.tokens_per_s[k] = timed(drafter, engine.n_vocab, k, job)
            engine.sequences.rewind(0, 0)
    return speed


def by_torch(job: Job, name: str, options: TorchDraftOptions) -> Speed:
    speed = Speed(name)
    on_gpu = job.torch_device != "cpu"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(job.torch_device)
    with TorchDraft(job.path, options) as draft:
        layout = draft.layout
        speed.planned_bytes = layout.total_bytes
        speed.step_bytes = read_per_step(draft, job.depth)
        for k in job.k:
            drafter = BlockDrafter(draft, block=k)
            speed.tokens_per_s[k] = timed(drafter, draft.n_vocab, k, job)
            draft.rewind(0, 0)
        speed.counters = dict(vars(draft.counters))
    if on_gpu:
        speed.taken_bytes = torch.cuda.max_memory_reserved(job.torch_device)
        speed.left_bytes = torch.cuda.memory_reserved(job.torch_device)
    return speed


def read_per_step(draft: TorchDraft, depth: int) -> int:
    """Bytes that a step of one sequence cannot but read: matrices, and KV of what is held."""
    layout = draft.layout
    apart = () if draft.shape.tied and "output" not in layout.pieces else ("token_embd",)
    weights = sum(
        piece.size_bytes
        for name, piece in layout.pieces.items()
        if name not in (*_NOT_READ, *apart, "kv")
    )
    return weights + layout.kv_bytes * depth // (draft.n_ctx + 1)


def timed(drafter: Drafter, n_vocab: int, k: int, job: Job) -> float:
    """Tokens per second of drafts of k, each behind one or two tokens that are new."""
    rng = np.random.default_rng(k)
    history = rng.integers(0, n_vocab, job.depth).tolist()
    policy, times = Fixed(k), []
    for repetition in range(job.repetitions + 2):
        began = time.perf_counter()
        draft = drafter.propose(0, history, policy, k)
        took = time.perf_counter() - began
        if repetition > 1:  # before, prompts are read and steps captured
            times.append(took)
        history += [*draft.tokens[: (k - 1) * (repetition % 2)], int(rng.integers(n_vocab))]
    return k / statistics.median(times)


def rows_of(
    llama: Speed, speeds: Sequence[Speed], k: Sequence[int], bytes_per_s: float
) -> list[dict[str, Any]]:
    """Ceiling first, then the measurement, then the distance."""
    rows = []
    for n in k:
        for speed in speeds:
            ceiling = bytes_per_s / speed.step_bytes
            tps = speed.tokens_per_s[n]
            rows.append({
                "k": n, "engine": speed.name, "tokens_per_s": tps, "ceiling_tokens_per_s": ceiling,
                "share_of_ceiling": tps / ceiling, "vs_llama": tps / llama.tokens_per_s[n],
            })  # fmt: skip
    return rows


def variants(plain: TorchDraftOptions, n_kept: int) -> dict[str, TorchDraftOptions]:
    """The draft as it is by default first, then with one thing changed each."""
    found = {"torch": plain}
    if plain.device != "cpu":
        found["torch, no graphs"] = replace(plain, graphs=False)
    found["torch, int8"] = replace(plain, dtype="int8")
    found[f"torch, {n_kept} kept"] = replace(plain, kept=tuple(range(n_kept)))
    return found
