"""The options of a command line as typed data, in one class per part.

The table of flags says which flag sets which field.

Defaults are defined only here. None or an empty tuple means that the user chose nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Any, Literal

from numa.place import Strategy
from offload.kv_overrides import KvOverride
from offload.plan.workload import TokenMix
from offload.remote.address import DEFAULT_PATIENCE_S, Address
from offload.times.min_batch import MinBatch
from specdec.options import PolicyName, SpecOptions
from specoffload.chat.conversation import ReasoningFormat


class Toggle(StrEnum):
    """llama.cpp's three-way switch."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class DraftEngine(StrEnum):
    """The library that computes the draft model. `auto` measures both once on a CUDA device."""

    AUTO = "auto"
    TORCH = "torch"
    LLAMA = "llama"


NumaChoice = Strategy | Literal["auto", "none"]
SplitMode = Literal["layer", "none"]


@dataclass(frozen=True)
class CpuRange:
    """Processors from `first` to `last`, both included. `last` is None for the machine's last."""

    first: int
    last: int | None


@dataclass(frozen=True)
class DraftOptions:
    """The draft model's own settings; None takes the target's.

    Only torch reads `vocab` and `graphs`. No flag sets `graphs`, but SPECOFFLOAD_WITHOUT can turn
    it off.
    """

    batch_size: int | None = None
    ubatch_size: int | None = None
    ctx_size: int | None = None
    threads: int | None = None
    threads_batch: int | None = None
    cpu_mask: tuple[tuple[int, ...], ...] = ()
    cpu_range: tuple[CpuRange, ...] = ()
    cpu_strict: bool | None = None
    cpu_mask_batch: tuple[tuple[int, ...], ...] = ()
    cpu_range_batch: tuple[CpuRange, ...] = ()
    cpu_strict_batch: bool | None = None
    device: str | None = None
    flash_attn: Toggle | None = None
    type_k: str | None = None
    type_v: str | None = None
    engine: DraftEngine = DraftEngine.AUTO
    vocab: Path | None = None  # token ids that may be drafted; None: all
    graphs: bool = True  # True: steps replay CUDA graphs


def of_draft(field: str) -> str:
    """The key of a field of DraftOptions in `Options.given`."""
    return f"draft.{field}"


@dataclass(frozen=True, kw_only=True)
class OpeningOptions:
    """Options of opening a model that are used as they were given."""

    model: Path | None = None
    alias: str | None = None
    device: str = "auto"
    tensor_split: tuple[float, ...] = ()  # each device's share of the layers; (): planned
    ctx_size: int | None = None  # None: chosen (context_size.py); 0: the model's own length
    batch_size: int = 2048
    kv_overrides: tuple[KvOverride, ...] = ()  # values in place of the file's metadata
    flash_attn: Toggle = Toggle.AUTO
    type_k: str = "f16"  # type of the KV cache's keys
    type_v: str | None = None  # None: f16, or `type_k` if the model has MLA
    kv_offload: bool | None = None  # False: the KV cache is in RAM; None: where it is faster
    swa_full: bool = False
    rope_scaling: str | None = None  # None, here and in the next fields: as the file says
    rope_scale: float | None = None
    rope_freq_base: float | None = None
    rope_freq_scale: float | None = None
    yarn_orig_ctx: int | None = None
    yarn_ext_factor: float | None = None
    yarn_attn_factor: float | None = None
    yarn_beta_slow: float | None = None
    yarn_beta_fast: float | None = None
    mmap: bool = False
    ram_bytes: int | None = None  # most memory for streamed weights; None: what is free
    repack: bool | None = None  # None: the layout that was measured to be faster on this machine
    ctx_checkpoints: int = 32
    mmproj: Path | None = None  # a projector for images
    mmproj_offload: bool = True  # False: the CPU computes the projector
    image_min_tokens: int | None = None  # of an image; None: as the projector's file says
    image_max_tokens: int | None = None
    trace: Path | None = None
    notes: tuple[str, ...] = ()  # sentences about the command line; always shown


@dataclass(frozen=True, kw_only=True)
class Options(OpeningOptions):
    """All options of opening a model.

    `given` maps each field that was set to the flag or variable that set it. `without` names parts
    to leave out, for debugging.
    """

    draft: Path | None = None  # a draft model, or an EAGLE-3 file
    hf_repo: str | None = None
    hf_file: str | None = None
    hf_repo_draft: str | None = None
    mmproj_url: str | None = None  # address of a projector's file on the hub
    mmproj_auto: bool = False  # True: use the projector beside the model
    hf_token: str | None = None
    offline: bool = False
    workers: tuple[Address, ...] = ()  # machines whose devices are used
    rpc_timeout_s: float = DEFAULT_PATIENCE_S
    rpc_secret_file: Path | None = None
    min_batch: MinBatch | Literal["auto"] = "auto"
    ubatch_size: int | None = None
    threads: int | None = None
    threads_batch: int | None = None
    cpu_mask: tuple[tuple[int, ...], ...] = ()  # the processors of each mask
    cpu_range: tuple[CpuRange, ...] = ()
    cpu_strict: bool | None = None  # None: off
    cpu_mask_batch: tuple[tuple[int, ...], ...] = ()
    cpu_range_batch: tuple[CpuRange, ...] = ()
    cpu_strict_batch: bool | None = None  # None: as cpu_strict
    split_mode: SplitMode = "layer"
    main_gpu: int = 0
    vram_bytes: int | tuple[int, ...] | None = None  # one value for all devices, or one for each
    n_gpu_layers: int | None = None
    n_cpu_moe: int | frozenset[int] | None = None  # a set: the layers whose experts are resident
    plan_for: TokenMix | None = None  # None: the mix that earlier runs evaluated
    hybrid: Toggle | None = None  # None: auto, unless --min-batch is a number
    warmup: bool = True
    route_cached: float = 0.0  # strength with which routers prefer cached experts; 0: off
    route_keep: int = 2  # best experts of each token that stay the router's own
    numa: NumaChoice = "auto"
    use_profile: bool = True  # True: read and keep measured profiles
    without: frozenset[str] = frozenset()
    verbose: bool = False
    library_log: int = 0  # llama.cpp's log level, 4 or more; 0: its log is hidden
    spec: SpecOptions = SpecOptions()
    of_draft: DraftOptions = DraftOptions()
    draft_params: tuple[str, ...] = ()  # value of --draft-params, which also sets `of_draft`
    given: Mapping[str, str] = field(default_factory=dict)

    def name(self, option: str) -> str:
        """The flag or variable that set this field, for messages; else the field's own name."""
        return self.given.get(option, option)


@dataclass(frozen=True)
class RunOptions:
    """Options of `run`."""

    words: str | None = None  # the positional argument: a model, or a prompt
    prompt: str | None = None
    escape: bool = False  # True: escapes such as \n in the prompt are replaced
    n_predict: int | None = 128  # None: to the end of the context
    conversation: bool | None = None  # True: answer in a chat; None: if there is a template
    prompt_cache: Path | None = None
    prompt_cache_all: bool = False
    prompt_cache_ro: bool = False


@dataclass(frozen=True)
class ChatOptions:
    """Options of `chat` and of a conversation in `run`. `serve` uses some of them."""

    system: str | None = None
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
class ServeOptions:
    """Options of `serve`."""

    host: str = "127.0.0.1"
    port: int = 8080
    api_key: str | None = None
    api_key_file: Path | None = None
    max_queue: int = 16
    shutdown_timeout_s: float = 60.0
    strict_model: bool = False
    media_path: Path | None = None  # None: requests name no files of this machine
    allow_media_urls: str = "none"  # or "public", "all": addresses of images that are fetched
    media_marker: str | None = None  # stands for an image in raw prompts; None: a random one
    cors_origins: str | None = None
    ssl_key_file: Path | None = None
    ssl_cert_file: Path | None = None
    api_prefix: str = ""
    ui: str = "auto"
    metrics: bool = False
    parallel: int | None = None
    cache_ram_mib: int = 8192  # -1: no limit
    cache_idle_slots: bool = True
    kv_unified: bool = True  # False: each slot has cells of its own
    kv_unified_per_slot: int = 0  # most tokens of a slot; 0: as many as its cells hold
    cache_disk: DiskRoom | None = None  # None: no prompts are kept on the disk
    slot_save_path: Path | None = None
    slot_similarity: float = 0.1  # least share of a prompt that a reused slot holds
    embeddings: bool = False
    pooling: str | None = None  # None: as the model file says
    log_file: Path | None = None
    log_timestamps: bool = True
    log_prefix: bool = False  # True: each line has the letter of its level
    models: tuple[Path, ...] = ()  # several positional arguments; one is Options.model
    models_dir: Path | None = None
    models_preset: Path | None = None
    models_max: int = 1  # models that are open at once; 0: as many as fit
    models_autoload: bool = True  # True: a request opens its model
    idle_s: int = -1  # seconds without a request after which a model is closed; -1: never
    tags: str | None = None  # words on the model, separated by commas

    @property
    def has_several(self) -> bool:
        """True if requests choose among models."""
        return bool(self.models) or self.models_dir is not None or self.models_preset is not None


BENCH_FORMATS = ("md", "csv", "json", "jsonl")  # of llama-bench, in which `bench --output` writes


class WorkloadName(StrEnum):
    """A kind of text that `bench --policies` continues. MIXED: all kinds in turn in one session."""

    CODE = "code"
    PROSE = "prose"
    AGENT = "agent"
    REWRITE = "rewrite"
    RANDOM = "random"
    MIXED = "mixed"


class RunOrder(StrEnum):
    """How a run of `bench --texts` holds its conversations: one after the other, or all at once."""

    IN_SEQUENCE = "seq"
    AT_ONCE = "par"


@dataclass(frozen=True)
class BenchOptions:
    """Options of `bench`."""

    n_predict: int = 64
    repetitions: int = 5
    vs: str | None = None
    n_prompt: int = 2048
    output: str | None = None
    n_pp: tuple[int, ...] = ()
    n_tg: tuple[int, ...] = ()
    n_pl: tuple[int, ...] = ()
    is_pp_shared: bool = False
    by_drafter: bool = False
    by_policy: bool = False
    strengths: tuple[float, ...] = ()  # of routing that prefers cached experts, to compare
    n_kept: int = 2  # best experts of each token that stay the router's own
    plot: Path | None = None  # of `strengths`
    texts: str | None = None  # address of a server whose texts are compared
    conversations: tuple[tuple[str, ...], ...] = ()  # the questions of each; (): the built-in ones
    runs: tuple[RunOrder, ...] = (RunOrder.IN_SEQUENCE, RunOrder.IN_SEQUENCE, RunOrder.AT_ONCE)
    n_responses: int = 0  # equal requests to /v1/responses; 0: conversations are compared
    by_agent: bool = False
    agent_urls: tuple[
        str, ...
    ] = ()  # running servers to compare, the first of which is the baseline
    tool_choice: Literal["auto", "required"] = "auto"
    only_policies: tuple[PolicyName, ...] = ()  # (): all
    workloads: tuple[WorkloadName, ...] = ()  # (): all
    blocks: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16)  # tokens


@dataclass(frozen=True)
class SweepOptions:
    """Lists of flag values of `bench`. Every combination is measured, as llama-bench does.

    Each field has the values of one flag, in the order given. () stands for a flag that was not
    given. A field that is also in `Options` or `BenchOptions` has the same name there. `n_pg` are
    pairs of prompt tokens and generated tokens that are timed together.
    """

    n_prompt: tuple[int, ...] = ()
    n_predict: tuple[int, ...] = ()
    n_pg: tuple[tuple[int, int], ...] = ()
    n_depth: tuple[int, ...] = ()
    batch_size: tuple[int, ...] = ()
    ubatch_size: tuple[int | None, ...] = ()
    type_k: tuple[str, ...] = ()
    type_v: tuple[str | None, ...] = ()
    flash_attn: tuple[Toggle, ...] = ()
    threads: tuple[int | None, ...] = ()
    n_gpu_layers: tuple[int | None, ...] = ()
    n_cpu_moe: tuple[int | frozenset[int] | None, ...] = ()

    @property
    def is_asked(self) -> bool:
        """True if some flag has several values, or a value that only a sweep has."""
        several = any(len(getattr(self, f.name)) > 1 for f in fields(self))
        return several or bool(self.n_pg or self.n_depth) or 0 in (*self.n_prompt, *self.n_predict)


@dataclass(frozen=True)
class ProfileOptions:
    """Options of `profile`."""

    plot: Path | None = None
    export_to: Path | None = None
    import_from: Path | None = None
    plot_with: tuple[Path, ...] = ()
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class DiskRoom:
    """Room for files in a folder. None stands for the usual folder."""

    size_bytes: int
    folder: Path | None = None


@dataclass(frozen=True)
class Ram:
    """Host memory of the machine to plan for.

    A size of None means this machine's free memory, a bandwidth of None a typical one.
    """

    size_bytes: int | None = None
    bytes_per_s: float | None = None


@dataclass(frozen=True)
class PlanOptions:
    """Options of `plan`. None: the value of `hardware` if it is given, else a typical machine's."""

    hardware: str | None = None  # a preset's name, or a file
    link_bytes_per_s: tuple[float, ...] = ()  # one value for all devices, or one for each
    disk_bytes_per_s: float | None = None  # None: as measured here, unless `hardware` is given
    ram: Ram = Ram()


@dataclass(frozen=True)
class WorkerFlags:
    """Options of `worker`."""

    listen: Address = Address("127.0.0.1", 50052)
    allow: tuple[IPv4Network | IPv6Network, ...] = ()  # addresses that may connect; (): all
    rpc_secret_file: Path | None = None
    insecure: bool = False  # True: other machines may connect without a secret


@dataclass(frozen=True)
class PruneOptions:
    """Options of `draft prune`."""

    draft: Path | None = None  # required
    corpus: tuple[Path, ...] = ()
    n_kept: int = 32768
    output: Path = Path("kept.txt")


@dataclass(frozen=True)
class JudgeOptions:
    """Options of `draft judge`."""

    texts: tuple[Path, ...] = ()  # files and folders; (): the embedded prompts


@dataclass(frozen=True)
class DistilOptions:
    """Options of `draft distil`."""

    draft: Path | None = None  # required
    texts: tuple[Path, ...] = ()
    output: Path | None = None  # required
    time_limit_s: float = 3600.0  # of continuing and training, in all runs together
    learning_rate: float = 0.003


@dataclass(frozen=True)
class CommandOptions:
    """Options of `trace`, `report`, `doctor` and `tune`, and `--json` of all commands."""

    as_json: bool = False
    trace_file: Path | None = None
    report_file: Path = Path("specoffload-report.json")
    models_folder: Path | None = None  # `models FOLDER`; None: the caches
    shows_nodes: bool = False  # `doctor --numa`
    minutes: float = 10.0  # limit of `tune`
    time_limit_s: float = 600.0  # limit of `tune numa`
