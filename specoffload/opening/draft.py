"""Opens the draft model in libllama or torch, and estimates the device memory that it needs.

The caller closes the returned model. If opening fails, no model stays open.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offload.backends import backend_of, number_of
from offload.device import DeviceChoice, choose_device
from offload.engine import Engine, open_engine
from offload.errors import BadModel, DeviceFailed, DeviceUnavailable, DoesNotFit
from offload.ggml.library.log import spare_cells
from offload.ggml.native_build import library_build
from offload.model import ModelFacts
from offload.model_file import model_hash, read_facts
from offload.notes import Note, NoteKind
from offload.plan.row_file import row_file_bytes
from offload.plan.weights import device_bytes
from offload.remote.address import named_remotely
from offload.times.context_memory import (
    DEFAULT_UBATCH,
    ContextOptions,
    context_memory,
    forgetting_window,
)
from offload.torch_draft.plan import TorchDraftOptions, lay_out, read_shape
from specdec.options import MOST_DRAFTED, AcceptRule
from specoffload.config.options import DraftEngine
from specoffload.config.resolution import Config
from specoffload.config.speculation import SpecConfig
from specoffload.kept import KeptFile
from specoffload.kept_engines import LIBLLAMA, TORCH
from specoffload.opening.draft_engine import EngineChoice, Openers, measured_choice
from specoffload.opening.draft_model import DraftModel, missing_torch, read_kept
from specoffload.opening.header import target_facts

_DEFAULT_CTX = 4096  # assumed context in tokens before the draft model is open
# Largest ubatch of a draft model in tokens, unless a flag sets the draft's. A larger ubatch saves
# copies of streamed weights. It would only take memory here, since the weights are resident.
_DRAFT_UBATCH = 512
# Errors after which the draft is computed in libllama instead of torch.
_NOT_IN_TORCH = (BadModel, DoesNotFit, DeviceUnavailable, DeviceFailed)


@dataclass(frozen=True)
class OpenedDraft:
    """The draft model, the choice of its engine unless a flag names it, and start-up lines."""

    model: DraftModel
    choice: EngineChoice | None = None
    notes: tuple[str, ...] = ()


def draft_bytes(config: Config, spec: SpecConfig, n_ctx: int | None) -> int:
    """Bytes of device memory for the draft's weights and context, or 0.

    `n_ctx` is the target's context, None or 0 if it is not known yet. Returns the larger number if
    both engines may be chosen.
    """
    if spec.draft is None or named_remotely(spec.of_draft.device):
        return 0
    facts = read_facts(spec.draft)
    if spec.row_file is not None:
        return row_file_bytes(facts, _context_of_target(config, n_ctx))
    n_ctx = n_ctx or _DEFAULT_CTX
    n_cells = _llama_ctx(config, config.n_cells(n_ctx))
    context = _context_of_draft(
        config, spec, ContextOptions(n_ctx=n_cells, n_sequences=config.parallel)
    )
    by_llama = device_bytes(facts) + context_memory(facts, context).total_bytes
    may_be_torch = spec.of_draft.engine is not DraftEngine.LLAMA
    if not may_be_torch or missing_torch("gpu-draft"):
        return by_llama
    try:
        return max(by_llama, _torch_bytes(config, spec, facts, config.n_ctx_each(n_ctx)))
    except BadModel:
        return by_llama


def _context_of_target(config: Config, n_ctx: int | None) -> ContextOptions:
    return ContextOptions(
        n_ctx=n_ctx or target_facts(config).n_ctx_train,
        n_ubatch=config.ubatch_size or DEFAULT_UBATCH,
        n_sequences=config.parallel,
        flash_attn=config.flash_attn,
        type_k=config.type_k,
        type_v=config.type_v or "f16",
    )


def _torch_bytes(config: Config, spec: SpecConfig, facts: ModelFacts, n_ctx: int) -> int:
    shape = read_shape(facts)
    samples = spec.options.accept is AcceptRule.REJECT
    options = TorchDraftOptions(
        n_ctx=n_ctx or shape.n_ctx_train,
        n_sequences=config.parallel,
        samples=samples,
    )
    return lay_out(shape, options).total_bytes


def _llama_ctx(config: Config, n_ctx: int) -> int:
    """KV cells of libllama's draft context: the target's, plus those for other requests' drafts."""
    return n_ctx + MOST_DRAFTED * (config.parallel - 1)


def _context_of_draft(config: Config, spec: SpecConfig, context: ContextOptions) -> ContextOptions:
    """The options of the draft's context, from those of the target's."""
    context = replace(
        context,
        n_ubatch=min(config.ubatch_size or _DRAFT_UBATCH, _DRAFT_UBATCH),
        n_rs_seq=0,  # no snapshots, which decoding token by token cannot make
        type_k="f16",
        type_v="f16",
    )
    context = replace(context, **spec.draft_options)
    own = config.draft_threads
    if own is None:
        return context
    return replace(context, n_threads=own.n_decode, n_threads_batch=own.n_batch)


def open_draft(config: Config, spec: SpecConfig, target: Engine) -> OpenedDraft | None:
    """Open the draft model, all of it resident. Returns None if there is none.

    The engine is the one that `--draft-engine` names, else the faster one, or libllama if torch
    cannot compute the draft. Raises OffloadError, or UsageError if torch is asked for together with
    options that it lacks.
    """
    if spec.draft_model is None:
        return None
    opened = _opened(config, spec, spec.draft_model, target)
    notes = () if opened.choice is None else (opened.choice.words,)
    return replace(opened, notes=(*notes, *_unread_vocabulary(spec, opened.model)))


def _unread_vocabulary(spec: SpecConfig, model: DraftModel) -> tuple[str, ...]:
    """A line if libllama computes the draft and a pruned vocabulary was named for torch.

    With --draft-engine llama, the configuration has told this already.
    """
    of_draft = spec.of_draft
    is_asked = of_draft.vocab is not None and of_draft.engine is not DraftEngine.LLAMA
    if not (is_asked and isinstance(model, Engine)):
        return ()
    words = (
        "--draft-vocab ignored: libllama computes the draft, and always for its whole vocabulary "
        "(--draft-engine torch uses the list)"
    )
    return (Note(NoteKind.FLAGS, words),)


def _opened(config: Config, spec: SpecConfig, path: Path, target: Engine) -> OpenedDraft:
    engine = spec.of_draft.engine
    if engine is DraftEngine.LLAMA:
        return OpenedDraft(_open_llama(config, spec, path, target))
    if named_remotely(device := spec.of_draft.device):
        if engine is DraftEngine.TORCH:
            raise DeviceUnavailable(
                f"--draft-engine torch: torch cannot use {device}, a device of another machine; "
                "use --draft-engine llama"
            )
        return _llama_because(
            f"{device} is a device of another machine", config, spec, path, target
        )
    place = _place(spec, target)
    if engine is DraftEngine.AUTO and not place.on_gpu:
        return _llama_because("the draft is on no GPU", config, spec, path, target)
    try:
        options = _torch_options(config, spec, path, target, place)
        if engine is DraftEngine.TORCH:
            where = f"torch on {options.device}, {options.dtype}"
            return OpenedDraft(_open_torch(path, options), EngineChoice(where, "asked for"))
        return faster_engine(config, spec, path, target, options)
    except _NOT_IN_TORCH as e:
        if engine is DraftEngine.TORCH:
            raise
        return _llama_because(str(e), config, spec, path, target)


def _llama_because(
    reason: str, config: Config, spec: SpecConfig, path: Path, target: Engine
) -> OpenedDraft:
    return OpenedDraft(_open_llama(config, spec, path, target), EngineChoice("libllama", reason))


def _open_llama(config: Config, spec: SpecConfig, path: Path, target: Engine) -> Engine:
    place = target.start.draft_choice or target.start.choice
    facts = read_facts(path)
    # The draft's texts share its cells, even if each of the target's has its own.
    n_ctx = _llama_ctx(config, target.n_cells)
    context = replace(target.layout.context, n_ctx=n_ctx, kv_unified=True, most_each=0)
    if facts.recurrent_layers or forgetting_window(facts):
        context = replace(context, n_tree_leaves=0)
    device, remote = target.start.options.remote.of(
        spec.of_draft.device or (place.name if place.on_gpu else "cpu"), "--device-draft"
    )
    wanted = replace(
        target.start.options.wanted,
        context=_context_of_draft(config, spec, context),
        tensor_split=(),
        wrapped=False,
        stream_experts=False,
        mtp=False,
    )
    threads = config.threads_of_draft
    options = replace(
        target.start.options,
        device=device,
        remote=remote,
        wanted=replace(wanted, order=remote.order),
        projector=None,
        pooling=None,
        measure_layouts=None,  # a draft decodes more than it prefills, for which repacked is faster
        numa=threads.plan,
        decode_on=threads.decode_on,
        batch_on=threads.batch_on,
    )
    # The texts of all requests fit the target's context; the other cells are for drafted tokens.
    with spare_cells(target.n_cells, facts.n_ctx_train):
        return open_engine(path, options)


def _place(spec: SpecConfig, target: Engine) -> DeviceChoice:
    """Return the draft's device: the flag's, else the plan's choice, else the target's."""
    device = spec.of_draft.device
    if device is None:
        return target.start.draft_choice or target.start.choice
    return choose_device(device)


def _torch_options(
    config: Config, spec: SpecConfig, path: Path, target: Engine, place: DeviceChoice
) -> TorchDraftOptions:
    """The options of the draft in torch, which is not imported here.

    Raises DeviceUnavailable if torch is missing or does not support the device, and BadModel for
    a draft that it cannot compute.
    """
    of_draft = spec.of_draft
    device = torch_name(place.name, on_gpu=place.on_gpu)
    facts = read_facts(path)
    n_ctx_train = read_shape(facts).n_ctx_train
    n_ctx = target.n_ctx if of_draft.ctx_size is None else of_draft.ctx_size
    return TorchDraftOptions(
        device=device,
        n_ctx=n_ctx or n_ctx_train,
        n_sequences=target.layout.context.n_sequences,
        n_vocab=target.n_vocab if spec.options.replacements is None else 0,
        kept=() if of_draft.vocab is None else read_kept(of_draft.vocab),
        samples=spec.options.accept is AcceptRule.REJECT,
        graphs=of_draft.graphs,
        n_threads=of_draft.threads or config.threads,
    )


def _open_torch(path: Path, options: TorchDraftOptions) -> DraftModel:
    check_device(options.device)
    from offload.torch_draft.draft import TorchEngine

    return TorchEngine(path, options)


def faster_engine(
    config: Config, spec: SpecConfig, path: Path, target: Engine, options: TorchDraftOptions
) -> OpenedDraft:
    """Open the draft model in the faster engine, by measurements of this start and of others."""
    if spec.kept_folder is None:
        reason = (
            "nothing is measured without a profile; --draft-engine torch takes torch unmeasured"
        )
        return _llama_because(reason, config, spec, path, target)

    openers: Openers = {
        TORCH: lambda: _open_torch(path, options),
        LIBLLAMA: lambda: _open_llama(config, spec, path, target),
    }
    key = f"{model_hash(read_facts(path))} {options.device}: {_settings(options, target)}"
    choice = measured_choice(KeptFile(spec.kept_folder, target.facts), key, openers)
    return OpenedDraft(openers[choice.name](), choice)


def _settings(options: TorchDraftOptions, target: Engine) -> str:
    """All settings that a token's time depends on, as one text. Excludes the file and device."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "none"
    n_threads = target.layout.context.n_threads
    return (
        f"context {options.n_ctx}, {options.dtype}, {len(options.kept)} tokens kept, "
        f"samples {options.samples}, graphs {options.graphs}, {n_threads} threads, "
        f"{library_build()}, torch {torch}"
    )


# -- devices of torch

_LEAST_VERSION = (2, 8)  # products of bf16 with a result in f32 on CUDA (pytorch #150812)


def torch_name(ggml_device: str, *, on_gpu: bool) -> str:
    """Return torch's name of one of ggml's devices: "cpu", or "cuda:N". Does not import torch.

    Raises DeviceUnavailable if torch is not installed, or has no devices of that kind.
    """
    if reason := missing_torch("gpu-draft"):
        raise DeviceUnavailable(f"the draft cannot be computed in torch: {reason}")
    if not on_gpu:
        return "cpu"
    name, number = backend_of(ggml_device).torch, number_of(ggml_device)
    if not name or number is None:
        raise DeviceUnavailable(f"torch has no device {ggml_device}; it knows CUDA and ROCm")
    return f"{name}:{number}"


def check_device(name: str) -> None:
    """Import torch, and check that it can use the device `name`.

    Raises DeviceUnavailable if the import fails, or if torch is too old for the device or does not
    have it.
    """
    try:
        torch: Any = importlib.import_module("torch")
    # torch loads CUDA's libraries itself. A library that does not fit those that ggml has loaded
    # raises OSError, ImportError or ValueError, depending on torch's version and on the library.
    except Exception as e:
        reason = str(e).partition("\n")[0] or type(e).__name__
        raise DeviceUnavailable(
            f"torch is installed and cannot be imported: {reason}; install a torch for the same "
            "CUDA version as libllama's, or pass --draft-engine llama"
        ) from e
    if name == "cpu":
        return
    version = str(torch.__version__)
    if not torch.cuda.is_available():
        raise DeviceUnavailable(f"torch {version} finds no CUDA device; install its CUDA build")
    if tuple(int(n) for n in re.findall(r"\d+", version)[:2]) < _LEAST_VERSION:
        raise DeviceUnavailable(f"the torch draft needs torch 2.8 on CUDA, this is {version}")
    index, n_devices = int(name.removeprefix("cuda:")), torch.cuda.device_count()
    if index >= n_devices:
        raise DeviceUnavailable(f"torch has {n_devices} CUDA devices, and no number {index}")
