"""Helpers of the torch draft's tests: an exact libllama, models with all kinds of weights, and a
graph that is replayed on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lab.synth import write_preset
from offload.decode import Batch
from offload.ggml.context import Context
from offload.ggml.library.callback import Pending
from offload.ggml.model import Model, ModelPlacement
from offload.model_file import read_facts
from offload.times.context_memory import ContextOptions
from offload.torch_draft.steps import Eager

PRESETS = {"llama": "llama-3.3-70b", "qwen2": "qwen2.5-0.5b", "qwen3": "qwen3-0.6b"}


class ExactLlama:
    """libllama on the CPU with one sequence and an f32 KV cache. It rounds nothing if the file is
    f32."""

    def __init__(self, path: Path, n_ctx: int = 512) -> None:
        pending = Pending()
        self._model = Model(path, ModelPlacement(), pending)
        options = ContextOptions(n_ctx, type_k="f32", type_v="f32", flash_attn="off")
        self._context = Context(self._model, options, pending)
        self.n_vocab = self._model.n_vocab
        self._length = 0

    def probabilities(self, tokens: Sequence[int]) -> NDArray[np.float64]:
        """Append `tokens`, and return the probabilities [n_vocab] after them."""
        n = len(tokens)
        positions = range(self._length, self._length + n)
        wanted = [i == n - 1 for i in range(n)]
        logits = self._context.decode(Batch(tokens, positions, [0] * n, wanted, n))[0].astype(
            np.float64
        )
        self._length += n
        p = np.exp(logits - logits.max())
        return np.asarray(p / p.sum(), np.float64)

    def clear(self) -> None:
        self._context.remove(0, 0)
        self._length = 0

    def close(self) -> None:
        self._context.close()
        self._model.close()


@contextmanager
def exact_llama(path: Path) -> Iterator[ExactLlama]:
    llama = ExactLlama(path)
    try:
        yield llama
    finally:
        llama.close()


def write_synth(architecture: str, path: Path, quant: str, **more: Any) -> Path:
    """A tiny random model whose norms, biases and rope factors differ from value to value."""
    write_preset(PRESETS[architecture], path, quant=quant, seed=5, **more)
    rng = np.random.default_rng(8)
    for name, place in sorted(read_facts(path).weights.items()):
        entry = place.entry
        if len(entry.shape) != 1:
            continue
        values = np.memmap(path, np.float32, "r+", entry.offset_bytes, entry.shape)
        if "rope_freqs" in name:
            values[:] = rng.uniform(1.0, 8.0, entry.shape)
        elif name.endswith(".bias"):
            values[:] = rng.normal(0.0, 0.3, entry.shape)
        else:
            values *= rng.uniform(0.6, 1.4, entry.shape).astype(np.float32)
        values.flush()
    return path


class RecordedGraph(TorchDispatchMode):
    """The operations of one step with the tensors that they used, as a CUDA graph records them.

    Replaying repeats the operations on the same memory, without the step's Python code.
    """

    # Operations that read a number from the device, or whose shape depends on one.
    forbidden = ("_local_scalar_dense", "item", "nonzero", "masked_select", "equal", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[torch.Tensor]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.forbidden, f"{name} cannot be captured"
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, tensors_of(out)))
        return out

    def replay(self) -> None:
        for func, args, kwargs, outs in self.calls:
            new = tensors_of(func(*args, **kwargs))
            for old, now in zip(outs, new, strict=True):
                if old.data_ptr() != now.data_ptr():  # neither a view nor an in-place result
                    old.copy_(now)

    @property
    def outside(self) -> set[int]:
        """Addresses of storages that the step uses but did not make."""
        made: set[int] = set()
        found: set[int] = set()
        for _, args, kwargs, outs in self.calls:
            given = {storage(t) for t in tensors_of((args, kwargs))}
            found |= given - made
            made |= {storage(t) for t in outs} - given
        return found


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for part in value for tensor in tensors_of(part)]


def storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


class RecordingCapturer(Eager):
    """Captures as CUDA does: runs the step to warm up, then records it for replay."""

    captures = True

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.graphs: list[RecordedGraph] = []

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        for _ in range(3):
            step()
        graph = RecordedGraph()
        with graph:
            step()
        self.graphs.append(graph)
        return graph.replay

    def close(self) -> None:
        self.graphs.clear()


class LiveBytes(TorchDispatchMode):
    """Counts bytes that operations allocate. `most` is the largest number alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {storage(t) for t in tensors_of((args, kwargs or {}))}
        for tensor in tensors_of(out):
            held = tensor.untyped_storage()
            if held.data_ptr() not in given:
                self._live[held.data_ptr()] = (StorageWeakRef(held), held.nbytes())
        self._live = {k: v for k, v in self._live.items() if not v[0].expired()}
        self.most = max(self.most, sum(n for _, n in self._live.values()))
        return out
