"""The options of a torch draft, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from offload.torch_draft.layout import DType


@dataclass(frozen=True)
class TorchDraftOptions:
    """The options of opening a draft. `device` is torch's name of one."""

    device: str = "cpu"
    n_ctx: int = 4096
    n_sequences: int = 1
    n_vocab: int = 0  # tokens that may be drafted, 0: all of the file
    dtype: DType = "bf16"
    kept: tuple[int, ...] = ()  # a pruned vocabulary: ids that may be drafted, rising
    samples: bool = False  # drafts may be drawn, with their distributions
    graphs: bool = True  # off: steps on CUDA run uncaptured, the slow twin
    packed: bool = True  # off: int8 matrices are unpacked for each product, the slow twin
    n_threads: int = 1  # on the CPU
