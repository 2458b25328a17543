"""Whether a torch draft on the device is what it is on the CPU, captured or not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from offload.synth import write_preset
from offload.torch_draft.draft import Drafted, TorchDraft
from offload.torch_draft.options import TorchDraftOptions

PRESETS = {"llama": "llama-3.3-70b", "qwen2": "qwen2.5-0.5b", "qwen3": "qwen3-0.6b"}
N_PROMPTS, N_STEPS, N_CTX = 40, 8, 512
# Difference of probabilities: of exact arithmetic, of bf16, and of the same kernels in a graph.
ALLOWED = {"f32": 1e-3, "bf16": 2e-2, "int8": 2e-2, "graphs": 1e-5}


@dataclass(frozen=True)
class DraftEquality:
    """One comparison over all prompts. `n_other` tokens differ, `near_ties` of them within what
    rounding may turn."""

    what: str
    model: str
    worst: float
    allowed: float
    n_tokens: int
    n_other: int
    near_ties: int
    passed: bool


def equality_of(device: str, folder: Path) -> Iterator[DraftEquality]:
    """f32 and bf16 on the device against f32 on the CPU; int8 against its unpacked twin; graphs
    against the same kernels, where there are graphs."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 512, n).tolist() for n in rng.integers(1, 60, N_PROMPTS)]
    for name, preset in PRESETS.items():
        path = write_preset(preset, folder / f"{name}.gguf", quant="bf16", seed=4)
        exact = drafts(path, TorchDraftOptions("cpu", N_CTX, dtype="f32"), prompts)
        for dtype in ("f32", "bf16", "int8"):
            eager = TorchDraftOptions(device, N_CTX, dtype=dtype, graphs=False)  # type: ignore[arg-type]
            captured = TorchDraftOptions(device, N_CTX, dtype=dtype)  # type: ignore[arg-type]
            fast = drafts(path, captured, prompts)
            if dtype == "int8":
                unpacked = TorchDraftOptions(device, N_CTX, dtype="int8", packed=False)
                twin = drafts(path, unpacked, prompts)
                yield compare("int8 packed = unpacked", name, fast, twin, ALLOWED[dtype])
            elif (dtype, device) != ("f32", "cpu"):
                yield compare(f"{dtype} = CPU in f32", name, fast, exact, ALLOWED[dtype])
            if device != "cpu":
                slow = drafts(path, eager, prompts)
                yield compare(f"{dtype} graphs = eager", name, fast, slow, ALLOWED["graphs"])


def drafts(
    path: Path, options: TorchDraftOptions, prompts: Sequence[Sequence[int]]
) -> list[Drafted]:
    found = []
    with TorchDraft(path, options) as draft:
        for prompt in prompts:
            draft.rewind(0, 0)
            found.append(draft.draft([(0, prompt)], N_STEPS))
    return found


def compare(
    what: str, model: str, got: Sequence[Drafted], expected: Sequence[Drafted], allowed: float
) -> DraftEquality:
    """Each draft up to the first token that differs, which must have been a near tie."""
    worst, n_tokens, n_other, near_ties = 0.0, 0, 0, 0
    for a, b in zip(got, expected, strict=True):
        for step in range(len(b.tokens)):
            n_tokens += 1
            if a.tokens[step, 0] != b.tokens[step, 0]:
                n_other += 1
                near_ties += bool(b.gap[step, 0] <= 2 * allowed)
                break
            worst = max(worst, abs(float(a.p[step, 0] - b.p[step, 0])))
    finite = all(np.isfinite(a.p).all() for a in got)
    passed = finite and worst <= allowed and n_other == near_ties
    return DraftEquality(what, model, worst, allowed, n_tokens, n_other, near_ties, passed)
