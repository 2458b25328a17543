"""Makes the functions that decode on an engine's contexts, with its threads and device.

`NativeExperts` reads the experts that libllama's own CPU backend is about to compute with
(`--device cpu`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import chain
from time import perf_counter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from offload.decode import SMALL_BATCH
from offload.ggml.context import Context
from offload.ggml.row_context import RowContext
from offload.images.mtmd import Projector
from offload.routing.next_experts import NextExperts, Rows
from offload.routing.routing import RoutingGuess, RoutingRecorder
from offload.sequences.row_draft import Step
from offload.sequences.sequences import Decode, DecodeImage
from offload.store.expert_memory import ExpertMemory
from offload.store.memory_budget import IN_DECODES
from offload.store.table_rows import TableRows
from offload.stream.device import StreamingDevice
from offload.threads.engine_threads import EngineThreads


class Decoding(Protocol):
    """A context, or what stands for one that decodes images."""

    def decode(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int] | Sequence[Sequence[int]],
        wanted: Sequence[bool],
    ) -> NDArray[np.float32]: ...


def decoder(
    context: Decoding,
    threads: EngineThreads | None,
    devices: Sequence[StreamingDevice],
    n_ubatch: int,
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

    def decode(
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int] | Sequence[Sequence[int]],
        wanted: Sequence[bool],
    ) -> NDArray[np.float32]:
        n_tokens = len(tokens)
        if tables is not None:
            tables.expect(tokens, positions, sequences)
        if experts is not None:
            experts.expect(n_tokens, 0 if embeds else sum(wanted))
        if native is not None:
            native.expect(tokens, n_ubatch)
        n_unwanted = unwanted_ubatches(wanted, sequences, n_ubatch)
        for device in devices:
            device.expect(tokens, n_ubatch, n_unwanted=n_unwanted)
        if len(devices) == 1:
            devices[0].start_prompt()
        if devices and devices[0].trace:
            devices[0].decoding(True)
        start_s = perf_counter()
        is_bound = threads is not None and threads.is_bound
        try:
            with (
                nullcontext() if experts is None else experts.taking(*IN_DECODES),
                threads.computing(n_tokens) if threads and is_bound else nullcontext(),
            ):
                rows = context.decode(tokens, positions, sequences, wanted)
        finally:
            for device in devices:
                device.expected()
            if devices and devices[0].trace:
                devices[0].decoding(False)
        if len(devices) > 1:
            for device in devices:
                device.is_idle = True in wanted  # logits were read, so all work is complete
        if threads is not None:
            threads.decoded(n_tokens, perf_counter() - start_s)
        if experts is not None:
            experts.check_files()
        return rows

    return decode


class _ImageContext:
    """Decodes the images of a projector in a context."""

    def __init__(self, projector: Projector, context: Context) -> None:
        self._projector, self._context = projector, context
        self.numbers: Sequence[int] = ()  # those of the image that is decoded next

    def decode(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int] | Sequence[Sequence[int]],
        wanted: Sequence[bool],
    ) -> NDArray[np.float32]:
        image, sequence = self._projector.image(self.numbers), sequences[0]
        assert isinstance(sequence, int)
        self._projector.decode(image, self._context, sequence, positions[0])
        return np.empty((0, self._context.n_vocab), np.float32)


def image_decoder(
    projector: Projector,
    context: Context,
    threads: EngineThreads,
    devices: Sequence[StreamingDevice],
    n_ubatch: int,
    native: NativeExperts | None,
    experts: ExpertMemory | None,
) -> DecodeImage:
    """Return the function that decodes images for `Sequences`.

    An image's rows use experts as a prompt's tokens do. It has no tokens, so 0 stands for each.
    """
    images = _ImageContext(projector, context)
    decode = decoder(images, threads, devices, n_ubatch, native, experts)

    def decode_image(numbers: Sequence[int], sequence: int, position: int) -> None:
        n = len(numbers)
        images.numbers = numbers
        decode([0] * n, range(position, position + n), [sequence] * n, [False] * n)

    return decode_image


def unwanted_ubatches(
    wanted: Sequence[bool],
    sequences: Sequence[int] | Sequence[Sequence[int]],
    n_ubatch: int,
) -> int:
    """Return the number of ubatches before the first one with a token whose logits are wanted.

    Returns 0 for a batch of several sequences, whose tokens libllama may compute in another order.
    """
    if len(wanted) <= n_ubatch or any(sequence != sequences[0] for sequence in sequences):
        return 0
    return next((i for i, is_wanted in enumerate(wanted) if is_wanted), len(wanted)) // n_ubatch


def row_step(
    context: RowContext, threads: EngineThreads, devices: Sequence[StreamingDevice]
) -> Step:
    """Return the decode function for drafts from rows, which calls `RowContext.step`."""

    def step(
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int],
        wanted: Sequence[bool],
        rows: NDArray[np.float32],
        *,
        taken: bool,
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        for device in devices:
            device.expect(tokens, len(tokens))
        try:
            with threads.computing(len(tokens)) if threads.is_bound else nullcontext():
                return context.step(tokens, positions, sequences, wanted, rows, taken=taken)
        finally:
            for device in devices:
                device.expected()

    return step


class NativeExperts:
    """Makes experts of small and large batches be in memory, and learns which ones they choose.

    While a layer is computed, experts that later layers are likely to use are read ahead.
    """

    def __init__(self, n_experts: int, recorder: RoutingRecorder | None) -> None:
        """While `recorder` is on, it records the experts of small batches."""
        self.memory: ExpertMemory | None = None  # set when the model has been loaded
        self.following: NextExperts | None = None  # set then, if experts are read ahead
        self._n_experts, self._recorder = n_experts, recorder
        self._guess = RoutingGuess()

    def expect(self, tokens: Sequence[int], n_ubatch: int) -> None:
        """Take the tokens of the next decode, which is computed in ubatches of `n_ubatch`."""
        if self.memory is not None:
            self.memory.expect_batch(min(len(tokens), n_ubatch))
        is_guessed = len(tokens) <= min(n_ubatch, SMALL_BATCH)
        self._guess.expect(tokens if is_guessed else ())
        if self.following is not None and self.memory is not None and is_guessed:
            layers = self.memory.layers
            self.following.read_ahead(layers, -1, self._guess, len(tokens), lambda: None)

    def need(self, layer: int, ids: NDArray[np.int32], rows: Callable[[], Rows | None]) -> None:
        """Return when the experts `ids` [n_tokens, n_used] of a layer are in memory.

        `rows` returns the rows [n_tokens, n_embd] that these experts multiply. Raises DeviceFailed
        and DoesNotFit as ExpertMemory.need does.
        """
        memory, following, (n_tokens, n_used) = self.memory, self.following, ids.shape
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
