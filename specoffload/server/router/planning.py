"""Plans the models of a server in a process of its own, because the API process has no library.

The process reads the headers of the models' files, and ends before a model is opened.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import NamedTuple

from specoffload.config.options import PlanOptions
from specoffload.config.resolution import Config
from specoffload.server.engine.child import start_shielded
from specoffload.server.engine.process import IGNORED_SIGNALS
from specoffload.server.router.sharing import Needs, Room


class Planned(NamedTuple):
    """The needs of models by name, the room for them, and sentences on those without a plan."""

    needs: dict[str, Needs]
    room: Room
    complaints: tuple[str, ...] = ()


def plan_all(configs: Mapping[str, Config]) -> Planned:
    """Plan each model alone, with all free memory. Blocks until the process has ended."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=_plan_all, args=(theirs, dict(configs)), name="plans", daemon=True
    )
    start_shielded(process)
    theirs.close()
    found = Planned({}, Room(0, 0), ("the process that plans the models died",))
    with contextlib.suppress(EOFError, OSError):
        found = ours.recv()
    ours.close()
    process.join()
    return found


def _plan_all(line: Connection, configs: dict[str, Config]) -> None:
    # Imported here, because only this process may load the native library.
    from offload.store.store import room_now

    for sig in IGNORED_SIGNALS:
        signal.signal(sig, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    needs: dict[str, Needs] = {}
    complaints: list[str] = []
    device_bytes = 0
    for name, config in configs.items():
        try:
            needs[name], its_device_bytes = _needs_of(config)
            device_bytes = max(device_bytes, its_device_bytes)
        except Exception as e:  # its start will say it again
            complaints.append(f"{name} has no plan: {e}")
    room = Room(device_bytes, room_now().available_bytes)
    line.send(Planned(needs, room, tuple(complaints)))


def _needs_of(config: Config) -> tuple[Needs, int]:
    """Return what the plans of a model say, and the device memory that there is.

    Raises what planning raises.
    """
    from offload.errors import DoesNotFit, NotSupported
    from specoffload.opening.context_size import planned_with_context

    own = PlanOptions()
    sized, planned = planned_with_context(config, own)
    plan = planned.plan
    if planned.on_cpu or not planned.vram_bytes:  # a simulated device without a size is in RAM too
        host_bytes = planned.facts.size_bytes + planned.memory.total_bytes
        return Needs(0, 0, host_bytes), 0
    if len(planned.parts) > 1:
        raise NotSupported("the memory of several devices is not divided among models")
    least_bytes = plan.used_bytes
    tiny = replace(config.streaming, device_bytes=1)
    try:
        planned_with_context(replace(sized, streaming=tiny), own)
    except DoesNotFit as e:
        least_bytes = min(least_bytes, e.least_bytes or least_bytes)
    host_bytes = plan.streamed_bytes + plan.working.host_bytes
    return Needs(least_bytes, plan.used_bytes, host_bytes), planned.vram_bytes
