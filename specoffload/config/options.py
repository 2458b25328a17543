"""A command line as plain typed data: one class per part, each filled from the table.

A field has its default here and nowhere else. None, or an empty tuple: nothing was said, choose.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from numa.place import Strategy
from offload.mla.decision import Crossover
from offload.plan.min_batch import MinBatch
from offload.plan.placement import Chunks
from offload.plan.sharing import TokenMix
from specdec.options import SpecOptions
from specoffload.chat.conversation import ReasoningFormat


class Toggle(StrEnum):
    """llama.cpp's three-way switch."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class DraftEngine(StrEnum):
    """The library that computes the draft model. `auto` measures both once where a GPU has both."""

    AUTO = "auto"
    TORCH = "torch"
    LLAMA = "llama"


class DraftType(StrEnum):
    """Type of the torch draft's matrices; int8 has a scale for each row."""

    BF16 = "bf16"
    F32 = "f32"
    INT8 = "int8"


NumaChoice = Strategy | Literal["auto", "none"]


@dataclass(frozen=True)
class DraftOptions:
    """The draft's own settings; None: as the target's. The last four are of its engine, and all
    but the first of these of torch's alone."""

    batch_size: int | None = None
    ubatch_size: int | None = None
    ctx_size: int | None = None
    threads: int | None = None
    threads_batch: int | None = None
    device: str | None = None
    flash_attn: Toggle | None = None
    type_k: str | None = None
    type_v: str | None = None
    engine: DraftEngine = DraftEngine.AUTO
    matrices: DraftType = DraftType.BF16
    vocab: Path | None = None  # token ids that may be drafted; None: all
    graphs: bool = True


def of_draft(field: str) -> str:
    """The name under which `Options.given` has a field of DraftOptions."""
    return f"draft.{field}"


@dataclass(frozen=True)
class Options:
    """The options of opening a model. `given` are the fields somebody set, each under the name it
    was set by; `remarks` are what the command line's reader has to say of it."""

    model: Path | None = None
    alias: str | None = None
    draft: Path | None = None
    hf_repo: str | None = None
    hf_file: str | None = None
    hf_repo_draft: str | None = None
    hf_token: str | None = None
    offline: bool = False
    device: str = "auto"
    min_batch: MinBatch | Literal["auto"] = "auto"
    ctx_size: int = 4096
    batch_size: int = 2048
    ubatch_size: int | None = None
    threads: int | None = None
    threads_batch: int | None = None
    flash_attn: Toggle = Toggle.AUTO
    type_k: str = "f16"  # of the KV cache
    type_v: str | None = None
    swa_full: bool = False
    vram_bytes: int | None = None
    n_gpu_layers: int | None = None
    n_cpu_moe: int | None = None
    plan_for: TokenMix | None = None  # None: what earlier runs evaluated
    prefetch_depth: int = 8
    prefetch: bool = True
    hybrid: Toggle | None = None  # None: auto, where it may be measured
    hybrid_ahead: bool = True
    expert_chunks: Chunks = "auto"
    slot_band: bool = True
    bounce: bool = True
    native_placement: bool = True
    warmup: bool = True
    mmap: bool = False
    mla_crossover: Crossover | None = None
    ctx_checkpoints: int = 32
    numa: NumaChoice = "auto"
    numa_node: int | None = None
    trace: Path | None = None
    use_profile: bool = True
    record_trace: Path | None = None
    verbose: bool = False
    library_log: bool = False
    strict: bool = False
    spec: SpecOptions = SpecOptions()
    of_draft: DraftOptions = DraftOptions()
    draft_params: tuple[str, ...] = ()  # a command line that fills `of_draft` too
    given: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    idle: tuple[tuple[str, str], ...] = ()  # flags that change nothing here, each with the reason

    def name(self, option: str) -> str:
        """The name by which this field was set, for messages; else the field's own name."""
        return self.given.get(option, option)


@dataclass(frozen=True)
class RunOptions:
    """Of `run`."""

    words: str | None = None  # the positional argument: a model, or a prompt
    prompt: str | None = None
    file: Path | None = None
    escape: bool = False  # \n and the like in the prompt are read
    n_predict: int | None = 128  # None: to the end of the context
    conversation: bool | None = None  # answer by the chat template; None: if the model has one
    prompt_cache: Path | None = None
    prompt_cache_all: bool = False
    prompt_cache_ro: bool = False


@dataclass(frozen=True)
class ChatOptions:
    """Of `chat`, of `run` where it converses, and in part of `serve`."""

    system: str | None = None
    system_file: Path | None = None
    template: str | None = None  # a built-in template's name, or a file's
    template_kwargs: Mapping[str, Any] | None = None
    reasoning_format: ReasoningFormat = "auto"
    reasoning: Toggle = Toggle.AUTO
    reasoning_effort: str | None = None
    prefill: bool = True

    @property
    def reasons(self) -> bool | None:
        """True if the model is to reason; None leaves it to the template."""
        return None if self.reasoning is Toggle.AUTO else self.reasoning is Toggle.ON


@dataclass(frozen=True)
class AnswerFiles:
    """Files with what an answer must look like, instead of text on the command line."""

    grammar: Path | None = None
    json_schema: Path | None = None


@dataclass(frozen=True)
class ServeOptions:
    """Of `serve`."""

    host: str = "127.0.0.1"
    port: int = 8080
    api_key: str | None = None
    api_key_file: Path | None = None
    max_queue: int = 16
    watchdog_s: float = 120.0  # 0: never
    cors_origins: str | None = None
    ui: str = "auto"
    strict_params: bool = False
    metrics: bool = False
    parallel: int | None = None
    cache_ram_mib: int = 8192  # -1: no limit
    slot_save_path: Path | None = None
    slot_similarity: float = 0.1  # of a prompt
    embeddings: bool = False
    pooling: str | None = None  # None: as the model file says


@dataclass(frozen=True)
class BenchOptions:
    """Of `bench`."""

    n_predict: int = 64
    repetitions: int = 5
    vs: str | None = None
    n_prompt: int = 2048
    output: str | None = None
    n_pp: tuple[int, ...] = ()
    n_tg: tuple[int, ...] = ()
    n_pl: tuple[int, ...] = ()
    is_pp_shared: bool = False


@dataclass(frozen=True)
class ProfileOptions:
    """Of `profile`; None is the measurement's own choice."""

    text: Path | None = None
    n_max: int | None = None
    repetitions: int | None = None
    plot: Path | None = None
    export_to: Path | None = None
    import_from: Path | None = None
    plot_with: tuple[Path, ...] = ()
    labels: tuple[str, ...] = ()
    force: bool = False


@dataclass(frozen=True)
class Ram:
    """Host memory of the machine to plan for. None: what is free here; a typical bandwidth."""

    size_bytes: int | None = None
    bytes_per_s: float | None = None


@dataclass(frozen=True)
class PlanOptions:
    """Of `plan`; None is a typical machine's."""

    link_bytes_per_s: float | None = None
    ram: Ram = Ram()


@dataclass(frozen=True)
class OutputOptions:
    """Of every command with results."""

    as_json: bool = False


@dataclass(frozen=True)
class TraceOptions:
    """Of `trace`."""

    file: Path | None = None


@dataclass(frozen=True)
class DoctorOptions:
    """Of `doctor`."""

    numa: bool = False


@dataclass(frozen=True)
class TuneOptions:
    """Of `tune numa`."""

    time_limit_s: float = 600.0
