"""Finds the devices that workers offer, and divides layers between them and local devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from offload.errors import DeviceUnavailable, DoesNotFit, WorkerUnavailable
from offload.ggml import rpc
from offload.ggml.backend import Device
from offload.model import ModelFacts
from offload.plan.context import ContextOptions
from offload.plan.devices import divide
from offload.plan.machine import Machine
from offload.plan.placement import MARGIN_BYTES, PlanRequest
from offload.plan.range_times import DeviceRoom
from offload.plan.ranges import LayerRange, by_memory, shares_for
from offload.remote.address import Address, RemoteOptions
from offload.remote.hello import WorkerFacts, check, status_of
from offload.remote.probe import count_devices, greet
from offload.remote.speed import measured_speed
from offload.remote.watch import peers_of


@dataclass(frozen=True)
class Offer:
    """A device that a worker offers.

    `device` is None for a `specoffload worker`. ggml connects to it only when it holds its layers.
    """

    worker: Address
    free_bytes: int
    device: Device | None
    number: int = 0

    @property
    def name(self) -> str:
        return f"RPC{self.number}"

    def room(self, machine: Machine) -> DeviceRoom:
        """Return the room for layers on this device, with the rates of `machine`.

        A stock worker's device is remote to the planner: it streams no weights.
        """
        budget_bytes = max(0, self.free_bytes - MARGIN_BYTES)
        return DeviceRoom(self.name, budget_bytes, machine, is_remote=self.device is not None)


@dataclass(frozen=True)
class DividedLayers:
    """The layers of the local and the remote devices, and a clause on the reason for them."""

    local: tuple[LayerRange, ...]
    remote: tuple[LayerRange, ...]
    why: str
    rooms: tuple[DeviceRoom, ...]  # remote devices, with their rates if these were measured


def divide_with(
    facts: ModelFacts,
    rooms: Sequence[DeviceRoom],
    offers: Sequence[Offer],
    request: PlanRequest,
    options: RemoteOptions,
    *,
    shares: Sequence[float] = (),
    devices: Sequence[Device] | None = (),
    free_bytes: Sequence[int] = (),
) -> DividedLayers:
    """Divide the layers between the local devices and those that workers offer.

    `rooms` are the local devices; there are none if this machine has only its CPU. Layers are
    divided by `shares` if there are any. Otherwise they are divided by expected time if all speeds
    can be measured, and else by free memory. `devices` are the local devices to measure: () if they
    are not here, None to divide by memory. `free_bytes` is the free memory of each local device,
    for rooms without a limit. Raises DoesNotFit, DeviceFailed or DeviceUnavailable.
    """
    local_first = not rooms or options.order == "last"
    ours = [offer.name for offer in offers if offer.device is None]
    why = "by free memory"
    if shares:
        here, there = [room.name for room in rooms], [offer.name for offer in offers]
        shares, words = shares_for(shares, [*here, *there] if local_first else [*there, *here])
        why = f"by {words or '--tensor-split'}"
    elif not rooms:
        why = "so that as many as fit are remote, since this machine computes on its CPU"
    elif ours:
        why += f", since the speed of {', '.join(ours)} is not measured"
    elif devices is not None:
        try:
            return _by_time(facts, rooms, offers, request, devices, local_first=local_first)
        except DoesNotFit as e:
            why += f", since a division by time does not fit: {e}"
    local, remote = by_memory(
        facts,
        request.context or ContextOptions(),
        [
            (free_bytes[i] if free_bytes else 0) if room.budget_bytes is None else room.budget_bytes
            for i, room in enumerate(rooms)
        ],
        [offer.free_bytes for offer in offers],
        local_first=local_first,
        has_head=options.order in ("last", "only"),
        streams=[offer.device is None for offer in offers],
        shares=shares,
        most_remote=request.n_gpu_layers,
    )
    rooms_there = tuple(offer.room(request.machine) for offer in offers)
    return DividedLayers(local, remote, why, rooms_there)


def _by_time(
    facts: ModelFacts, rooms: Sequence[DeviceRoom], offers: Sequence[Offer], request: PlanRequest,
    devices: Sequence[Device], *, local_first: bool,
) -> DividedLayers:  # fmt: skip
    """Return the division with the least expected time. Raises DoesNotFit or DeviceFailed."""
    local, remote, words = list(rooms), [], []
    for i, device in enumerate(devices):
        machine = measured_speed(device).on(rooms[i].machine, is_remote=False)
        local[i] = replace(rooms[i], machine=machine)
    for offer in offers:
        assert offer.device is not None
        speed = measured_speed(offer.device)
        words.append(f"{offer.name}: {speed.words}")
        remote.append(offer.room(speed.on(request.machine, is_remote=True)))
    ordered = [*local, *remote] if local_first else [*remote, *local]
    draft_on = ordered.index(local[0])  # a draft model is on the first local device
    division = divide(facts, ordered, request, use_all=True, draft_on=draft_on)
    its = {part.room.name: part.layers for part in division.parts}
    return DividedLayers(
        tuple(its[room.name] for room in local),
        tuple(its[room.name] for room in remote),
        f"by expected time ({'; '.join(words)})",
        tuple(remote),
    )


def offers_of(options: RemoteOptions, mine: WorkerFacts | None, *, asks: bool) -> list[Offer]:
    """Return the remote devices to use. Raises LibraryMismatch or DeviceUnavailable.

    With `asks`, each worker is asked for its status first, which only a `specoffload worker` has.
    `mine` is this machine's file and build, which such a worker must have too; None: not checked.
    Stock workers are greeted before ggml connects, because ggml ends the process if a worker does
    not answer.
    """
    rpc.check_built()
    _check_distinct(options.workers)
    known: list[Offer] = []
    for worker in options.workers:
        status = status_of(worker) if asks else None
        if status is not None:
            if mine is not None:
                check(worker, status, mine)
            known.append(Offer(worker, status.free_bytes, None, len(known)))
            continue
        major, minor, _ = version = greet(worker)
        if major != rpc.VERSION[0] or minor > rpc.VERSION[1]:
            its, ours = ".".join(map(str, version)), ".".join(map(str, rpc.VERSION))
            raise WorkerUnavailable(
                f"the worker at {worker} speaks version {its} of ggml's RPC, and this library "
                f"{ours}; install the same release of llama.cpp on both machines"
            )
        its_devices = rpc.add_worker(str(worker), count_devices(worker))
        known += [
            Offer(worker, device.memory_bytes()[0], device, number)
            for number, device in enumerate(its_devices, len(known))
        ]
    by_name = {offer.name: offer for offer in known}
    for name in options.devices:
        if name not in by_name:
            raise DeviceUnavailable(
                f"device {name}: the workers of --rpc have {', '.join(by_name)}"
            )
    return [by_name[name] for name in options.devices] or known


def _check_distinct(workers: Sequence[Address]) -> None:
    """Raise DeviceUnavailable if two addresses are names of the same worker."""
    known: dict[tuple[str, int], Address] = {}
    for worker in workers:
        for peer in peers_of(worker):
            if (other := known.setdefault(peer, worker)) != worker:
                raise DeviceUnavailable(
                    f"--rpc {other},{worker}: both are the worker at {peer[0]}:{peer[1]}; name "
                    "each worker once"
                )
