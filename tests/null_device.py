"""A minimal device: it accepts every graph and computes nothing."""

from __future__ import annotations

from offload.device import choose_device
from offload.ggml.graph import Graph, Product
from offload.ggml.hostbuffer import HostBufferType
from offload.ggml.library.callback import Pending
from offload.ggml.pydevice import PyDevice, WrappedStream


class NullDevice(PyDevice):
    """Records its calls, and uses the CPU's memory. Logits are whatever the memory holds."""

    def __init__(self, pending: Pending, host: HostBufferType | None = None) -> None:
        super().__init__(choose_device("sim").device, "NULL0", pending, host)
        self.computed: list[tuple[int, int]] = []  # uid and number of nodes of each graph
        self.asked: list[str] = []  # names of weights whose products libllama offered
        self.n_open = 0

    def takes(self, product: Product) -> bool:
        self.asked.append(product.weight.name)
        return True

    def compute(self, stream: WrappedStream, graph: Graph) -> int:
        self.computed.append((graph.uid, graph.n_nodes))
        return 0

    def opened(self, stream: WrappedStream) -> None:
        self.n_open += 1

    def closed(self, stream: WrappedStream) -> None:
        self.n_open -= 1
