"""Runs a draft's steps: each drafts one token and feeds the next step on the device.

The results are copied to the host once, at the end. A step is captured once per (lanes, tokens fed,
positions seen) as a CUDA graph, and replayed. A graph replays kernels on the addresses it was
captured with. A step therefore uses only tensors that outlive it, reads no number from the device,
and has the same shapes each time (docs.pytorch.org/docs/stable/notes/cuda.html, "CUDA Graphs"). A
lane is the place of a sequence. Unused lanes are fed nothing, and write to the position after the
context.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offload.torch_draft.network import Network
from offload.torch_draft.plan import MAX_FED, TorchDraftOptions, fed_length

TorchStep = Callable[[], None]
_N_WARM_UP = 3  # runs before a capture, in which libraries choose kernels and workspaces


class Eager:
    """Runs each step anew, kernel by kernel: on the CPU, and on CUDA with graphs switched off.

    A draft submits all its work within `working`.
    """

    captures = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def working(self) -> AbstractContextManager[object]:
        """Return a context in which work is submitted to the stream of the draft."""
        return nullcontext()

    def capture(self, step: TorchStep) -> TorchStep:
        """Return a function that runs `step`.

        May run `step` at once; the caller restores the state that it changes.
        """
        return step

    def wait(self) -> None:
        """Return when all submitted work is done."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        pass


class CudaGraphs(Eager):
    """One side stream for warm-up, capture and replay, and one pool of memory for all graphs.

    The graphs can share the pool because no result stays in it: steps write their results to
    tensors of the block.
    """

    captures = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def working(self) -> AbstractContextManager[object]:
        stream: AbstractContextManager[object] = torch.cuda.stream(self._stream)
        return stream

    def capture(self, step: TorchStep) -> TorchStep:
        with torch.cuda.stream(self._stream):
            for _ in range(_N_WARM_UP):
                step()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may copy weights during the capture; their CUDA calls must not end it.
        capturing = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        with torch.cuda.device(self._device), capturing:
            step()
        self._graphs.append(graph)
        replay: TorchStep = graph.replay
        return replay

    def wait(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        self._stream.synchronize()
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()


@dataclass
class StepCounters:
    """Counts since the draft was opened."""

    n_steps: int = 0  # tokens drafted per sequence, by replay or without
    n_replays: int = 0  # steps that replayed a captured graph
    n_captures: int = 0
    n_host_copies: int = 0  # copies of results to the host, each with a wait for the device
    n_fed: int = 0  # evaluated tokens, without drafted ones


@dataclass(frozen=True)
class Draws:
    """Uniform numbers [n_steps, n_parts] to draw tokens with, and temperatures.

    `temperature` is a number for all parts, or [n_parts].
    """

    temperature: float | NDArray[np.float64]
    uniforms: NDArray[np.float64]


@dataclass(frozen=True)
class _GraphKey:
    n_lanes: int
    width: int
    n_kv: int
    draws: bool
    top_k: int = 0


class CapturedSteps:
    """Captures and replays steps on the tensors of a draft's block."""

    def __init__(
        self,
        network: Network,
        tensors: Mapping[str, Tensor],
        options: TorchDraftOptions,
        n_out: int,
        capturer: Eager,
    ) -> None:
        self.network, self.capturer = network, capturer
        self._options, self._n_out = options, n_out
        self._replays: dict[_GraphKey, TorchStep] = {}
        self.counters = StepCounters()
        n_seq = options.n_sequences
        self._inputs = tensors["inputs"]
        self._at = self._inputs[:1]  # row of `out` that the next step writes
        self._n_fed = self._inputs[1 : 1 + n_seq]
        self._first = self._inputs[1 + n_seq : 1 + 2 * n_seq]
        self._feed = self._inputs[1 + 2 * n_seq :].view(n_seq, MAX_FED)
        self._tensors = tensors
        device = self._inputs.device
        self._order = torch.arange(MAX_FED, device=device)
        self._lane = torch.arange(n_seq, device=device)
        self._host = {
            name: torch.zeros_like(tensors[name], device="cpu", pin_memory=device.type == "cuda")
            for name in ("inputs", "out", "draws", "rows")
            if name in tensors
        }

    # -- drafting ---------------------------------------------------------------------------------

    def begin(self, fed: Mapping[int, tuple[int, Sequence[int]]]) -> int:
        """Stage tokens for `run` to upload. `fed` has (position of the first, tokens) by lane.

        Returns the width of the first step.
        """
        n_seq = self._options.n_sequences
        staged = self._host["inputs"].zero_()
        for lane, (first, tokens) in fed.items():
            staged[1 + lane] = len(tokens)
            staged[1 + n_seq + lane] = first
            at = 1 + 2 * n_seq + lane * MAX_FED
            staged[at : at + len(tokens)] = torch.tensor(tokens)
        return fed_length(max(len(tokens) for _, tokens in fed.values()))

    def go_on(self, lanes: Sequence[int]) -> None:
        """Make the next `run` continue on these lanes from the last drafted tokens."""
        staged = self._host["inputs"]
        staged[: 1 + self._options.n_sequences] = 0
        for lane in lanes:
            staged[1 + lane] = 1

    def run(
        self,
        n_steps: int,
        n_lanes: int,
        width: int,
        n_kv: int,
        drawing: Draws | None = None,
        top_k: int = 0,
    ) -> None:
        """Submit `n_steps` steps. With `width` 0 they continue from the tokens on the device."""
        draws = drawing is not None
        top_k = 0 if draws else min(top_k, self._n_out)
        first = _GraphKey(n_lanes, width or 1, n_kv, draws, top_k)
        rest = _GraphKey(n_lanes, 1, n_kv, draws, top_k)
        steps = [self._replay_of(first), *[self._replay_of(rest)] * (n_steps - 1)]
        with self.capturer.working():
            staged = self._host["inputs"]
            n = len(staged) if width else 1 + self._options.n_sequences
            self._inputs[:n].copy_(staged[:n], non_blocking=True)
            if drawing is not None:
                self._upload_draws(drawing)
            for step in steps:
                step()
        self.counters.n_steps += n_steps
        if self.capturer.captures:
            self.counters.n_replays += n_steps

    def fetch(self, name: str, n_steps: int) -> NDArray[np.float32]:
        """Wait, then copy the results of all steps to the host at once.

        `name`: out, (token, p, gap) [n_steps, n_sequences, 3]; or rows, the distributions that
        tokens were drawn from [n_steps, n_sequences, n_out].
        """
        host = self._host[name][:n_steps]
        with self.capturer.working():
            host.copy_(self._tensors[name][:n_steps], non_blocking=True)
            self.capturer.wait()
        self.counters.n_host_copies += 1
        out: NDArray[np.float32] = host.numpy().copy()
        return out

    def _upload_draws(self, drawing: Draws) -> None:
        staged, n_seq = self._host["draws"], self._options.n_sequences
        staged[:n_seq] = torch.as_tensor(drawing.temperature)
        n_steps, n_parts = drawing.uniforms.shape
        staged[n_seq:].view(-1, n_seq)[:n_steps, :n_parts] = torch.from_numpy(drawing.uniforms)
        self._tensors["draws"].copy_(staged, non_blocking=True)

    # -- capture ----------------------------------------------------------------------------------

    def _replay_of(self, key: _GraphKey) -> TorchStep:
        """Return the captured step; captures it if it is new. State on the device is kept."""
        if key in self._replays:
            return self._replays[key]
        with self.capturer.working():
            kept = self._inputs.clone()
            # Warm-up runs the step. With nothing fed, it writes only after the context.
            self._inputs.zero_()
            if "draws" in self._tensors:
                self._tensors["draws"].fill_(0.5)
        replay = self.capturer.capture(lambda: self._step(key))
        with self.capturer.working():
            self._inputs.copy_(kept)
        self._replays[key] = replay
        if self.capturer.captures:
            self.counters.n_captures += 1
        return replay

    def _step(self, key: _GraphKey) -> None:
        n, width = key.n_lanes, key.width
        n_fed, first = self._n_fed[:n], self._first[:n]
        order = self._order[:width]
        positions = first[:, None] + order
        positions.masked_fill_(order >= n_fed[:, None], self._options.n_ctx)
        x = self.network.hidden(self._feed[:n, :width], positions, key.n_kv)
        last = x[self._lane[:n], (n_fed - 1).clamp_(min=0)]
        logits = self.network.logits(last, self._n_out)
        token, p, gap = self._draw(logits) if key.draws else greedy(logits, key.top_k)
        if "kept" in self._tensors:
            token = self._tensors["kept"][token]
        # Ids are below 2^24, so f32 holds them exactly.
        drafted = torch.stack((token.float(), p, gap), -1)
        self._tensors["out"][:, :n].index_copy_(0, self._at, drafted[None])
        self._feed[:n, 0].copy_(token)
        first += n_fed
        n_fed.clamp_(max=1)
        self._at += 1

    def _draw(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Draw each row's token; return tokens, greatest probabilities, and gaps to the second."""
        draws = self._tensors["draws"]
        n, n_seq = logits.shape[0], self._options.n_sequences
        q = torch.softmax(logits / draws[:n, None].float(), -1)
        self._tensors["rows"][:, :n].index_copy_(0, self._at, q[None])
        # Sums are in f64, so that draws follow the row's distribution up to the last token.
        total = q.cumsum(-1, dtype=torch.float64)
        uniform = draws[n_seq:].view(-1, n_seq).index_select(0, self._at)[0, :n]
        token = torch.searchsorted(total, (uniform * total[:, -1])[:, None], right=True)[:, 0]
        p, best = q.max(-1)
        second = q.scatter(-1, best[:, None], 0.0).amax(-1)
        return token.clamp_(max=self._n_out - 1), p, p - second


def greedy(logits: Tensor, top_k: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's likeliest token, its probability, and the gap to the second probability.

    Probabilities are softmaxes over the `top_k` greatest logits; 0: over all logits.
    """
    if top_k > 1:
        best, tokens = logits.topk(top_k, -1)
        weights = (best - best[:, :1]).exp_()
        p = 1.0 / weights.sum(-1)
        return tokens[:, 0], p, p * (1.0 - weights[:, 1])
    top, token = logits.max(-1)
    p = 1.0 / (logits - top[:, None]).exp_().sum(-1)
    second = logits.scatter(-1, token[:, None], float("-inf")).amax(-1)
    return token, p, p * (1.0 - (second - top).exp_())
