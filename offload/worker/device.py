"""The device that a worker offers to its client: it computes the worker's layers.

The client's ggml sends a graph once, and then tells the server to compute it again. A graph arrives
without a uid. `StreamingDevice` recognises a prepared graph by its uid, or by equal contents at the
same address. So this device gives each new graph a uid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from offload.device import DeviceChoice
from offload.errors import DeviceFailed, GraphRefused, NotSupported, OffloadError
from offload.ggml.graph import Graph
from offload.ggml.library import abi
from offload.ggml.pydevice import WrappedStream
from offload.ggml.threads import check
from offload.plan.placement import Plan
from offload.stream.device import BatchRules, MakeExecutor, StreamingDevice
from offload.stream.split_measuring import SplitSides
from offload.worker.graph_check import IdRange
from offload.worker.ids import check_ids
from offload.worker.weights import NamedWeights


@dataclass(frozen=True)
class WorkerEvents:
    """Functions that a worker's device calls when something happens.

    `on_open` is called with each new stream, before a client can use it. `on_failure` gets the
    exception of a failure, and should end the process. If it returned, ggml's server would abort.
    `on_refusal` gets the reason why a graph is not computed, and should end the client's
    connection. The device goes on.
    """

    on_open: Callable[[WorkerDevice, WrappedStream], None]
    on_failure: Callable[[BaseException], None]
    on_refusal: Callable[[OffloadError], None]


class WorkerDevice(StreamingDevice):
    """Computes a client's graphs, which only name their weights, with this machine's weights."""

    def __init__(
        self,
        choice: DeviceChoice,
        plan: Plan,
        make_executor: MakeExecutor,
        rules: BatchRules,
        weights: NamedWeights,
        events: WorkerEvents,
    ) -> None:
        """`weights` streams its host memory through the slots of `plan`. See StreamingDevice."""
        super().__init__(choice, weights.host, plan, make_executor, rules)
        self._weights, self._events = weights, events
        self._ids: dict[Graph, tuple[IdRange, ...]] = {}

    def opened(self, stream: WrappedStream) -> None:
        super().opened(stream)
        try:
            self._events.on_open(self, stream)
        except BaseException as e:
            self._events.on_failure(e)
            raise

    def split_sides(self, stream: WrappedStream, graph: Graph) -> SplitSides | None:
        """Compute a graph of our own, and return the sides of its split layer if it has one.

        Raises NotSupported and DeviceFailed.
        """
        self._check(graph)
        executor = self.executors[stream]
        executor.take_split()  # forgets the split layer of an earlier graph
        check(super().compute(stream, graph), "measuring split layers")
        stream.inner.synchronize()
        return executor.take_split()

    @property
    def is_spent(self) -> bool:
        """True if the device has computed and must not compute for another client.

        ggml's server keeps its backend for all clients.
        """
        return self.n_graphs > 0 and self.inner.backend.serves_once

    def _check(self, graph: Graph) -> None:
        """Raise NotSupported if the device cannot compute a node.

        Clients do not ask for this before they send a graph.
        """
        for node in graph.nodes():
            if node.size_bytes and not self.inner.supports(node):
                remedy = "give this worker's layers to another device"
                if node.is_op("FLASH_ATTN_EXT"):
                    remedy = "start the client with --flash-attn off"
                raise NotSupported(
                    f"{self.choice.name} cannot compute {node.name} of the client's graph; {remedy}"
                )

    def compute(self, stream: WrappedStream, graph: Graph) -> int:
        try:
            if not self._admits(graph):
                return int(abi.GGML_STATUS_SUCCESS)  # ggml's server aborts on every other status
            status = super().compute(stream, graph)
            if status:
                self.pending.raise_first()
                raise DeviceFailed(f"the device failed to compute a graph (status {status})")
        except BaseException as e:
            self._events.on_failure(e)
            raise
        return status

    def _admits(self, graph: Graph) -> bool:
        """Put the weights into a new graph, and check its data. Returns False if it is refused."""
        try:
            if not graph.uid:
                self._ids[graph] = self._weights.put_into(graph)
                self._check(graph)
            check_ids(self._ids[graph])
        except (GraphRefused, NotSupported) as e:
            graph.forget_uid()  # a command to compute it again is refused, too
            self._events.on_refusal(e)
            return False
        return True
