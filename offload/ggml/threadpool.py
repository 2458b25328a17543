"""ggml's thread pools and its view of NUMA: which processor each compute thread runs on.

With OpenMP a pool holds no threads of its own: it carries the masks that libgomp's threads apply to
themselves at the start of each graph of two threads or more (ggml-cpu.c:ggml_graph_compute).
Without OpenMP it holds the threads, and a graph that is computed without a pool starts threads and
joins them again.
"""

from __future__ import annotations

import ctypes as C
import functools

from numa.pinning import Team
from offload.ggml.library import abi
from offload.ggml.library.lib import library
from offload.ggml.llama import Context

# Threads spin for 131072 rounds, a few milliseconds, before they sleep: longer than from one split
# layer to the next. ggml's own 50 times as long would slow down a draft beside the target.
_POLL = 1
_NUMA_DISABLED = 0  # enum ggml_numa_strategy: count the nodes, leave affinities alone


class ThreadPool:
    """Threads that compute graphs, and wait for the next graph in between."""

    def __init__(self, threads: Team | int) -> None:
        """A number of threads runs wherever the kernel puts them; thread i of a team runs on one
        processor, the i-th set bit of the team's mask.

        Raises NoSuchNode for processors beyond ggml's mask, DeviceFailed without memory.
        """
        self._lib = lib = library()
        self.n_threads = threads if isinstance(threads, int) else threads.n_threads
        params = abi.ggml_threadpool_params()
        lib.ggml_threadpool_params_init(C.addressof(params), self.n_threads)
        if isinstance(threads, int):
            params.poll = _POLL
        else:
            for cpu, is_set in enumerate(threads.cpumask()):
                params.cpumask[cpu] = is_set
            params.strict_cpu = True
        self.address: int | None = lib.ggml_threadpool_new(C.addressof(params))

    def close(self) -> None:
        """Free the pool; no context may use it any more. A second call does nothing."""
        address, self.address = self.address, None
        if address:
            self._lib.ggml_threadpool_free(address)


def attach(context: Context, decode: ThreadPool, batch: ThreadPool) -> None:
    """Compute one token with `decode`'s threads and several with `batch`'s."""
    context.set_threads(decode.n_threads, batch.n_threads)
    library().llama_attach_threadpool(context.handle, decode.address, batch.address)


def detach(context: Context) -> None:
    """Leave the context without pools of ours; nothing for a closed one."""
    if context.handle:
        library().llama_detach_threadpool(context.handle)


@functools.cache
def count_nodes() -> bool:
    """Let ggml count the memory nodes; True where it found several and partitions statically.

    Once per process: ggml complains of a second call. Not through llama_numa_init, which leaves the
    call out for the strategy "disabled" and resets every thread's affinity for all others.
    """
    lib = library()
    lib.ggml_numa_init(_NUMA_DISABLED)
    return bool(lib.ggml_is_numa())


@functools.cache
def cpu_features() -> dict[str, str]:
    """The CPU backend's features, as built and found: {"AVX512": "1", "OPENMP": "1", ...}."""
    text: str = library().llama_print_system_info().decode()
    pairs = (part.split("=", 1) for part in text.replace("CPU :", "").split("|") if "=" in part)
    return {name.strip(): value.strip() for name, value in pairs}


def has_openmp() -> bool:
    """True if graphs are computed by libgomp's threads instead of a pool's own."""
    return cpu_features().get("OPENMP") == "1"


def has_llamafile() -> bool:
    """True if small quantisations go through llamafile's kernels, which steal rows."""
    return bool(library().ggml_cpu_has_llamafile())
