"""Connects to workers, and adds their devices to a model's placement.

A worker of ours runs `specoffload worker`. A stock worker runs llama.cpp's rpc-server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from offload.device import DeviceChoice, choose_devices
from offload.errors import DeviceUnavailable, DoesNotFit, WorkerUnavailable
from offload.ggml import rpc
from offload.ggml.backend import Device
from offload.ggml.hostbuffer import CpuBufferType
from offload.ggml.library.callback import Pending
from offload.ggml.llama import ModelPlacement
from offload.ggml.remote_weights import RemoteWeights
from offload.model import ModelFacts
from offload.plan.by_memory import MARGIN_BYTES, by_memory
from offload.plan.context import ContextOptions, context_memory
from offload.plan.devices import divide, layer_words
from offload.plan.range_times import DeviceRoom
from offload.plan.ranges import LayerRange, shares_of
from offload.remote.address import Address, RemoteOptions
from offload.remote.hello import LayersAsked, WorkerFacts, ask_for, check, status_of
from offload.remote.probe import greet
from offload.remote.speed import measured_speed
from offload.store.store import OnProgress
from offload.streaming.options import StreamingOptions
from offload.streaming.parts import MeasureLinks, free_for_layers, rooms_of

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
    held: tuple[tuple[RemoteWeights, LayersAsked], ...] = ()
    why: str = ""  # a clause on the reason for these layers

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


@dataclass(frozen=True)
class _Offer:
    """A device that a worker offers.

    `device` is None for a worker of ours, which ggml connects to only when it holds its layers.
    """

    worker: Address
    free_bytes: int
    device: Device | None
    number: int = 0

    @property
    def name(self) -> str:
        return f"RPC{self.number}"


def open_remote(
    facts: ModelFacts,
    context: ContextOptions,
    options: RemoteOptions,
    device: str,
    streaming: StreamingOptions,
    *,
    shares: Sequence[float] = (),
    measure_links: MeasureLinks | None = None,
    pending: Pending | None = None,
    on_progress: OnProgress = lambda *_: None,
) -> RemotePart:
    """Connect to the workers, and choose the layers of all devices.

    `device` names the local devices, as in --device, and `streaming` limits them. With `pending`,
    workers of ours load their layers themselves, and `on_progress` gets their steps. Raises
    LibraryMismatch, DoesNotFit, and DeviceUnavailable with one sentence for a worker or a device
    that is missing.
    """
    choices = choose_devices(device, all_gpus=len(shares) > 1)
    mine = None if pending is None else WorkerFacts.of(facts)
    chosen = _chosen(_offers(options.workers, mine), options)
    on_cpu = not choices[0].wrapped
    local_first = on_cpu or options.order == "last"
    if not on_cpu and measure_links is not None and len(choices) > 1:
        streaming = replace(streaming, each_link_bytes_per_s=tuple(measure_links(choices)))
    rooms = [] if on_cpu else [room for room, _ in rooms_of(choices, streaming)]
    timed, why = None, "by --tensor-split"
    if not shares and mine is None:
        why = "by free memory"
    elif not shares:
        timed, why = _by_time(facts, choices, chosen, rooms, streaming, local_first=local_first)
    local_ranges, remote_ranges = timed or by_memory(
        facts,
        context,
        [room.budget_bytes or free_for_layers(c) for room, c in zip(rooms, choices, strict=False)],
        [offer.free_bytes for offer in chosen],
        local_first=local_first,
        has_head=options.order in ("last", "only"),
        streams=[offer.device is None for offer in chosen],
        shares=shares,
        most_remote=streaming.n_gpu_layers,
    )
    local = [(c, its) for c, its in zip(choices, local_ranges, strict=True) if on_cpu or its]
    if not local or (not on_cpu and local[0][1].first >= facts.n_layers):
        raise DeviceUnavailable(
            f"--tensor-split leaves {choices[0].name} no layers; leave it out of --device"
        )
    used = [(offer, its) for offer, its in zip(chosen, remote_ranges, strict=True) if its]
    devices: list[Device] = []
    held: list[tuple[RemoteWeights, LayersAsked]] = []
    for offer, its in used:
        device_here = offer.device
        if device_here is None:
            assert pending is not None
            asked = _asked(facts, context, its)
            for state in ask_for(offer.worker, asked):
                on_progress(f"{offer.worker}: {state.doing or 'loading'}", state.done)
            (device_here,) = rpc.add_worker(str(offer.worker))
            name = f"WORKER_{len(held)}"
            held.append((RemoteWeights(name, device_here, pending), asked))
        devices.append(device_here)
    return RemotePart(
        devices=tuple(devices),
        layers=tuple(its for _, its in used),
        local=tuple(local),
        n_layers=facts.n_layers,
        local_first=local_first,
        held=tuple(held),
        why=why,
    )


def _by_time(
    facts: ModelFacts,
    choices: Sequence[DeviceChoice],
    offers: Sequence[_Offer],
    rooms: Sequence[DeviceRoom],
    streaming: StreamingOptions,
    *,
    local_first: bool,
) -> tuple[tuple[tuple[LayerRange, ...], tuple[LayerRange, ...]] | None, str]:
    """Return the layers of the local and the remote devices by expected time, and the reason.

    The result is None if layers have to be divided by memory instead.
    """
    if not rooms:
        return None, "as many as fit, since this machine has only its CPU"
    ours = [offer.name for offer in offers if offer.device is None]
    if ours:
        return None, f"by free memory, since the speed of {', '.join(ours)} is not measured"
    local, remote, words = [], [], []
    try:
        for choice, room in zip(choices, rooms, strict=True):
            speed = measured_speed(choice.device)
            local.append(replace(room, machine=speed.on(room.machine, is_remote=False)))
        for offer in offers:
            assert offer.device is not None
            speed = measured_speed(offer.device)
            words.append(f"{offer.name}: {speed.words}")
            machine = speed.on(streaming.machine, is_remote=True)
            budget_bytes = max(0, offer.free_bytes - MARGIN_BYTES)
            remote.append(DeviceRoom(offer.name, budget_bytes, machine, is_remote=True))
        ordered = [*local, *remote] if local_first else [*remote, *local]
        draft_on = ordered.index(local[0])  # a draft model is on the first local device
        division = divide(facts, ordered, streaming, use_all=True, draft_on=draft_on)
    except DoesNotFit as e:
        return None, f"by free memory, since a division by time does not fit ({e})"
    by_name = {part.room.name: part.layers for part in division.parts}
    local_ranges = tuple(by_name[room.name] for room in local)
    remote_ranges = tuple(by_name[room.name] for room in remote)
    return (local_ranges, remote_ranges), f"by expected time ({'; '.join(words)})"


def _asked(facts: ModelFacts, context: ContextOptions, layers: LayerRange) -> LayersAsked:
    """Return what a worker has to hold, and the memory that its part of the context takes."""
    end, has_head = min(layers.end, facts.n_layers), layers.end > facts.n_layers
    part = facts.part(layers.first, layers.end)
    return LayersAsked(layers.first, end, has_head, context_memory(part, context).total_bytes)


def _offers(workers: Sequence[Address], mine: WorkerFacts | None) -> list[_Offer]:
    """Return the devices of all workers, in their order. Raises LibraryMismatch, DeviceUnavailable.

    With `mine`, workers of ours must have the same file and build. Stock ones are greeted before
    ggml connects, because ggml ends the process if one does not answer.
    """
    rpc.check_built()
    found: list[_Offer] = []
    for worker in workers:
        status = None if mine is None else status_of(worker)
        if status is not None and mine is not None:
            check(worker, status, mine)
            found.append(_Offer(worker, status.free_bytes, None, len(found)))
            continue
        major, minor, _ = version = greet(worker)
        if major != rpc.VERSION[0] or minor > rpc.VERSION[1]:
            its, ours = ".".join(map(str, version)), ".".join(map(str, rpc.VERSION))
            raise WorkerUnavailable(
                f"the worker at {worker} speaks version {its} of ggml's RPC, and this library "
                f"{ours}; install the same release of llama.cpp on both machines"
            )
        its_devices = rpc.add_worker(str(worker))
        found += [
            _Offer(worker, device.memory_bytes()[0], device, number)
            for number, device in enumerate(its_devices, len(found))
        ]
    return found


def _chosen(known: Sequence[_Offer], options: RemoteOptions) -> list[_Offer]:
    by_name = {offer.name: offer for offer in known}
    for name in options.devices:
        if name not in by_name:
            raise DeviceUnavailable(
                f"device {name}: the workers of --rpc have {', '.join(by_name)}"
            )
    return [by_name[name] for name in options.devices] or list(known)
