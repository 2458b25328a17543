"""The time of attention over the KV cache, in device memory or in RAM. Pure."""

from __future__ import annotations

import numpy as np

from offload.times.machine import Machine, Real
from offload.times.work import ModelWork

# Shares of the rates for weights at which the KV cache is read, and attention over it is computed.
_CACHE_SHARE, ATTENTION_SHARE = 0.375, 0.7


def attention_s(machine: Machine, work: ModelWork, n_tokens: Real) -> Real:
    """Return the seconds of attention over the KV cache, where it is fastest.

    A cache in RAM is read by the CPU, or copied to the device for each batch.
    """
    on_device_s = device_attention_s(machine, work, n_tokens)
    if not np.any(work.n_ram_caches):
        return on_device_s
    in_ram_s = np.minimum(*ram_attention_s(machine, work, n_tokens))
    found: Real = np.where(np.asarray(work.n_ram_caches) > 0, in_ram_s, on_device_s)
    return found[()]


def ram_attention_s(machine: Machine, work: ModelWork, n_tokens: Real) -> tuple[Real, Real]:
    """Return the seconds of attention over a cache in RAM: on the CPU, and on the device.

    The CPU writes the new tokens in both cases. The device's seconds are infinite if only the
    CPU can attend, and the CPU's if it cannot.
    """
    cpu = machine.ram_bytes_per_s * _CACHE_SHARE, machine.cpu_flops * ATTENTION_SHARE
    switches_s = work.n_ram_caches * machine.per_switch_s
    copy_s = _exposed_copy_s(machine, work, n_tokens)
    on_device_s = copy_s + device_attention_s(machine, work, n_tokens) + switches_s
    on_cpu_s = work.context.seconds(*cpu, n_tokens) + switches_s
    if work.attends_on_cpu:
        on_device_s = np.full_like(on_device_s, np.inf)
    elif not machine.attends_in_ram:
        on_cpu_s = np.full_like(on_cpu_s, np.inf)
    return on_cpu_s, on_device_s


def _exposed_copy_s(machine: Machine, work: ModelWork, n_tokens: Real) -> Real:
    """Return the seconds in which the device waits for copies of a cache in RAM.

    Each layer's cache is copied while the device computes the layer before: its dense weights and
    its attention. The link may copy experts during the rest of a layer. Nothing hides the first
    layer's copy. A worker's device waits for each layer's.
    """
    size_bytes, n = work.context.size_bytes, np.maximum(work.n_ram_caches, 1)
    if not machine.attends_in_ram:
        return work.cache_reads * size_bytes / machine.link_bytes_per_s
    layer_s = size_bytes / n / machine.link_bytes_per_s
    dense_s = work.dense.seconds(machine.vram_bytes_per_s, machine.gpu_flops, n_tokens)
    hidden_s = (work.n_layers * dense_s + device_attention_s(machine, work, n_tokens)) / n
    return work.cache_reads * layer_s + (n - 1) * np.maximum(0.0, layer_s - hidden_s)


def device_attention_s(machine: Machine, work: ModelWork, n_tokens: Real) -> Real:
    bytes_per_s = machine.vram_bytes_per_s * _CACHE_SHARE
    return work.context.seconds(bytes_per_s, machine.gpu_flops * ATTENTION_SHARE, n_tokens)


def attention_crossover(machine: Machine, work: ModelWork, most: int = 8192) -> int | None:
    """Return the fewest tokens of a batch whose attention the device computes, or None.

    `work` has a cache in RAM. The CPU's time grows with the tokens, and the copy's does not.
    """
    sizes = np.arange(1, most + 1)
    on_cpu_s, on_device_s = ram_attention_s(machine, work, sizes)
    faster = np.flatnonzero(np.broadcast_to(on_device_s < on_cpu_s, sizes.shape))
    return int(sizes[faster[0]]) if len(faster) else None
