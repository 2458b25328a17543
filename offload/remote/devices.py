"""Connects to workers, and adds their devices to a model's placement.

A worker of ours runs `specoffload worker`. A stock worker runs llama.cpp's rpc-server.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from offload.device import DeviceChoice
from offload.errors import WorkerUnavailable
from offload.ggml.backend import Device
from offload.ggml.hostbuffer import CpuBufferType
from offload.ggml.library.callback import Pending
from offload.ggml.model import ModelPlacement
from offload.ggml.rpc import RemoteWeights
from offload.model import ModelFacts
from offload.notes import OnProgress
from offload.plan.devices import layer_words
from offload.plan.layout import Layout
from offload.plan.ranges import LayerRange, shares_of
from offload.remote.address import Address
from offload.remote.hello import LayersAsked, ask_for
from offload.remote.offers import Offer
from offload.remote.passage import devices_of
from offload.times.context_memory import ContextOptions, context_memory

_HEAD = r"^(output|token_embd)\.weight$"  # a model without an output matrix uses its embeddings


@dataclass(frozen=True)
class RemotePart:
    """The remote devices with their layers, and the local devices with the other layers.

    `held` has, for each worker of ours, the buffer type of its weights and the layers that it
    holds.
    """

    devices: tuple[Device, ...]
    layers: tuple[LayerRange, ...]
    local: tuple[tuple[DeviceChoice, LayerRange], ...]
    n_layers: int
    local_first: bool
    workers: tuple[Address, ...]  # the devices' workers
    held: tuple[tuple[RemoteWeights, LayersAsked], ...] = ()

    @property
    def has_head(self) -> bool:
        """True if the last remote device computes the output."""
        return self.layers[-1].end > self.n_layers

    @property
    def words(self) -> str:
        """The devices with their layers, for a start-up line and for kept settings."""
        places = [
            f"{device.name} ({worker}) {layer_words(layers, self.n_layers)}"
            for device, worker, layers in zip(self.devices, self.workers, self.layers, strict=True)
        ]
        head = "there" if self.has_head else "here"
        return f"remote: {', '.join(places)}; the output is computed {head}"

    def added_to(self, placement: ModelPlacement, facts: ModelFacts) -> ModelPlacement:
        """Return the placement of the local layers with the remote devices added."""
        # libllama counts the output and the layers for multi-token prediction, too.
        n_all = facts.n_layers + facts.n_mtp_layers + 1
        # The plain CPU is no device to libllama. It computes the layers before the devices' layers.
        on_cpu = not self.local[0][0].wrapped
        local = [] if on_cpu else [layers for _, layers in self.local]
        if self.local_first:
            devices, ranges = (*placement.devices, *self.devices), [*local, *self.layers]
        else:
            devices, ranges = (*self.devices, *placement.devices), [*self.layers, *local]
        ranges[-1] = replace(ranges[-1], end=n_all)
        start = ranges[0].first
        shifted = [LayerRange(theirs.first - start, theirs.end - start) for theirs in ranges]
        placement = replace(placement, devices=devices, tensor_split=shares_of(shifted))
        if self.held:
            patterns = ((asked.pattern, weights) for weights, asked in self.held)
            overrides = (*placement.overrides, *patterns)
            placement = replace(placement, overrides=overrides, load_mode="mmap")
        if not on_cpu:
            return placement
        head = () if self.has_head else ((_HEAD, CpuBufferType()),)
        return replace(
            placement, n_gpu_layers=n_all - start, overrides=(*placement.overrides, *head)
        )

    def read_here(self, facts: ModelFacts) -> ModelFacts:
        """Return the header without the weights that workers read from their own files."""
        away = {name for _, asked in self.held for name in asked.of(facts).weights}
        return replace(facts, weights={n: w for n, w in facts.weights.items() if n not in away})

    def loaded(self) -> None:
        """Let workers compute with the weights that they hold. Call it when the model is loaded."""
        for weights, _ in self.held:
            weights.loaded()


def open_remote(
    layout: Layout,
    choice: Callable[[str], DeviceChoice],
    offer: Callable[[str], Offer],
    *,
    pending: Pending | None = None,
    on_progress: OnProgress = lambda *_: None,
) -> RemotePart:
    """Let workers of ours load their layers, and return the devices of all workers.

    `choice` and `offer` return the local and the remote device of a name in `layout`.
    `pending` is needed if there are workers of ours, and `on_progress` gets their steps. Raises
    WorkerUnavailable.
    """
    facts, local = layout.facts, layout.local
    devices: list[Device] = []
    held: list[tuple[RemoteWeights, LayersAsked]] = []
    for planned in layout.remote:
        its_offer = offer(planned.name)
        device = its_offer.device
        if device is None:
            assert pending is not None
            asked = _asked(facts, layout.context, planned.layers)
            for state in ask_for(its_offer.worker, asked, asked.of(facts).size_bytes):
                on_progress(f"{its_offer.worker}: {state.doing or 'loading'}", state.done)
            device = _only_device(its_offer.worker)
            held.append((RemoteWeights(f"WORKER_{len(held)}", device, pending), asked))
        devices.append(device)
    return RemotePart(
        devices=tuple(devices),
        layers=tuple(planned.layers for planned in layout.remote),
        local=tuple((choice(planned.name), planned.layers) for planned in local),
        n_layers=facts.n_layers,
        workers=tuple(offer(planned.name).worker for planned in layout.remote),
        local_first=not layout.devices[0].kind.is_remote,
        held=tuple(held),
    )


def _only_device(worker: Address) -> Device:
    """Return the device of a worker of ours. Raises WorkerUnavailable if it offers several."""
    devices = devices_of(worker)
    if len(devices) != 1:
        raise WorkerUnavailable(
            f"the worker at {worker} offers {len(devices)} devices, and `specoffload worker` "
            "offers one: name another worker (--rpc)"
        )
    return devices[0]


def _asked(facts: ModelFacts, context: ContextOptions, layers: LayerRange) -> LayersAsked:
    """Return what a worker has to hold, and the memory that its part of the context takes."""
    end, has_head = min(layers.end, facts.n_layers), layers.end > facts.n_layers
    part = facts.part(layers.first, layers.end)
    return LayersAsked(layers.first, end, has_head, context_memory(part, context).total_bytes)
