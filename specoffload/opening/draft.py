"""Opens the draft model in libllama or torch, and estimates the device memory that it needs.

The caller closes the returned model. If opening fails, no model stays open.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
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
from offload.plan.row_draft import eagle_bytes
from offload.plan.weights import device_bytes
from offload.remote.address import named_remotely
from offload.times.context import (
    DEFAULT_UBATCH,
    ContextOptions,
    context_memory,
    forgetting_window,
)
from offload.torch_draft.plan import TorchDraftOptions, lay_out, read_shape
from specdec.options import MOST_DRAFTED, AcceptRule
from specoffload.config.options import DraftEngine
from specoffload.config.resolution import Config
from specoffload.kept import Kept, KeptFile
from specoffload.opening.draft_model import (
    DraftModel,
    check_same_vocabulary,
    measure_step,
    read_kept,
    real_text,
)

_DEFAULT_CTX = 4096  # assumed context in tokens before the draft model is open
# Largest ubatch of a draft model in tokens, unless a flag sets the draft's. A larger ubatch saves
# copies of streamed weights. It would only take memory here, since the weights are resident.
_DRAFT_UBATCH = 512
# Errors after which the draft is computed in libllama instead of torch.
_NOT_IN_TORCH = (BadModel, DoesNotFit, DeviceUnavailable, DeviceFailed)


@dataclass(frozen=True)
class EngineChoice:
    """The engine that computes the draft model, and the reason for it."""

    name: str
    why: str

    @property
    def words(self) -> str:
        return f"draft engine: {self.name} ({self.why})"


@dataclass(frozen=True)
class OpenedDraft:
    """The draft model, the choice of its engine unless a flag names it, and start-up lines."""

    model: DraftModel
    choice: EngineChoice | None = None
    notes: tuple[str, ...] = ()


def draft_bytes(config: Config) -> int:
    """Bytes of device memory for the weights and context of the draft model or EAGLE-3 file, or 0.

    Returns the larger number if both engines may be chosen.
    """
    if config.draft is None or named_remotely(config.spec.of_draft.device):
        return 0
    facts = read_facts(config.draft)
    if config.eagle is not None:
        return eagle_bytes(facts, _context_of_target(config))
    n_ctx = config.ctx_size or _DEFAULT_CTX
    context = _context_of_draft(
        config, ContextOptions(n_ctx=_llama_ctx(config, n_ctx), n_sequences=config.parallel)
    )
    by_llama = device_bytes(facts) + context_memory(facts, context).total_bytes
    may_be_torch = config.spec.of_draft.engine is not DraftEngine.LLAMA
    if not may_be_torch or importlib.util.find_spec("torch") is None:
        return by_llama
    try:
        return max(by_llama, _torch_bytes(config, facts, n_ctx))
    except BadModel:
        return by_llama


def _context_of_target(config: Config) -> ContextOptions:
    return ContextOptions(
        n_ctx=config.ctx_size or read_facts(config.model).n_ctx_train,
        n_ubatch=config.ubatch_size or DEFAULT_UBATCH,
        n_sequences=config.parallel,
        flash_attn=config.flash_attn,
        type_k=config.type_k,
        type_v=config.type_v or "f16",
    )


def _torch_bytes(config: Config, facts: ModelFacts, n_ctx: int) -> int:
    shape = read_shape(facts)
    samples = config.spec.options.accept is AcceptRule.REJECT
    options = TorchDraftOptions(
        n_ctx=n_ctx or shape.n_ctx_train,
        n_sequences=config.parallel,
        samples=samples,
    )
    return lay_out(shape, options).total_bytes


def _llama_ctx(config: Config, n_ctx: int) -> int:
    """KV cells of libllama's draft context: the target's, plus those for other requests' drafts."""
    return n_ctx + MOST_DRAFTED * (config.parallel - 1)


def _context_of_draft(config: Config, context: ContextOptions) -> ContextOptions:
    """The options of the draft's context, from those of the target's."""
    context = replace(
        context,
        n_ubatch=min(config.ubatch_size or _DRAFT_UBATCH, _DRAFT_UBATCH),
        n_rs_seq=0,  # no snapshots, which decoding token by token cannot make
        type_k="f16",
        type_v="f16",
    )
    return replace(context, **config.spec.draft_options)


def open_draft(config: Config, target: Engine) -> OpenedDraft | None:
    """Open the draft model, all of it resident. Returns None if there is none.

    The engine is the one that `--draft-engine` names, else the faster one, or libllama if torch
    cannot compute the draft. Raises OffloadError, UsageError if torch is asked for together with
    options that it lacks, or VocabularyMismatch for a draft of another family.
    """
    if config.draft is None or config.eagle is not None:
        return None
    opened = _opened(config, config.draft, target)
    said = () if opened.choice is None else (opened.choice.words,)
    opened = replace(opened, notes=(*said, *_unread_vocabulary(config, opened.model)))
    try:
        if config.spec.options.replacements is None:
            check_same_vocabulary(target, opened.model)
    except BaseException:
        opened.model.close()
        raise
    return opened


def _unread_vocabulary(config: Config, model: DraftModel) -> tuple[str, ...]:
    """A line if libllama computes the draft and a pruned vocabulary was named for torch.

    With --draft-engine llama, the configuration has told this already.
    """
    of_draft = config.spec.of_draft
    is_asked = of_draft.vocab is not None and of_draft.engine is not DraftEngine.LLAMA
    if not (is_asked and isinstance(model, Engine)):
        return ()
    return (
        "--draft-vocab: no effect, since libllama computes the draft, and always for its whole "
        "vocabulary",
    )


def _opened(config: Config, path: Path, target: Engine) -> OpenedDraft:
    engine = config.spec.of_draft.engine
    if engine is DraftEngine.LLAMA:
        return OpenedDraft(_open_llama(config, path, target))
    if named_remotely(device := config.spec.of_draft.device):
        if engine is DraftEngine.TORCH:
            raise DeviceUnavailable(
                f"--draft-engine torch: torch cannot use {device}, a device of another machine; "
                "use --draft-engine llama"
            )
        return _llama_because(f"{device} is a device of another machine", config, path, target)
    place = _place(config, target)
    if engine is DraftEngine.AUTO and not place.on_gpu:
        return _llama_because("the draft is on no GPU", config, path, target)
    try:
        options = _torch_options(config, path, target, place)
        if engine is DraftEngine.TORCH:
            where = f"torch on {options.device}, {options.dtype}"
            return OpenedDraft(_open_torch(path, options), EngineChoice(where, "asked for"))
        return faster_engine(config, path, target, options)
    except _NOT_IN_TORCH as e:
        if engine is DraftEngine.TORCH:
            raise
        return _llama_because(str(e), config, path, target)


def _llama_because(why: str, config: Config, path: Path, target: Engine) -> OpenedDraft:
    return OpenedDraft(_open_llama(config, path, target), EngineChoice("libllama", why))


def _open_llama(config: Config, path: Path, target: Engine) -> Engine:
    spec, place = config.spec, target.draft_choice or target.choice
    facts = read_facts(path)
    context = replace(target.layout.context, n_ctx=_llama_ctx(config, target.n_ctx))
    if facts.recurrent_layers or forgetting_window(facts):
        context = replace(context, n_tree_leaves=0)
    device, remote = target.options.remote.of(
        spec.of_draft.device or (place.name if place.on_gpu else "cpu"), "--device-draft"
    )
    wanted = replace(
        target.options.wanted,
        context=_context_of_draft(config, context),
        tensor_split=(),
        wrapped=False,
        stream_experts=False,
        mtp=False,
    )
    options = replace(
        target.options,
        device=device,
        remote=remote,
        wanted=replace(wanted, order=remote.order),
        projector=None,
        pooling=None,
        measure_layouts=None,  # a draft decodes more than it prefills, for which repacked is faster
        # Threads are not bound if the user set the draft's number of threads.
        numa=None
        if config.numa is None or "n_threads" in spec.draft_options
        else config.numa.for_draft(),
    )
    # The texts of all requests fit the target's context; the other cells are for drafted tokens.
    with spare_cells(target.n_ctx, facts.n_ctx_train):
        return open_engine(path, options)


def _place(config: Config, target: Engine) -> DeviceChoice:
    """Return the draft's device: the flag's, else the plan's choice, else the target's."""
    device = config.spec.of_draft.device
    if device is None:
        return target.draft_choice or target.choice
    return choose_device(device)


def _torch_options(
    config: Config, path: Path, target: Engine, place: DeviceChoice
) -> TorchDraftOptions:
    """The options of the draft in torch, which is not imported here.

    Raises DeviceUnavailable if torch is missing or does not support the device, and BadModel for
    a draft that it cannot compute.
    """
    spec = config.spec
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
    config: Config, path: Path, target: Engine, options: TorchDraftOptions
) -> OpenedDraft:
    """Open the draft model in the faster engine, by a kept measurement or a new one."""
    if config.spec.kept_folder is None:
        why = "nothing is measured without a profile; --draft-engine torch takes torch unmeasured"
        return _llama_because(why, config, path, target)
    file = KeptFile(config.spec.kept_folder, target.facts)
    key = f"{model_hash(read_facts(path))} {options.device}: {_settings(options, target)}"
    times_s, how = file.load()[0].engines.get(key, {}), "as measured before"
    if times_s.keys() != {"torch", "libllama"} or min(times_s.values()) <= 0.0:
        measured = times_s = _measured(config, path, target, options)

        def change(kept: Kept) -> None:
            kept.engines[key] = measured

        how = file.update(change) or "measured for the first time"
    faster = min(times_s, key=lambda name: times_s[name])
    words = (
        f"a token takes {times_s['torch'] * 1e3:.2f} ms in torch and "
        f"{times_s['libllama'] * 1e3:.2f} ms in libllama"
    )
    choice = EngineChoice(faster, f"{words}; {how}")
    if faster == "torch":
        return OpenedDraft(_open_torch(path, options), choice)
    return OpenedDraft(_open_llama(config, path, target), choice)


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


def _measured(
    config: Config, path: Path, target: Engine, options: TorchDraftOptions
) -> dict[str, float]:
    """Measure the seconds per token in each engine.

    Only one engine is open at a time, so that the device holds the draft model only once.
    """
    check_device(options.device)
    with _open_llama(config, path, target) as llama:
        text = real_text(llama)
        llama_s = measure_step(llama.sequences, text)
    with _open_torch(path, options) as torch:
        torch_s = measure_step(torch.sequences, text)
    return {"torch": torch_s, "libllama": llama_s}


# -- devices of torch

_LEAST_VERSION = (2, 8)  # products of bf16 with a result in f32 on CUDA (pytorch #150812)


def torch_name(ggml_device: str, *, on_gpu: bool) -> str:
    """Return torch's name of one of ggml's devices: "cpu", or "cuda:N". Does not import torch.

    Raises DeviceUnavailable if torch is not installed, or has no devices of that kind.
    """
    if importlib.util.find_spec("torch") is None:
        raise DeviceUnavailable(
            "the torch draft needs torch, which is not installed: pip install "
            "'specoffload[gpu-draft]'"
        )
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
