"""Connects to workers, and adds their devices to a model's placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from offload.device import DeviceChoice, choose_devices
from offload.errors import DeviceUnavailable, WorkerUnavailable
from offload.ggml import rpc
from offload.ggml.backend import Device
from offload.ggml.hostbuffer import CpuBufferType
from offload.ggml.llama import ModelPlacement
from offload.model import ModelFacts
from offload.plan.context import ContextOptions
from offload.plan.devices import layer_words
from offload.plan.ranges import LayerRange, shares_of
from offload.plan.remote import divide
from offload.remote.address import Address, RemoteOptions
from offload.remote.probe import greet
from offload.streaming.parts import free_for_layers

_HEAD = r"^(output|token_embd)\.weight$"  # a model without an output matrix uses its embeddings


@dataclass(frozen=True)
class RemotePart:
    """Remote devices with their layers, and the local devices with the others."""

    devices: tuple[Device, ...]
    layers: tuple[LayerRange, ...]
    local: tuple[tuple[DeviceChoice, LayerRange], ...]
    n_layers: int
    local_first: bool

    @property
    def has_head(self) -> bool:
        """True if the last remote device computes the output."""
        return self.layers[-1].end > self.n_layers

    @property
    def words(self) -> str:
        """The devices with their layers, for a start-up line and for kept settings."""
        places = [
            f"{device.name} ({device.description}) {layer_words(its, self.n_layers)}"
            for device, its in zip(self.devices, self.layers, strict=True)
        ]
        head = "there" if self.has_head else "here"
        return f"remote: {', '.join(places)}; the output is computed {head}"

    def added_to(self, placement: ModelPlacement, facts: ModelFacts) -> ModelPlacement:
        """Return the placement of the local layers with the remote devices added."""
        # libllama counts the output and the layers for multi-token prediction, too.
        n_all = facts.n_layers + facts.n_mtp_layers + 1
        # The plain CPU is no device to libllama, but gets the layers before the devices'.
        on_cpu = not self.local[0][0].wrapped
        local = [] if on_cpu else [layers for _, layers in self.local]
        if self.local_first:
            devices, ranges = (*placement.devices, *self.devices), [*local, *self.layers]
        else:
            devices, ranges = (*self.devices, *placement.devices), [*self.layers, *local]
        ranges[-1] = replace(ranges[-1], end=n_all)
        start = ranges[0].first
        shifted = [LayerRange(its.first - start, its.end - start) for its in ranges]
        placement = replace(placement, devices=devices, tensor_split=shares_of(shifted))
        if not on_cpu:
            return placement
        head = () if self.has_head else ((_HEAD, CpuBufferType()),)
        return replace(
            placement, n_gpu_layers=n_all - start, overrides=(*placement.overrides, *head)
        )


def open_remote(
    facts: ModelFacts,
    context: ContextOptions,
    options: RemoteOptions,
    device: str,
    *,
    shares: Sequence[float] = (),
    n_gpu_layers: int | None = None,
    local_bytes: int | None = None,
) -> RemotePart:
    """Connect to the workers, and choose the layers of all devices.

    `device` has the local devices. `local_bytes` is the limit of one, as by --vram. Raises
    LibraryMismatch, DeviceUnavailable with one sentence for a worker or a device that is not there,
    and DoesNotFit.
    """
    choices = choose_devices(device, all_gpus=len(shares) > 1)
    chosen = _chosen(connect(options.workers), options)
    on_cpu = not choices[0].wrapped
    local_first = on_cpu or options.order == "last"
    free_bytes = [] if on_cpu else [free_for_layers(choice) for choice in choices]
    if len(free_bytes) == 1 and local_bytes:
        free_bytes = [local_bytes]
    division = divide(
        facts,
        context,
        free_bytes,
        [device.memory_bytes()[0] for device in chosen],
        local_first=local_first,
        has_head=options.order in ("last", "only"),
        shares=shares,
        most_remote=n_gpu_layers,
    )
    local = [(c, its) for c, its in zip(choices, division.local, strict=True) if on_cpu or its]
    if not local or (not on_cpu and local[0][1].first >= facts.n_layers):
        raise DeviceUnavailable(
            f"--tensor-split leaves {choices[0].name} no layers; leave it out of --device"
        )
    used = [(d, its) for d, its in zip(chosen, division.remote, strict=True) if its]
    return RemotePart(
        devices=tuple(device for device, _ in used),
        layers=tuple(its for _, its in used),
        local=tuple(local),
        n_layers=facts.n_layers,
        local_first=local_first,
    )


def connect(workers: Sequence[Address]) -> list[Device]:
    """Return the devices of all workers, in their order. Raises LibraryMismatch, DeviceUnavailable.

    Each worker is greeted first, because ggml ends the process if one does not answer.
    """
    rpc.check_built()
    for worker in workers:
        major, minor, _ = version = greet(worker)
        if major != rpc.VERSION[0] or minor > rpc.VERSION[1]:
            its, ours = ".".join(map(str, version)), ".".join(map(str, rpc.VERSION))
            raise WorkerUnavailable(
                f"the worker at {worker} speaks version {its} of ggml's RPC, and this library "
                f"{ours}; install the same release of llama.cpp on both machines"
            )
    return [device for worker in workers for device in rpc.add_worker(str(worker))]


def _chosen(known: Sequence[Device], options: RemoteOptions) -> list[Device]:
    by_name = {f"RPC{i}": device for i, device in enumerate(known)}
    for name in options.devices:
        if name not in by_name:
            raise DeviceUnavailable(
                f"device {name}: the workers of --rpc have {', '.join(by_name)}"
            )
    return [by_name[name] for name in options.devices] or list(known)
