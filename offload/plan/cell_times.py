"""The time that cells of idle conversations cost, and that of moving them to RAM and back. Pure.

Attention passes over all cells up to the highest one in use. Those that no running request needs
are read and computed too, and then masked.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from offload.decode import SMALL_BATCH
from offload.model import ModelFacts
from offload.plan.devices import DevicePlan
from offload.plan.found import Kind
from offload.plan.layout import Layout
from offload.times.context_memory import ContextOptions
from offload.times.decodes import attention_s
from offload.times.machine import CORE_FLOPS, Machine
from offload.times.prompts import with_prompt
from offload.times.work import ModelWork, WeightWork, model_work, with_context

_STEP_CELLS = 256  # libllama pads the cells that it attends to
# The library copies a state with one thread, and Python copies it twice more.
_RAM_COPY_BYTES_PER_S = 2e9


class CellTimes:
    """Prices cells by the machine model of a start's devices."""

    def __init__(self, layout: Layout, n_threads: int) -> None:
        """`n_threads` compute on the CPU."""
        self._context = layout.context
        self._parts = [
            (_machine(device, n_threads), model_work(device.facts), device.facts)
            for device in layout.division.used
        ]
        links = [
            device.request.machine.link_bytes_per_s
            for device in layout.division.used
            if device.kind is not Kind.CPU and layout.context.kv_offload
        ]
        self.copy_bytes_per_s = min([_RAM_COPY_BYTES_PER_S, *links])  # of a state, either way
        self._ubatch_s = lru_cache(4096)(self._ubatch_seconds)

    def attention_s(self, n_cells: float, n_tokens: int) -> float:
        """Return the seconds that `n_cells` more cells add to a batch of `n_tokens`."""
        steps = -(-int(n_cells) // _STEP_CELLS)
        if not steps:
            return 0.0
        whole, rest = divmod(n_tokens, self._context.n_ubatch)
        whole_s = whole * self._ubatch_s(steps, self._context.n_ubatch) if whole else 0.0
        return whole_s + (self._ubatch_s(steps, rest) if rest else 0.0)

    def rent_s(self, end: int, n_cells: float, n_tokens: int) -> float:
        """Return the seconds that `n_cells` of the cells up to `end` add to a batch of `n_tokens`.

        Attention passes over whole blocks of cells, so a short text may add nothing.
        """
        return self.attention_s(_padded(end) - _padded(end - n_cells), n_tokens)

    def _ubatch_seconds(self, steps: int, n_tokens: int) -> float:
        n_cells = steps * _STEP_CELLS
        total_s = 0.0
        for machine, work, facts in self._parts:
            # With one sequence, layers with windows pass over one window.
            context = replace(self._context, n_ctx=n_cells, n_sequences=1, n_ubatch=1)
            with_cells = _attending(work, facts, context, n_tokens)
            without = replace(with_cells, context=WeightWork())
            total_s += float(
                attention_s(machine, with_cells, n_tokens) - attention_s(machine, without, n_tokens)
            )
        return max(0.0, total_s)


def _padded(n_cells: float) -> int:
    return -(-math.ceil(n_cells) // _STEP_CELLS) * _STEP_CELLS


def _machine(device: DevicePlan, n_threads: int) -> Machine:
    """Return the device's machine. The CPU has this many threads."""
    machine = device.request.machine
    if device.kind is not Kind.CPU:
        return machine
    flops = CORE_FLOPS * max(1, n_threads)
    return replace(
        machine, vram_bytes_per_s=machine.ram_bytes_per_s, cpu_flops=flops, gpu_flops=flops
    )


def _attending(
    work: ModelWork, facts: ModelFacts, context: ContextOptions, n_tokens: int
) -> ModelWork:
    """Return the work of a batch that attends to `context.n_ctx` cells."""
    if n_tokens <= SMALL_BATCH:
        return with_context(work, facts, context)
    return with_prompt(work, facts, context, 0, context.n_ctx)
