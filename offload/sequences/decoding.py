"""Makes the functions that decode on an engine's contexts, with its threads and device.

`NativeExperts` reads the experts that libllama's own CPU backend is about to compute with
(`--device cpu`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import chain
from time import perf_counter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from offload.decode import SMALL_BATCH, Batch, Rows
from offload.ggml.context import Context
from offload.ggml.hostbuffer import OnDemand
from offload.ggml.row_context import RowContext
from offload.images.mtmd import Projector
from offload.routing.routing import RoutingGuess, RoutingRecorder
from offload.sequences.row_draft import RowStep
from offload.sequences.sequences import Decode, DecodeImage
from offload.store.expert_memory import ExpertMemory
from offload.store.memory_budget import IN_DECODES
from offload.store.table_rows import TableRows
from offload.stream.device import StreamingDevice
from offload.threads.engine_threads import EngineThreads


class BatchDecoder(Protocol):
    """A context, or what stands for one that decodes images."""

    def decode(self, asked: Batch) -> NDArray[np.float32]: ...


def on_devices(devices: Sequence[StreamingDevice], batch: Batch) -> AbstractContextManager[None]:
    """Return a context in which the devices compute their parts of the decode of `batch`."""
    if len(devices) == 1:
        return devices[0].decode(batch)
    return _on_several(devices, batch) if devices else nullcontext()


@contextmanager
def _on_several(devices: Sequence[StreamingDevice], batch: Batch) -> Iterator[None]:
    with ExitStack() as stack:
        for device in devices:
            stack.enter_context(device.decode(batch))
        yield


def decoder(
    context: BatchDecoder,
    threads: EngineThreads | None,
    devices: Sequence[StreamingDevice],
    native: NativeExperts | None = None,
    experts: ExpertMemory | None = None,
    tables: TableRows | None = None,
    *,
    embeds: bool = False,
) -> Decode:
    """Return the decode function for `Sequences`. It raises the errors of `Context.decode`.

    `experts`: memory for some of the experts, None if all are in memory. `tables`: tables on the
    disk whose rows are read ahead. `embeds`: tokens are a text to embed, so they use experts as a
    prompt does, though all their rows are wanted.
    """

    def decode(batch: Batch) -> NDArray[np.float32]:
        if tables is not None:
            tables.expect(batch.tokens, batch.positions, batch.sequences)
        if experts is not None:
            experts.expect(batch.n_tokens, 0 if embeds else sum(batch.wanted))
        if native is not None:
            native.expect(batch)
        is_bound = threads is not None and threads.is_bound
        with on_devices(devices, batch):
            start_s = perf_counter()
            with (
                nullcontext() if experts is None else experts.taking(*IN_DECODES),
                threads.computing(batch.n_tokens) if threads and is_bound else nullcontext(),
            ):
                rows = context.decode(batch)
            took_s = perf_counter() - start_s
        if threads is not None:
            threads.decoded(batch.n_tokens, took_s)
        if experts is not None:
            experts.check_files()
        return rows

    return decode


class _ImageContext:
    """Decodes the images of a projector in a context."""

    def __init__(self, projector: Projector, context: Context) -> None:
        self._projector, self._context = projector, context
        self.numbers: Sequence[int] = ()  # those of the image that is decoded next

    def decode(self, asked: Batch) -> NDArray[np.float32]:
        image, sequence = self._projector.image(self.numbers), asked.sequences[0]
        assert isinstance(sequence, int)
        self._projector.decode(image, self._context, sequence, asked.positions[0])
        return np.empty((0, self._context.n_vocab), np.float32)


def image_decoder(
    projector: Projector,
    context: Context,
    threads: EngineThreads,
    devices: Sequence[StreamingDevice],
    native: NativeExperts | None,
    experts: ExpertMemory | None,
) -> DecodeImage:
    """Return the function that decodes images for `Sequences`.

    An image's rows use experts as a prompt's tokens do. It has no tokens, so 0 stands for each.
    """
    images = _ImageContext(projector, context)
    decode = decoder(images, threads, devices, native, experts)

    def decode_image(numbers: Sequence[int], sequence: int, position: int) -> None:
        n = len(numbers)
        images.numbers = numbers
        positions = range(position, position + n)
        decode(Batch([0] * n, positions, [sequence] * n, [False] * n, context.n_ubatch))

    return decode_image


def row_step(
    context: RowContext, threads: EngineThreads, devices: Sequence[StreamingDevice]
) -> RowStep:
    """Return the decode function for drafts from rows, which calls `RowContext.step`."""

    def step(
        batch: Batch, rows: NDArray[np.float32], *, taken: bool
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        with (
            on_devices(devices, batch),
            threads.computing(batch.n_tokens) if threads.is_bound else nullcontext(),
        ):
            return context.step(batch, rows, taken=taken)

    return step


class NativeExperts:
    """Makes experts of small and large batches be in memory, and learns which ones they choose.

    While a layer is computed, experts that later layers are likely to use are read ahead.
    """

    def __init__(
        self, on_demand: OnDemand, n_experts: int, recorder: RoutingRecorder | None
    ) -> None:
        """While `recorder` is on, it records the experts of small batches."""
        self._on_demand, self._n_experts, self._recorder = on_demand, n_experts, recorder
        self._guess = RoutingGuess()

    def expect(self, batch: Batch) -> None:
        """Take the batch of the next decode."""
        memory, following = self._on_demand.experts, self._on_demand.next_experts
        if memory is not None:
            memory.expect_batch(batch.n_at_once)
        self._guess.expect(batch.small_tokens)
        if following is not None and memory is not None and batch.small_tokens:
            following.read_ahead(memory.layers, -1, self._guess, batch.n_tokens, lambda: None)

    def need(self, layer: int, ids: NDArray[np.int32], rows: Callable[[], Rows | None]) -> None:
        """Return when the experts `ids` [n_tokens, n_used] of a layer are in memory.

        `rows` returns the rows [n_tokens, n_embd] that these experts multiply. Raises DeviceFailed
        and DoesNotFit as ExpertMemory.need does.
        """
        memory, following = self._on_demand.experts, self._on_demand.next_experts
        n_tokens, n_used = ids.shape
        assert memory is not None
        used = np.unique(ids).tolist()
        memory.decided(layer, used)
        groups = memory.begin(layer, used)
        if 0 < n_tokens <= SMALL_BATCH:
            if self._recorder is not None and self._recorder.is_on:
                self._recorder.layer(layer, n_used).add(ids)
            if following is not None and layer in memory.layers:
                self._guess.observe(layer, np.bincount(ids.ravel(), minlength=self._n_experts), ids)
                following.judge(layer, used)
                at = memory.layers.index(layer)
                following.read_ahead(memory.layers, at, self._guess, n_tokens, rows)
        memory.wait(layer, chain.from_iterable(groups))
