"""A session's start-up lines: what is active, what is not, and why. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StreamedFacts:
    """Streamed weights, and the device memory of their slots."""

    streamed_bytes: int
    slot_bytes: int
    min_batch: str  # batches whose streamed weights the device computes, in words
    reasons: tuple[str, ...]  # the plan's reasons
    reading: str | None  # sentence on reading the weights from disk; None without a report
    split: str = ""  # sizes of batches with split layers


@dataclass(frozen=True)
class DraftFacts:
    """The draft model beside the target."""

    file_name: str
    n_params: int
    size_bytes: int
    target_bytes: int


@dataclass(frozen=True)
class MemoryFacts:
    """The target's ways of rewinding rejected tokens."""

    architecture: str
    can_rewind: bool
    n_rs_seq: int  # tokens that snapshots can rewind
    device_checkpoints: bool
    speculates: bool


@dataclass(frozen=True)
class StartUp:
    """The facts from which the start-up lines are made."""

    device: str
    device_description: str
    device_reason: str
    device_notes: tuple[str, ...]
    wanted_ctx: int  # 0: the model's
    n_ctx: int
    has_experts: bool
    streamed: StreamedFacts | None
    draft: DraftFacts | None
    speculation: tuple[str, ...]
    memory: MemoryFacts
    declined: tuple[str, ...]  # reasons for which the device left products to the CPU
    others: tuple[str, ...]  # lines on MLA, memory nodes, measured choices and the configuration


def startup_lines(start: StartUp) -> tuple[str, ...]:
    """All start-up lines, in the order in which they are shown."""
    return (
        *device_lines(start),
        *weight_lines(start),
        *draft_lines(start.draft),
        *start.speculation,
        *memory_lines(start.memory),
        *(why for why in start.declined),
        *start.others,
    )


def device_lines(start: StartUp) -> Sequence[str]:
    lines = [
        f"device {start.device}: {start.device_description} ({start.device_reason})",
        *start.device_notes,
    ]
    if start.wanted_ctx not in (0, start.n_ctx):
        lines.append(f"--ctx-size {start.wanted_ctx}: llama.cpp rounds it to {start.n_ctx} tokens")
    return lines


def weight_lines(start: StartUp) -> Sequence[str]:
    s = start.streamed
    if s is None:
        where = "experts run on the CPU: --device cpu copies nothing to a GPU"
        return [where] if start.has_experts else []
    lines = [
        f"weights: {s.streamed_bytes / 2**20:.0f} MiB in RAM, cached in "
        f"{s.slot_bytes / 2**20:.0f} MiB of GPU memory. On the GPU: {s.min_batch} (--min-batch)"
        f"{_split(s)}; other batches run on the CPU",
        *s.reasons,
    ]
    return lines if s.reading is None else [*lines, s.reading]


def _split(s: StreamedFacts) -> str:
    return s.split and f". On GPU and CPU at once: batches of {s.split} tokens (--hybrid)"


def draft_lines(draft: DraftFacts | None) -> Sequence[str]:
    if draft is None:
        return ["draft model: none"]
    lines = [f"draft model: {draft.file_name}, {draft.n_params / 1e6:.1f}M parameters"]
    if draft.size_bytes > draft.target_bytes:
        lines.append(
            f"the draft model ({draft.size_bytes} bytes) is larger than the model "
            f"({draft.target_bytes}): are the two files swapped?"
        )
    return lines


def memory_lines(memory: MemoryFacts) -> Sequence[str]:
    if memory.can_rewind or not memory.speculates:
        return []
    where = "in GPU memory" if memory.device_checkpoints else "in RAM"
    if memory.n_rs_seq:
        return [
            f"recurrent model: rejected drafts of up to {memory.n_rs_seq} tokens are undone by "
            f"snapshots, longer ones by checkpoints {where}"
        ]
    return [
        f"recurrent model: rejected drafts are undone by checkpoints {where}; llama.cpp "
        f"has no snapshots for {memory.architecture}"
    ]
