"""Steps as CUDA graphs, and the slow twin that runs them as they are.

A graph replays kernels on the addresses it was captured with, so a step may touch only tensors
that outlive it, must not ask the device for a number, and has the same shapes each time
(docs.pytorch.org/docs/stable/notes/cuda.html, "CUDA Graphs").
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

Step = Callable[[], None]
_N_WARM_UP = 3  # the library chooses kernels and makes its workspaces in the first runs


class Capturer(Protocol):
    """A way to run steps. All of a draft's work is done within `working`."""

    captures: bool

    def working(self) -> AbstractContextManager[object]:
        """The stream that everything is submitted to."""
        ...

    def capture(self, step: Step) -> Step:
        """A function that runs `step` from now on. May run it first: state that it changes is the
        caller's to put back."""
        ...

    def wait(self) -> None:
        """Until all that was submitted is done."""
        ...

    def close(self) -> None: ...


class Eager:
    """Runs each step anew, kernel by kernel: on the CPU, and on CUDA with graphs switched off."""

    captures = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def working(self) -> AbstractContextManager[object]:
        return nullcontext()

    def capture(self, step: Step) -> Step:
        return step

    def wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        pass


class CudaGraphs:
    """One side stream for warm-up, capture and replay, and one pool of memory for all graphs.

    The pool may be shared because nothing a graph leaves behind lies in it: what comes out of a
    step is written to tensors of the block.
    """

    captures = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def working(self) -> AbstractContextManager[object]:
        stream: AbstractContextManager[object] = torch.cuda.stream(self._stream)
        return stream

    def capture(self, step: Step) -> Step:
        with torch.cuda.stream(self._stream):
            for _ in range(_N_WARM_UP):
                step()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process may copy weights meanwhile: their calls are none of ours.
        capturing = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        with torch.cuda.device(self._device), capturing:
            step()
        self._graphs.append(graph)
        replay: Step = graph.replay
        return replay

    def wait(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        self._stream.synchronize()
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
