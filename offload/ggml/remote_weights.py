"""A buffer type for weights that only a worker holds. The client has their names and no data.

ggml's scheduler gives products with such weights to the worker's device. ggml's RPC client then
sends the weights' names and shapes with the graph. It sends no address, because the memory is not
its own (`serialize_tensor` in ggml-rpc.cpp). The worker puts its own tensors in their place.
"""

from __future__ import annotations

from offload.errors import DeviceFailed
from offload.ggml.backend import Device
from offload.ggml.hostbuffer import HostBufferType
from offload.ggml.library import abi
from offload.ggml.library.callback import Pending
from offload.ggml.memory import HostRange, ReservedAddresses


class _Nowhere:
    """Leaves tensors without memory, so that what libllama writes to them is dropped."""

    def place(self, name: str, size_bytes: int) -> HostRange:
        raise AssertionError(name)

    def is_filling(self) -> bool:
        return True


class RemoteWeights(HostBufferType):
    """The buffer type for the weights of `device`, a worker's device. Pass it when loading a model.

    Call `loaded` after loading.
    """

    def __init__(self, name: str, device: Device, pending: Pending) -> None:
        super().__init__(name, ReservedAddresses(), pending, home=_Nowhere())
        self._device = device
        for struct in self._structs:
            struct.iface.is_host = None  # otherwise the CPU's backend would take the weights

    def _on_init_tensor(self, _: int, address: int) -> int:
        return int(abi.GGML_STATUS_SUCCESS)  # libllama's addresses are reserved, never read

    def loaded(self) -> None:
        """Let the device take products with these weights. Call it before contexts are opened."""
        if not self.pass_for(self._device):
            raise DeviceFailed(f"{self._device.name} does not take a worker's weights")
        self.offer(experts=True, dense=True)
