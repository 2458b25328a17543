"""ggml's compute threads: pools of them, and the CPU device's stream that computes with a pool.

Without OpenMP a pool holds threads; a graph that is computed without a pool starts threads and
joins them again. With OpenMP a pool holds no threads. It holds the masks that libgomp's threads
apply to themselves at the start of each graph, if there are two threads or more
(ggml-cpu.c:ggml_graph_compute).
"""

from __future__ import annotations

import ctypes as C
import functools
from collections.abc import Sequence

from numa.threads import EVERYWHERE, Processors, Team, cpumask
from offload.errors import DeviceFailed
from offload.ggml.backend import Device, Stream, all_devices
from offload.ggml.context import Context
from offload.ggml.graph import Graph
from offload.ggml.library import abi
from offload.ggml.library.lib import library
from offload.ggml.tensor import new_tensor

# Idle threads spin for 131072 rounds, a few milliseconds, before they sleep. That is longer than
# the time between two split layers. ggml's default, 50 times as long, would slow down a draft.
_POLL = 1
_NUMA_DISABLED = 0  # enum ggml_numa_strategy: count the nodes, leave affinities alone


class ThreadPool:
    """Threads that compute graphs, and wait for the next graph in between."""

    def __init__(
        self, threads: Team | int, *, polls: bool = True, on: Processors = EVERYWHERE
    ) -> None:
        """`threads`: a number of threads that run wherever the kernel puts them, or a team, whose
        thread i is bound to the processor of the i-th set bit of the team's mask.

        A number of threads runs on the processors `on`. Idle threads sleep at once if `polls` is
        False. Raises NoSuchNode for processors beyond ggml's mask, DeviceFailed without memory.
        """
        self._lib = lib = library()
        self.n_threads = threads if isinstance(threads, int) else threads.n_threads
        params = abi.ggml_threadpool_params()
        lib.ggml_threadpool_params_init(C.addressof(params), self.n_threads)
        if isinstance(threads, int):
            params.poll = _POLL if polls else 0
            mask = cpumask(on.cpus) if on.cpus else []
            params.strict_cpu = on.strict
        else:
            mask = cpumask(threads.cpus)
            params.strict_cpu = True
        for cpu, is_set in enumerate(mask):
            params.cpumask[cpu] = is_set
        self.address: int | None = lib.ggml_threadpool_new(C.addressof(params))

    def close(self) -> None:
        """Free the pool; no context may use it any more. A second call does nothing."""
        address, self.address = self.address, None
        if address:
            self._lib.ggml_threadpool_free(address)

    def run_once(self) -> None:
        """Compute a product of 64 rows with all threads, from the calling thread.

        A decode starts the threads or not, depending on the model and on the device's share. This
        product always starts them, so that their affinities can be read back. Takes about 50 us
        once the threads run. Raises DeviceFailed.
        """
        team = CpuTeam()
        team.use((self, self))
        team.choose(1)
        device = team.stream.device
        buffer = device.allocate(1 << 16, "a tiny product")
        try:
            weights = new_tensor("f32", (64, 64, 1, 1), (buffer, 0))
            vector = new_tensor("f32", (64, 1, 1, 1), (buffer, 1 << 14))
            product = new_tensor(
                "f32", (64, 1, 1, 1), (buffer, 1 << 15), op="MUL_MAT", sources=(weights, vector)
            )
            check(team.stream.compute(Graph.of([product])), "a tiny product")
            team.stream.synchronize()
        finally:
            team.close()
            buffer.close()


def attach(context: Context, decode: ThreadPool, batch: ThreadPool) -> None:
    """Let the context compute one token with `decode`'s threads, and several with `batch`'s."""
    context.set_threads(decode.n_threads, batch.n_threads)
    library().llama_attach_threadpool(context.handle, decode.address, batch.address)


def detach(context: Context) -> None:
    """Detach our pools from the context. Does nothing for a closed context."""
    if context.handle:
        library().llama_detach_threadpool(context.handle)


class CpuTeam:
    """A stream of the CPU device that computes graphs of ours with an engine's threads."""

    def __init__(self) -> None:
        self.pools: Sequence[ThreadPool] = ()
        self.chosen = -1  # which of the pools computes; the player chooses too
        self._stream: Stream | None = None

    def use(self, pools: Sequence[ThreadPool]) -> None:
        """Compute one token with the first of these pools, and several tokens with the second.

        The owner of the pools closes them.
        """
        self.pools, self.chosen = pools, -1

    def open(self) -> None:
        """Open the stream now. Does nothing if it is open."""
        if self._stream is None:
            self._stream = cpu_device().open()
            self.chosen = -1

    def choose(self, n_tokens: int) -> None:
        """Use the pool for a batch of `n_tokens` from now on. Opens the stream if it is closed."""
        self.open()
        index = 0 if n_tokens == 1 else 1
        if index == self.chosen or self._stream is None:
            return
        self.chosen = index
        lib, address = library(), self._stream.address
        pool = self.pools[index]
        lib.ggml_backend_cpu_set_n_threads(address, pool.n_threads)
        lib.ggml_backend_cpu_set_threadpool(address, pool.address)

    @property
    def stream(self) -> Stream:
        assert self._stream is not None, "choose() opens it"
        return self._stream

    def close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


def cpu_device() -> Device:
    """Return the device that computes in host memory."""
    return next(device for device in all_devices() if device.kind == "cpu")


def check(status: int, what: str) -> int:
    """Return `status` if it means success, or a decode that a signal aborted.

    Raises DeviceFailed for any other status.
    """
    if status not in (abi.GGML_STATUS_SUCCESS, abi.GGML_STATUS_ABORTED):
        raise DeviceFailed(f"{what} failed with ggml status {status}")
    return status


@functools.cache
def count_nodes() -> bool:
    """Let ggml count the memory nodes. Returns True if there are several.

    ggml then partitions rows statically. The call is made once per process, since ggml logs a
    complaint at a second one. llama_numa_init cannot be used: it skips the call for "disabled", and
    otherwise resets every thread's affinity.
    """
    lib = library()
    lib.ggml_numa_init(_NUMA_DISABLED)
    return bool(lib.ggml_is_numa())


@functools.cache
def cpu_features() -> dict[str, str]:
    """Return the CPU backend's features, e.g. {"AVX512": "1", "OPENMP": "1"}."""
    text: str = library().llama_print_system_info().decode()
    pairs = (part.split("=", 1) for part in text.replace("CPU :", "").split("|") if "=" in part)
    return {name.strip(): value.strip() for name, value in pairs}


def has_openmp() -> bool:
    """True if graphs are computed by libgomp's threads instead of a pool's own."""
    return cpu_features().get("OPENMP") == "1"
