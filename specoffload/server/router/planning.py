"""Plans the models of a server in a process of its own, because the API process has no library.

The process reads the headers of the models' files, and ends before a model is opened.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from types import MappingProxyType
from typing import NamedTuple

import psutil

from offload.errors import DeviceFailed
from specoffload.config.options import PlanOptions, Ram
from specoffload.config.resolution import Config
from specoffload.server.engine.messages import Problem, problem_of
from specoffload.server.router.sharing import Needs, Room
from specoffload.server.spawned import answer_of

_LEVELS = 16  # parts of several devices' memory that are tried for the least that works


class PlannedModels(NamedTuple):
    """The needs of models by name, the room for them, and sentences on those without a plan.

    `devices` has the memory of each device that a model uses, in bytes.
    """

    needs: dict[str, Needs]
    room: Room
    reasons: tuple[str, ...] = ()
    devices: Mapping[str, tuple[int, ...]] = MappingProxyType({})


class PlannedAlone(NamedTuple):
    """What a model's plans with all memory say, in bytes of its own devices together.

    `devices` is empty for a model in RAM.
    """

    least_bytes: int
    most_bytes: int
    host_bytes: int
    prompt_bytes: int
    devices: tuple[int, ...] = ()


def needs_of(
    planned: Mapping[str, PlannedAlone], host_bytes: int
) -> tuple[dict[str, Needs], Room, dict[str, tuple[int, ...]]]:
    """Return needs in terms of one room, and the memory of each model's devices.

    A model that uses a part of its devices' memory needs the same part of the room. So models on
    one device and on several can be compared, and no device is divided among more than it has.
    """
    single = max((p.devices[0] for p in planned.values() if len(p.devices) == 1), default=0)
    devices = {
        name: (single,) if len(alone.devices) == 1 else alone.devices
        for name, alone in planned.items()
    }
    whole = max(map(sum, devices.values()), default=0)

    def scaled(n_bytes: int, of: tuple[int, ...]) -> int:
        return min(whole, -(-n_bytes * whole // sum(of))) if of else 0

    needs = {
        name: Needs(
            scaled(alone.least_bytes, devices[name]),
            scaled(alone.most_bytes, devices[name]),
            alone.host_bytes,
            alone.prompt_bytes,
        )
        for name, alone in planned.items()
    }
    return needs, Room(whole, host_bytes), devices


def least_level(works: Callable[[int], bool]) -> int:
    """Return the least of the levels 1 to `_LEVELS` that works. The last one is known to work."""
    low, high = 1, _LEVELS
    while low < high:
        middle = (low + high) // 2
        if works(middle):
            high = middle
        else:
            low = middle + 1
    return low


def plan_all(configs: Mapping[str, Config]) -> PlannedModels:
    """Plan each model alone, with all free memory. Blocks until the process has ended."""
    plans = PlannedModels({}, Room(0, 0), ("the process that plans the models died",))
    with contextlib.suppress(EOFError, OSError):
        plans = answer_of("plans", _plan_all, dict(configs))
    return plans


def _plan_all(line: Connection, configs: dict[str, Config]) -> None:
    # Imported here, because only this process may load the native library.
    from offload.store.store import room_now

    alone: dict[str, PlannedAlone] = {}
    reasons: list[str] = []
    for name, config in configs.items():
        try:
            alone[name] = _planned_alone(config)
        except Exception as e:  # its start will say it again
            reasons.append(f"{name} has no plan: {e}")
    needs, room, devices = needs_of(alone, room_now().available_bytes)
    line.send(PlannedModels(needs, room, tuple(reasons), devices))


def _planned_alone(config: Config) -> PlannedAlone:
    """Return what the plans of a model say. Raises what planning raises."""
    from offload.errors import DoesNotFit, NotSupported
    from specoffload.opening.context_size import planned_with_context

    own = PlanOptions()
    planned = planned_with_context(config, own)
    plan, prompt_bytes = planned.plan, config.cache_ram_bytes
    if prompt_bytes is None:  # no limit
        prompt_bytes = sys.maxsize
    if planned.on_cpu or not planned.vram_bytes:  # a simulated device without a size is in RAM too
        host_bytes = planned.facts.size_bytes + planned.memory.total_bytes
        return PlannedAlone(0, 0, host_bytes, prompt_bytes)
    parts = planned.parts
    if any(part.is_remote for part in parts):
        raise NotSupported("the memory of workers (--rpc) is not divided among models")
    host_bytes = sum(part.plan.streamed_bytes + part.plan.working.host_bytes for part in parts)
    devices = tuple(part.vram_bytes for part in parts)
    sized = config
    if config.ctx_size is None:  # a smaller memory does not make it shorter
        in_ram = config.kv_offload is False
        sized = replace(config, ctx_size=planned.context.n_ctx, kv_offload=not in_ram)
    if len(parts) == 1:
        least_bytes = plan.used_bytes
        try:
            planned_with_context(replace(sized, device_bytes=1), own)
        except DoesNotFit as e:
            least_bytes = min(least_bytes, e.least_bytes or least_bytes)
        return PlannedAlone(least_bytes, plan.used_bytes, host_bytes, prompt_bytes, devices)

    def works(level: int) -> bool:
        try:
            planned_with_context(
                limited(sized, [n_bytes * level // _LEVELS for n_bytes in devices]), own
            )
        except DoesNotFit:
            return False
        return True

    whole = sum(devices)
    used = max(part.plan.used_bytes / part.vram_bytes for part in parts)
    least_bytes = whole * least_level(works) // _LEVELS
    most_bytes = max(least_bytes, min(whole, round(whole * used)))
    return PlannedAlone(least_bytes, most_bytes, host_bytes, prompt_bytes, devices)


def check_one(config: Config) -> Problem | None:
    """Return why a model cannot be opened even alone, or None. Blocks until a process has ended.

    The process reads the headers of the model's files, and plans it.
    """
    problem: Problem | None = problem_of(DeviceFailed("the process that reads the file died"))
    with contextlib.suppress(EOFError, OSError):
        problem = answer_of("check", _check_one, config)
    return problem


def _check_one(line: Connection, config: Config) -> None:
    problem = None
    try:
        _plan_with_all_memory(config)
    except Exception as e:
        problem = problem_of(e)
    line.send(problem)


def _plan_with_all_memory(config: Config) -> None:
    """Plan a model as if no other one held memory. Raises what planning raises."""
    from offload.errors import DoesNotFit, WorkerUnavailable
    from specoffload.opening.choices import devices_of
    from specoffload.opening.context_size import planned_with_context

    try:
        planned_with_context(config, PlanOptions())
    except WorkerUnavailable:
        return  # another model may use it
    except DoesNotFit:
        whole = Ram(psutil.virtual_memory().total)
        try:
            planned_with_context(config, PlanOptions(ram=whole))
        except DoesNotFit as e:
            choices = devices_of(config)
            room_bytes = sum(choice.device.memory_bytes()[1] for choice in choices if choice.on_gpu)
            if not room_bytes or (e.least_bytes or 0) > room_bytes:
                raise


def limited(config: Config, each_device_bytes: Sequence[int]) -> Config:
    """Return the configuration with a limit of the memory of each of its devices, in their order.

    An empty sequence changes nothing.
    """
    if not each_device_bytes:
        return config
    one = len(each_device_bytes) == 1
    return replace(
        config,
        device_bytes=each_device_bytes[0] if one else None,
        each_device_bytes=() if one else tuple(each_device_bytes),
    )
