"""Finds the devices that workers offer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.errors import DeviceUnavailable, WorkerUnavailable
from offload.ggml import rpc
from offload.ggml.backend import Device
from offload.plan.found import FoundDevice, Kind
from offload.remote.address import Address, RemoteOptions
from offload.remote.hello import WorkerFacts, check, status_of
from offload.remote.passage import devices_of
from offload.remote.probe import greet
from offload.remote.watch import peers_of
from offload.times.machine import Machine


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

    def found(self, machine: Machine) -> FoundDevice:
        """Return what was found of the device, with the rates of `machine`."""
        kind = Kind.WORKER if self.device is None else Kind.STOCK
        return FoundDevice(self.name, kind, self.free_bytes, machine=machine)


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
            theirs, ours = ".".join(map(str, version)), ".".join(map(str, rpc.VERSION))
            raise WorkerUnavailable(
                f"the worker at {worker} speaks version {theirs} of ggml's RPC, and this library "
                f"{ours}; install the same release of llama.cpp on both machines"
            )
        its_devices = devices_of(worker)
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
