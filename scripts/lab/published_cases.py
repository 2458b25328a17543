"""The published runs of other programs with which the machine model is compared."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from lab import ROOT
from offload.routing.routing import HitCurve

CASES = ROOT / "scripts" / "lab" / "published.jsonl"
NO_GPU = "none"  # the card of a case that was run on the CPU alone
ALL_LAYERS = 1000  # `n_resident_layers` of a case whose experts are all on the card
# What happens to an expert without a slot: the device reads it over the link without a wait of the
# host, the CPU computes it while the device waits, or both sides share the misses of a layer.
READ_BY_DEVICE, ON_CPU, SPLIT = "read by the card", "on the CPU", "split"
MISSES = ("", READ_BY_DEVICE, ON_CPU, SPLIT)
AHEAD = "copied ahead"  # prompts: a layer's experts are copied while the one before is computed
# Cards on which llama.cpp and its forks compute with CUDA.
_CUDA = ("RTX", "Tesla", "H100")
# Forks that keep experts in pinned memory by default.
PINNING = ("thecodacus/llama.cpp", "GenerelSchwerz/llama.cpp", "Project Maya")

# Measured hits of a cache as (share of all experts that have a slot, share of uses that hit). The
# page docs/hybrid-model.md names the sources.
DEEPSEEK_V4 = ((0.045, 0.13), (0.094, 0.588), (0.125, 0.64), (0.156, 0.68), (0.25, 0.774))
FLASH_NEXT = (
    (0.061, 0.435), (0.121, 0.62), (0.125, 0.67), (0.182, 0.72), (0.242, 0.789), (0.25, 0.81),
    (0.334, 0.85), (0.366, 0.937),
)  # fmt: skip
GPT_OSS = ((0.03, 0.085),)
QWEN3_30B = ((0.0625, 0.366), (0.19, 0.741), (0.38, 0.894), (0.635, 0.962))
QWEN36_35B = ((0.066, 0.41), (0.33, 0.81), (0.375, 0.865))
_HITS = {
    "DeepSeek-V4-Flash": DEEPSEEK_V4, "Qwen3-30B-A3B": QWEN3_30B,
    "Qwen3.6-35B-A3B": QWEN36_35B, "Qwen3.8-Flash-Next": FLASH_NEXT,
}  # fmt: skip
_NO_DAY = date(1, 1, 1)  # date of a hit curve that was not counted here


def measured_hits(model: str) -> HitCurve | None:
    """Return the hits that others measured for a model's cache of experts."""
    return HitCurve(_HITS[model], 0, _NO_DAY) if model in _HITS else None


@dataclass(frozen=True)
class Case:
    """One published run. Speeds are in tokens/s."""

    id: str
    model: str
    quant: str
    file_gib: float
    gpu: str
    n_gpus: int
    pcie_gbs: float
    cpu: str
    n_cores: int
    ram_gbs: float
    n_channels: int
    n_sockets: int
    engine: str
    source: str
    tg_tps: float
    context: int
    ubatch: int
    n_prompt: int
    flags: str = ""
    pp_tps: float | None = None
    prompt: str = ""  # how the engine computed prompts: "streams" or "on the CPU"
    n_resident_layers: float = 0  # layers whose experts were on the GPU
    n_layers_on_gpu: int | None = None  # of a dense model
    slots: float = 0.0  # share of the other layers' experts that have a slot in the card's memory
    misses: str = ""  # what happens to experts without a slot: one of `MISSES`
    hits: float | None = None  # measured share of uses that found a slot; None: not given
    n_drafted: int = 0  # tokens that each round drafts with the model's own layer
    tokens_per_round: float = 1.0
    dense: dict[str, int] = field(default_factory=dict)  # facts of a dense model without a preset
    notes: str = ""
    guessed: str = ""  # facts that the source does not give

    @property
    def corrects(self) -> bool:
        """True if the case may be used to correct the machine model; others only check it."""
        return hashlib.sha256(self.id.encode()).digest()[-1] % 2 == 1

    @property
    def way(self) -> str:
        if self.n_layers_on_gpu is not None:
            return f"{self.n_layers_on_gpu} of {self.dense['n_layers']} layers on the GPU"
        n = f"{self.n_resident_layers:g}"
        words = "experts on the CPU" + (f", {n} layers' on the GPU" if n != "0" else "")
        if self.slots:
            words = f"slots for {self.slots:.0%} of the experts, misses {self.misses}"
        return words + (f", {self.n_drafted} drafted" if self.n_drafted else "")

    def captures(self, n_tokens: int) -> bool:
        """Return True if kernels of a batch of `n_tokens` count as those of captured CUDA graphs.

        llama.cpp launches kernels one by one if the CPU computes experts (llama.cpp #18593), and on
        cards before the RTX 30. ik_llama.cpp fuses many kernels of a layer, and is counted as if it
        captured those of a single token. It captures no batch (ggml/src/ggml-cuda.cu, "batch size >
        1").
        """
        if not self.gpu.startswith(("RTX", "H100")) or self.gpu.startswith("RTX 20"):
            return False
        if self.engine.startswith("ik_llama.cpp") and n_tokens > 1:
            return False
        all_on_gpu = self.dense and self.n_layers_on_gpu == self.dense["n_layers"]
        by_device = self.misses == READ_BY_DEVICE or self.n_resident_layers >= ALL_LAYERS
        return bool(all_on_gpu) or by_device or self.engine.startswith("ik_llama.cpp")

    @property
    def chooses_by_row(self) -> bool:
        """True if a prompt's indexer chooses keys for one token after the other.

        CUDA builds of llama.cpp did before it had a kernel for many rows (llama.cpp #28129). All
        cases here are assumed to be older.
        """
        is_llama_cpp = self.engine.endswith("llama.cpp") and self.engine != "ik_llama.cpp"
        return is_llama_cpp and self.gpu.startswith(_CUDA)

    @property
    def on_one_socket(self) -> bool:
        return "bound to one socket" in self.notes

    @property
    def is_pinned(self) -> bool:
        """True if the engine keeps weights in pinned memory, and does not map the file."""
        dio = any(f"--load-mode {mode}" in self.flags for mode in ("dio", "none"))
        return dio or self.engine in PINNING

    @property
    def n_before(self) -> int:
        """Tokens of the context before the prompt. A context may count the prompt itself."""
        return 0 if self.context == self.n_prompt else self.context

    @property
    def machine(self) -> str:
        """The card, the CPU and the rate of RAM, by which errors are counted."""
        return f"{self.gpu}, {self.cpu}, {self.ram_gbs:g} GB/s"


def read_cases(path: Path = CASES) -> list[Case]:
    return [Case(**json.loads(line)) for line in path.read_text("utf-8").splitlines()]
