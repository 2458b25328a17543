"""The weights of a worker's layers, read from the worker's own file.

A client sends graphs whose weights have a name and no data. `NamedWeights` holds tensors with that
data, and puts them into the graphs. Streamed weights lie in the store, all others on the device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack

import numpy as np

from offload.errors import BadModel
from offload.ggml.backend import Device, copy_now
from offload.ggml.graph import Graph
from offload.ggml.hostbuffer import HostBufferType
from offload.ggml.library.callback import Pending
from offload.ggml.memory import AnonymousMemory
from offload.ggml.node_table import NodeTable, TensorForm
from offload.ggml.tensor import Buffer, Tensor, host_bytes, new_tensor
from offload.model import ModelFacts, TensorEntry, WeightPlace, layer_of
from offload.notes import OnProgress
from offload.plan.placement import Plan
from offload.regular_file import open_regular
from offload.store.store import READING, Store
from offload.worker.graph_check import IdRange, check_graph
from offload.worker.ids import drop_hints

_PADDING_BYTES = 4096  # kernels read past a row's end; also the alignment of tensors
_CHUNK_BYTES = 16 << 20


class NamedWeights:
    """Holds the worker's weights as tensors, by name. Close it after the last graph."""

    def __init__(
        self, facts: ModelFacts, plan: Plan, device: Device, host: HostBufferType, store: Store
    ) -> None:
        """`facts`: the header with only the weights to hold. `store` is the placer of `host`."""
        self._facts, self._device, self.host, self._store = facts, device, host, store
        self._streamed = {entry.name: entry for entry in plan.streamed}
        self._tensors: dict[str, Tensor] = {}
        self._forms: dict[str, TensorForm] = {}
        self._closing = ExitStack()

    def load(self, pending: Pending, on_progress: OnProgress = lambda *_: None) -> None:
        """Read all weights. Raises BadModel or DoesNotFit."""
        with self._store.loading(pending):
            made = {name: _tensor(entry) for name, entry in self._streamed.items()}
            if made:
                self._closing.callback(self.host.hold(made))
                pending.raise_first()
            self._tensors |= made
            self._store.start_reading()
            self._fill_device(on_progress)
        self._store.finish(on_progress)
        self._forms = {name: TensorForm.of(tensor) for name, tensor in self._tensors.items()}

    def _fill_device(self, on_progress: OnProgress) -> None:
        """Copy the weights that do not stream to device memory, one buffer for each layer."""
        layers: dict[int, list[WeightPlace]] = defaultdict(list)
        for name, place in self._facts.weights.items():
            if name not in self._streamed:
                layers[layer_of(name)].append(place)
        for n_done, (layer, places) in enumerate(sorted(layers.items())):
            on_progress(READING, n_done / len(layers))
            sizes = [_padded(place.entry.size_bytes) for place in places]
            what = f"layer {layer}'s weights" if layer >= 0 else "the model's head"
            buffer = Buffer(self._device.buffer_type, sum(sizes), what)
            self._closing.callback(buffer.close)
            offset = 0
            for place, size in zip(places, sizes, strict=True):
                tensor = _tensor(place.entry, (buffer, offset))
                _copied(place, tensor)
                self._tensors[place.entry.name] = tensor
                offset += size

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The weights by name."""
        return self._tensors

    def put_into(self, graph: Graph) -> tuple[IdRange, ...]:
        """Put our weights in place of the graph's tensors that have the same name and no data.

        Returns the numbers that have to be checked before each computation.

        Raises GraphRefused, and changes nothing, if the graph could write to a weight or to other
        memory than the client's, or reads a weight that is not ours.
        """
        table = NodeTable(graph)
        rows, ids = check_graph(table, self._forms, self._streamed)
        weights = {row: self._tensors[name] for row, name in rows.items()}
        at = table.addresses.tolist()
        views = np.flatnonzero(np.isin(table.root, list(rows))).tolist()
        graph.name_weights(
            {at[row]: weight for row, weight in weights.items()},
            {at[view]: weights[int(table.root[view])] for view in views},
        )
        drop_hints(table)
        return ids

    def close(self) -> None:
        self._tensors.clear()
        self._closing.close()


def _tensor(entry: TensorEntry, at: tuple[Buffer, int] | None = None) -> Tensor:
    a, b, c, d = (*entry.shape, 1, 1, 1, 1)[:4]
    made = new_tensor(entry.type, (a, b, c, d), at, name=entry.name)
    if made.size_bytes != entry.size_bytes:
        raise BadModel(f"tensor {entry.name} has {entry.size_bytes} bytes in the file, which "
                       f"the library counts as {made.size_bytes}")  # fmt: skip
    return made


def _padded(size_bytes: int) -> int:
    return (size_bytes // _PADDING_BYTES + 2) * _PADDING_BYTES


def _copied(place: WeightPlace, tensor: Tensor) -> None:
    """Read a weight from its file into device memory."""
    size_bytes = place.entry.size_bytes
    anonymous = AnonymousMemory()
    memory = anonymous.allocate(min(_CHUNK_BYTES, size_bytes))
    try:
        with open_regular(place.file) as file:
            file.seek(place.entry.offset_bytes)
            for start in range(0, size_bytes, _CHUNK_BYTES):
                n = min(_CHUNK_BYTES, size_bytes - start)
                if file.readinto(memory.part(0, n).array().data) != n:
                    raise BadModel(f"{place.file}: ends inside tensor {place.entry.name}")
                copy_now(tensor, start, host_bytes(memory), 0, n)
    finally:
        anonymous.free(memory)
