"""Resolves the command line, environment, stored tuning and machine into one frozen Config.

Every automatic choice adds its reason to `Config.reasons`. What a start decides by the model's
header and by the machine stands beside the configuration (`specoffload/opening/choices.py`).
"""

from __future__ import annotations

import json
import mmap
import struct
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from importlib import resources
from pathlib import Path

from numa.threads import EVERYWHERE, Processors
from offload.device import device_names
from offload.plan.placement import NCpuMoe, Passes
from offload.plan.workload import TokenMix
from offload.regular_file import open_regular
from offload.remote.address import RemoteOptions, named_remotely
from offload.remote.probe import reach
from offload.remote.secret import Secret
from offload.stream.options import StreamingOptions
from offload.threads.numa_plan import NumaPlan
from offload.times.context_memory import OWN, OWN_REQUIRED
from offload.times.min_batch import NEVER, MinBatch
from specdec.options import DrafterName
from specdec.user_path import user_path
from specdec.whole_file import read_text
from specoffload.chat.conversation import ChatSettings, ReasoningOptions
from specoffload.chat.families import BUILT_IN
from specoffload.config.environment import Environment, Host
from specoffload.config.numa_choice import Threads, choose_draft_threads, choose_threads
from specoffload.config.options import (
    ChatOptions,
    DiskRoom,
    DraftOptions,
    OpeningOptions,
    Options,
    ServeOptions,
    Toggle,
)
from specoffload.config.placing import (
    HybridChoice,
    PlacingFlags,
    left_to_the_plan,
    parts_of,
    streaming_of,
    switched_off,
)
from specoffload.config.rpc_secret import read_secret
from specoffload.config.speculation import (
    SpecConfig,
    ignored,
    inactive,
    may_use_own_layers,
    resolve_speculation,
    uses_draft_model,
    with_file,
    without_rows_note,
)
from specoffload.errors import UsageError

DEMO_WORDS = (
    "demo pair, trained on Python source: it continues code and answers no questions; "
    "-hf USER/REPO fetches a model to talk to"
)
DEMO_NAME = "demo-pair"
_USUAL_PARALLEL = 4
_LEAST_TOKENS = 512  # least context per request if the user did not choose their number
_PAD = 256  # cells to which libllama rounds those of each slot up


_MTP_KEY = b".nextn_predict_layers"
# The key of the architecture and its value: a string (type 8) of six bytes.
_SIX_LETTERS = b"general.architecture" + struct.pack("<IQ", 8, 6)
_EAGLE_KEY, _BLOCK_KEY = _SIX_LETTERS + b"eagle3", _SIX_LETTERS + b"dflash"
_MARKOV = b"markov_w1.weight"  # a tensor of DSpark files, by which llama.cpp knows them
_HEADER_BYTES = 64 << 20  # first bytes of a file in which the key is searched


@dataclass(frozen=True, kw_only=True)
class Config(OpeningOptions):
    """Everything that opening a session needs."""

    model: Path
    min_batch: MinBatch | None  # None: measured when the model is opened
    ubatch_size: int | None  # None: chosen by the plan, up to most_ubatch
    most_ubatch: int
    threads: int
    threads_batch: int
    spec: SpecConfig
    streaming: StreamingOptions  # switches of the run, which no plan depends on
    reasons: tuple[str, ...]
    stream_experts: bool = True
    device_bytes: int | None = None  # --vram: the whole budget on a GPU; None: what is free
    each_device_bytes: tuple[int, ...] = ()  # --vram with a size for each device
    n_gpu_layers: int | None = None
    n_cpu_moe: NCpuMoe = "fit"
    passes: Passes = "auto"
    plan_for_splits: bool = False  # a start may split layers
    lend: bool = True
    mix: TokenMix | None = None  # --plan-for
    tuned_ubatch: int | None = None  # a ubatch that is tried; None: the kept one
    hybrid: HybridChoice = HybridChoice()
    placing: PlacingFlags | None = None  # None: no flag restricts the plan
    gpu_flags: tuple[str, ...] = ()  # flags that were given and change nothing without a GPU
    remote: RemoteOptions = RemoteOptions()
    rpc_secret: Secret | None = None  # proved to workers, which prove it, too
    numa: NumaPlan | None = None  # None: no thread is bound to a node
    decode_on: Processors = EVERYWHERE  # processors of the threads, without `numa`
    batch_on: Processors = EVERYWHERE
    draft_threads: Threads | None = None  # None: the draft model has those of the target
    parallel: int = 1  # requests that run at once
    cache_ram_bytes: int | None = 0  # RAM for prompts of earlier requests; None: no limit
    cache_idle_slots: bool = True  # idle conversations may leave the cells
    kv_unified: bool = True  # False: each slot has cells of its own
    most_each: int = 0  # most tokens of a slot; 0: as many as its cells hold
    cache_disk: DiskRoom | None = None  # its folder is named; None: no prompts on the disk
    slot_save_path: Path | None = None
    slot_similarity: float = ServeOptions.slot_similarity
    pooling: str | None = None  # kind of embeddings; None: no embeddings
    serves: bool = False  # agents may send long prompts, for which a context is chosen

    @property
    def is_demo(self) -> bool:
        """True if the target is the embedded one, which only continues Python source."""
        return self.model == demo_file("target.gguf")

    @property
    def threads_of_draft(self) -> Threads:
        """The threads of the draft model: by its own flags, else the target's."""
        plan = None if self.numa is None else self.numa.for_draft()
        own = self.draft_threads
        return own or Threads(self.threads, self.threads_batch, plan, self.decode_on, self.batch_on)

    @property
    def has_own_cells(self) -> bool:
        """True if each of several slots has cells of its own."""
        return not self.kv_unified and self.parallel > 1

    def n_ctx_each(self, n_ctx: int) -> int:
        """Return the tokens that one slot may hold in a context of `n_ctx`; 0: not known yet."""
        each = own_cells(n_ctx, self.parallel) if self.has_own_cells else n_ctx
        return min(each, self.most_each) if self.most_each else each

    def n_cells(self, n_ctx: int) -> int:
        """Return the cells of all slots in a context of `n_ctx`, as they are rounded up."""
        each = own_cells(n_ctx, self.parallel)
        return self.parallel * each if self.has_own_cells else n_ctx

    @property
    def uses_workers(self) -> bool:
        """True if the target or the draft model has layers on devices of other machines."""
        return self.remote.is_used or named_remotely(self.spec.of_draft.device)

    def check_unused_workers(self) -> None:
        """Raise WorkerUnavailable if a worker of --rpc that no model uses cannot be reached.

        Workers that are used are asked when the models are opened.
        """
        if not self.uses_workers:
            for worker in self.remote.workers:
                reach(worker)

    @property
    def without_drafts(self) -> Config:
        """The same configuration, but nothing drafts."""
        return replace(self, spec=self.spec.without_drafts)


def demo_file(name: str) -> Path:
    """The path of a file of the embedded pair: target.gguf, draft.gguf or CARD.md."""
    return Path(str(resources.files("specoffload") / "demo" / name))


def demo_prompts(kind: str = "") -> list[str]:
    """The held-out prompts of the embedded pair of `kind`, "code" or "prose"; all if it is ""."""
    rows = json.loads(demo_file("prompts.json").read_text(encoding="utf-8"))
    return [row["text"] for row in rows if kind in ("", row["kind"])]


def resolve(options: Options, host: Host) -> Config:
    """Choose everything that the user left open, and record the reason for each choice.

    Raises UsageError or BadOption.
    """
    reasons = [*options.notes]
    without = options.without | host.environment.without
    options = _without(options, without, reasons)
    model, draft = _models(options, reasons)
    named = options.name("draft") if draft is not None else ""
    by_rows = None if draft is None else _row_drafter(draft)
    is_named = options.spec.drafters != ()
    spec_options = with_file(options.spec, named, by_rows, reasons)
    options = replace(options, spec=spec_options)
    threads = choose_threads(options, host, reasons)
    reason = _mtp_reason(model) if may_use_own_layers(options.spec) else "unused"
    spec = resolve_speculation(
        options,
        draft,
        no_mtp_reason=reason,
        environment=host.environment,
        is_named=is_named,
    )
    if DrafterName.MTP in options.spec.drafters and DrafterName.MTP not in spec.options.drafters:
        words = without_rows_note(options.spec, reason)
        options = replace(options, notes=(*options.notes, words))
    draft_threads = None
    if draft is not None:
        threads, draft_threads = choose_draft_threads(
            options, spec.of_draft, host, threads, reasons
        )
    options = _on_one_gpu(options, reasons)
    secret, warning = read_secret(options.rpc_secret_file, host.environment.rpc_secret)
    if warning:
        options = replace(options, notes=(*options.notes, warning))
    workers = tuple(replace(worker, secret=secret) for worker in options.workers)
    remote = RemoteOptions(workers, patience_s=options.rpc_timeout_s)
    device, remote = remote.of(options.device)
    if options.workers and not (remote.is_used or named_remotely(spec.of_draft.device)):
        options = replace(options, notes=(*options.notes, _unused_workers(options)))
        reasons.append(options.notes[-1])
    for unused in ("rpc_timeout_s", "rpc_secret_file"):
        if unused in options.given and not options.workers:
            said = ignored(options.name(unused), "no worker is used: --rpc names them")
            options = replace(options, notes=(*options.notes, said))
            reasons.append(said)
    _check_routing(options, reasons)
    idle = inactive((*reasons, *spec.reasons))
    options = replace(options, notes=tuple(dict.fromkeys((*options.notes, *idle))))
    placing, vram = PlacingFlags(options, without), options.vram_bytes
    plain = {field.name: getattr(options, field.name) for field in fields(OpeningOptions)}
    if model == demo_file("target.gguf"):
        plain["alias"] = options.alias or DEMO_NAME
    return Config(
        **plain | left_to_the_plan(options, without) | {"model": model, "device": device},
        threads=threads.n_decode,
        threads_batch=threads.n_batch,
        spec=spec,
        placing=placing if placing.fields else None,
        streaming=streaming_of(options, without),
        device_bytes=None if isinstance(vram, tuple) else vram,
        each_device_bytes=vram if isinstance(vram, tuple) else (),
        lend="lend" not in without,
        mix=options.plan_for,
        gpu_flags=_gpu_flags(options),
        reasons=tuple(dict.fromkeys(reasons)),
        remote=remote,
        rpc_secret=secret,
        numa=threads.plan,
        decode_on=threads.decode_on,
        batch_on=threads.batch_on,
        draft_threads=draft_threads,
    )


def _models(options: Options, reasons: list[str]) -> tuple[Path, Path | None]:
    """The target, and the draft model if one is used."""
    model, draft, spec = options.model, options.draft, options.spec
    if model is None:
        reasons.append("no model was given: using the embedded demo pair")
        model = demo_file("target.gguf")
        if draft is None and uses_draft_model(spec):
            draft = demo_file("draft.gguf")
    if draft is not None and not uses_draft_model(spec) and spec.from_file is None:
        by = spec.name("drafters")
        nothing = spec.drafters == (DrafterName.NONE,)
        reason = f"nothing drafts with {by}" if nothing else f"{by} does not name draft"
        reasons.append(ignored(options.name("draft"), reason))
        draft = None
    return model, draft


def _check_routing(options: Options, reasons: list[str]) -> None:
    """Name --route-keep if it has no effect. Raises UsageError for the exact setting."""
    if not options.route_cached:
        if "route_keep" in options.given:
            reasons.append(ignored(options.name("route_keep"), "--route-cached is off"))
        return
    exact = options.flash_attn is Toggle.OFF and options.type_k == options.type_v == "f32"
    if exact:
        raise UsageError(
            f"{options.name('route_cached')} {options.route_cached:g} changes texts, and "
            "--flash-attn off with an f32 cache is the exact setting (docs/speculation.md): leave "
            "one of them out"
        )


def _on_one_gpu(options: Options, reasons: list[str]) -> Options:
    """The options, with a single device if --split-mode is none. Raises UsageError."""
    if options.split_mode == "layer":
        if options.main_gpu:
            reason = "--split-mode layer uses all devices; none uses one"
            reasons.append(ignored(options.name("main_gpu"), reason))
        return options
    names, nth = device_names(options.device), options.main_gpu
    sizes = options.vram_bytes
    if isinstance(sizes, tuple) and nth < len(sizes):
        options = replace(options, vram_bytes=sizes[nth])
    if names == ["auto"]:  # alone, it may mean several GPUs
        return replace(options, device=f"auto:{nth}", tensor_split=())
    if nth >= len(names):
        raise UsageError(
            f"{options.name('main_gpu')} {nth}: {options.name('device')} {options.device} has "
            f"{len(names)} devices, and the first has number 0"
        )
    return replace(options, device=names[nth], tensor_split=())


def _mtp_reason(model: Path) -> str:
    """Why the file has no layers of its own that draft; "" if its header seems to count some.

    Only the native library reads headers, and the server's API process must never load it. So this
    searches for the header's key. The process that opens the model then checks the layers
    (`opening.drafters.usable_drafters`).
    """
    return "" if _header_has(model, _MTP_KEY) else "the file has no layers for it"


def _row_drafter(draft: Path) -> DrafterName | None:
    """The drafter of a file that drafts from its target's rows; None: it is a model of its own."""
    if _header_has(draft, _EAGLE_KEY):
        return DrafterName.EAGLE3
    if _header_has(draft, _BLOCK_KEY):
        return DrafterName.DSPARK if _header_has(draft, _MARKOV) else DrafterName.DFLASH
    return None


def _header_has(path: Path, words: bytes) -> bool:
    """True if `words` are at the beginning of the file. False if the file cannot be read."""
    with (
        suppress(OSError, ValueError),  # reported when the file is opened
        open_regular(path) as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole,
    ):
        return whole.find(words, 0, _HEADER_BYTES) >= 0
    return False


def _unused_workers(options: Options) -> str:
    names = ",".join(map(str, options.workers))
    return (
        f"--rpc {names} is not used, because --device {options.device} names no device of a "
        f"worker; --device {options.device},RPC0 does"
    )


def _gpu_flags(options: Options) -> tuple[str, ...]:
    """The given flags that change nothing if the CPU computes alone.

    A flag whose value asks for what the CPU does anyway, such as --n-gpu-layers 0, is left out.
    """
    has_effect = {
        "vram_bytes": options.vram_bytes is not None,
        "min_batch": options.min_batch not in ("auto", MinBatch(NEVER, NEVER)),
        "n_gpu_layers": bool(options.n_gpu_layers),
        # The mix also chooses the layouts of the CPU's weights, unless a flag does.
        "plan_for": options.plan_for is not None
        and (options.repack is not None or not options.use_profile),
        "tensor_split": bool(options.tensor_split),
        "kv_offload": options.kv_offload is False,
    }
    return tuple(
        options.given[field]
        for field, asks in has_effect.items()
        if asks and field in options.given
    )


# -- SPECOFFLOAD_WITHOUT: parts to leave out, for bisecting on a user's machine


def _without(options: Options, without: frozenset[str], reasons: list[str]) -> Options:
    """`options` without those parts. Raises UsageError for a part that does not exist."""
    if not without:
        return options
    sections = (StreamingOptions, DraftOptions)
    known = {"profile", "lend"}.union(*map(parts_of, sections))
    known = {name.replace("_", "-") for name in known}
    if unknown := sorted(without - known):
        raise UsageError(
            f"SPECOFFLOAD_WITHOUT={unknown[0]}: must be some of {', '.join(sorted(known))}"
        )
    reasons.append(f"left out, as SPECOFFLOAD_WITHOUT asks: {', '.join(sorted(without))}")
    return replace(
        options,
        use_profile=options.use_profile and "profile" not in without,
        of_draft=replace(options.of_draft, **switched_off(DraftOptions, without)),
    )


# -- serve and chat


def for_serving(
    config: Config, serve: ServeOptions, prompt_folder: Path = Environment.prompt_folder
) -> Config:
    """`config` with room for several requests, and the reason for their number.

    `prompt_folder` is the folder of --cache-disk if the flag names none. Raises UsageError.
    """
    reasons, parallel = config.reasons, serve.parallel
    if parallel is None:
        parallel = usual_parallel(config.ctx_size)
        requests = "request runs" if parallel == 1 else "requests run"
        shared = "share" if serve.kv_unified else "divide"
        reasons = (*reasons, f"up to {parallel} {requests} at once and {shared} the context (-np)")
    config, cell_reasons = _with_cells(config, serve, parallel)
    reasons += cell_reasons
    mib, on_disk = serve.cache_ram_mib, serve.cache_disk
    if on_disk is not None:
        on_disk = replace(on_disk, folder=(on_disk.folder or prompt_folder).absolute())
    # If the model file names a pooling, embeddings need no flag.
    pooling = serve.pooling or (OWN_REQUIRED if serve.embeddings else OWN)
    return replace(
        config,
        parallel=parallel,
        cache_ram_bytes=None if mib < 0 else mib << 20,
        cache_idle_slots=serve.cache_idle_slots,
        cache_disk=on_disk,
        slot_save_path=serve.slot_save_path,
        slot_similarity=serve.slot_similarity,
        pooling=pooling,
        reasons=reasons,
        serves=True,
    )


def _with_cells(
    config: Config, serve: ServeOptions, parallel: int
) -> tuple[Config, tuple[str, ...]]:
    """Return the configuration with the cells of `parallel` slots, and what is said of them.

    Raises UsageError if they can only be shared, or if a slot has no room for an answer.
    """
    each, reasons = serve.kv_unified_per_slot, list[str]()
    if each == 1:
        raise UsageError(
            "--kv-unified-per-slot 1: a slot holds at least one token of a prompt and one of its "
            "answer; use 2 or more, or 0 for no limit"
        )
    if not serve.kv_unified and parallel == 1:
        reasons.append(ignored("--no-kv-unified", "there is one slot"))
    elif not serve.kv_unified and config.kv_offload is False:
        raise UsageError(
            "--no-kv-unified: a KV cache in RAM (--no-kv-offload) is shared by all slots; leave "
            "one of the two flags out"
        )
    if each and config.ctx_size is None:
        config = replace(config, ctx_size=parallel * each)
        reasons.append(
            f"context: {parallel * each:,} tokens, which are {each:,} for each of {parallel} slots "
            "(--kv-unified-per-slot)"
        )
    elif each and config.ctx_size:
        n_own = config.ctx_size if serve.kv_unified else own_cells(config.ctx_size, parallel)
        if each > n_own:
            said = f"a slot has at most {n_own:,} tokens (--ctx-size)"
            reasons.append(ignored(f"--kv-unified-per-slot {each}", said))
    return replace(config, kv_unified=serve.kv_unified, most_each=each), tuple(reasons)


def own_cells(n_ctx: int, parallel: int) -> int:
    """Return the cells of each of `parallel` slots in a context of `n_ctx` that they divide.

    libllama rounds them up to 256.
    """
    return -(-n_ctx // (_PAD * parallel)) * _PAD


def usual_parallel(ctx_size: int | None) -> int:
    """Return the default of --parallel for a context of that size. None: as the plan chooses."""
    most = ctx_size // _LEAST_TOKENS if ctx_size else _USUAL_PARALLEL
    return max(1, min(_USUAL_PARALLEL, most))


def chat_settings(own: ChatOptions) -> ChatSettings:
    """The settings of chats. Raises UsageError for a template that cannot be found."""
    name = own.template or "of the model file"
    return ChatSettings(
        _read_template(own.template),
        "of --chat-template" if "{" in name else name,
        own.template_kwargs or {},
        ReasoningOptions(own.reasoning_format, own.reasons, own.reasoning_effort),
        own.prefill,
    )


def _read_template(named: str | None) -> str | None:
    """The text of a template: built in, typed on the command line, or in a file.

    Raises UsageError if it is none of these.
    """
    if named is None or "{{" in named or "{%" in named:
        return named
    if named in BUILT_IN:
        return BUILT_IN[named]
    try:
        return read_text(user_path(named))
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(
            f"--chat-template {named}: neither a readable file "
            f"({e.strerror if isinstance(e, OSError) else e}), nor Jinja, nor one of llama.cpp's "
            f"templates: {', '.join(BUILT_IN)}"
        ) from e
