"""Runs a draft model in torch: feeds its sequences, drafts from them, and rewinds them.

`TorchEngine` adds the vocabulary of the file, so that it can replace an Engine in a session.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from offload.errors import BadRequest, DeviceFailed, DoesNotFit, NotSupported
from offload.model import ModelFacts
from offload.model_file import read_facts
from offload.sequences.text import ModelText
from offload.sequences.vocabulary_file import open_vocabulary
from offload.torch_draft.network import Network, allocate, fill
from offload.torch_draft.plan import (
    MAX_FED,
    DraftLayout,
    DraftShape,
    TorchDraftOptions,
    bucket,
    chunk_length,
    lay_out,
    read_shape,
)
from offload.torch_draft.steps import CapturedSteps, CudaGraphs, Draws, Eager, StepCounters


@dataclass(frozen=True)
class Drafted:
    """Drafted tokens [n_steps, n_parts], in the order of the requested parts.

    `p` is the greatest probability, `gap` its difference to the second greatest. With draws, `rows`
    [n_steps, n_parts, n_out] are the whole distributions. `kept` [n_out] are the token ids of the
    columns of `rows` (None: all tokens in order).
    """

    tokens: NDArray[np.int64]
    p: NDArray[np.float32]
    gap: NDArray[np.float32]
    n_vocab: int
    rows: NDArray[np.float32] | None = None
    kept: NDArray[np.int64] | None = None

    def row(self, step: int, part: int) -> NDArray[np.float64]:
        """Return the distribution [n_vocab] that the token was drawn from."""
        assert self.rows is not None
        q: NDArray[np.float64] = self.rows[step, part].astype(np.float64)
        q /= q.sum()
        if self.kept is None:
            return q
        out = np.zeros(self.n_vocab)
        out[self.kept] = q
        return out


class TorchDraft:
    """A draft model in torch. Close it, or use it with `with`."""

    can_rewind = True
    needs_equal_lengths = False

    def __init__(
        self,
        path: str | Path,
        options: TorchDraftOptions | None = None,
        capturer: Eager | None = None,
    ) -> None:
        """Open the draft in the file at `path`. `capturer` replaces the way steps are captured.

        Raises BadModel (architecture, tensors, quantisation), DoesNotFit, BadRequest, or
        DeviceFailed if this GPU cannot compute a step.
        """
        self.options = o = options or TorchDraftOptions()
        self.facts: ModelFacts = read_facts(path)
        self.shape: DraftShape = read_shape(self.facts)
        self.n_ctx = self.n_batch = self.n_outputs = o.n_ctx  # long batches are fed in chunks
        self.n_vocab = min(o.n_vocab or self.shape.n_vocab, self.shape.n_vocab)
        if o.kept and max(o.kept) >= self.n_vocab:
            raise BadRequest(
                f"kept token {max(o.kept)} is not in the vocabulary of {self.n_vocab}; "
                "make --draft-vocab for this model"
            )
        self.n_steps_max = o.n_steps
        self.layout: DraftLayout = lay_out(self.shape, o)
        self._device = torch.device(o.device)
        if self._device.type == "cpu":
            torch.set_num_threads(o.n_threads)
        with torch.inference_mode():
            tensors = allocate(self.layout, self._device, self.facts.path.name)
            fill(tensors, self.facts, self.shape, self.layout, o)
            if capturer is None:
                kind = CudaGraphs if o.graphs and self._device.type == "cuda" else Eager
                capturer = kind(self._device)
            network = Network(self.shape, tensors, o.dtype)
            self._n_out = o.n_out(self.shape)
            self._steps: CapturedSteps | None = CapturedSteps(
                network, tensors, o, self._n_out, capturer
            )
        self.counters: StepCounters = self._steps.counters
        self._kept = np.asarray(o.kept, np.int64) if o.kept else None
        self._lengths = [0] * o.n_sequences
        self._parts: tuple[int, ...] = ()  # sequences of the last draft
        if self._device.type == "cuda":
            # Finish work of the default stream before another stream reads its results.
            torch.cuda.synchronize(self._device)
            self.try_out()

    def try_out(self) -> None:
        """Draft two tokens and forget them, to find out whether the device can compute a step.

        Closes the draft before it raises DeviceFailed or DoesNotFit.
        """
        ways = [None, Draws(1.0, np.full((2, 1), 0.5))][: 1 + self.options.samples]
        try:
            for drawing in ways:
                self.draft([(0, [0])], 2, drawing)
                self.rewind(0, 0)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Free the memory; safe to call twice."""
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.capturer.close()
        if self._device.type == "cuda":
            # torch keeps cuBLAS's workspaces even after their streams are gone.
            getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()
            torch.cuda.empty_cache()

    def __enter__(self) -> TorchDraft:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- sequences --------------------------------------------------------------------------------

    def length(self, sequence: int) -> int:
        """Return the number of tokens in the sequence. Raises BadRequest if it does not exist."""
        if not 0 <= sequence < len(self._lengths):
            raise BadRequest(f"sequence {sequence} does not exist; there are {len(self._lengths)}")
        return self._lengths[sequence]

    def n_droppable(self, parts: Sequence[tuple[int, int]]) -> int:
        return 0  # there are no snapshots, because nothing is recurrent

    def rewind(self, sequence: int, length: int) -> None:
        """Keep the first `length` tokens; later ones are never read again."""
        if not 0 <= length <= self.length(sequence):
            raise BadRequest(f"{length} tokens cannot be kept of {self._lengths[sequence]}")
        self._lengths[sequence] = length

    def extend(
        self, sequence: int, tokens: Sequence[int], n_logits: int | None = None
    ) -> NDArray[np.float32]:
        """Append the tokens of a prompt in chunks, without drafting.

        Logits stay on the device, so `n_logits` must be 0; else raises NotSupported.
        """
        if n_logits != 0:
            raise NotSupported("the torch draft gives tokens and probabilities, and no logits")
        self._check(sequence, tokens, 0)
        at = 0
        with self._computing() as steps, steps.capturer.working():
            while at < len(tokens):
                start = self._lengths[sequence]
                n_kv = bucket(start + len(tokens) - at, self.n_ctx)
                n = min(chunk_length(self.shape, n_kv, self.layout.scratch_bytes), len(tokens) - at)
                n_kv = bucket(start + n, self.n_ctx)
                chunk = torch.tensor([tokens[at : at + n]], device=self._device)
                positions = torch.arange(start, start + n, device=self._device)[None]
                steps.network.hidden(chunk, positions, n_kv, lane=sequence)
                steps.capturer.wait()
                self._lengths[sequence] += n
                self.counters.n_fed += n
                at += n
        return np.empty((0, self.n_vocab), np.float32)

    def extend_batch(
        self, parts: Sequence[tuple[int, Sequence[int], int]]
    ) -> list[NDArray[np.float32]]:
        """Call `extend` for each (sequence, tokens, n_logits), one after the other."""
        return [self.extend(sequence, tokens, n) for sequence, tokens, n in parts]

    def checkpoint(self, sequence: int) -> int:
        """Return the length, which `restore` rewinds to."""
        return self.length(sequence)

    def restore(self, sequence: int, checkpoint: object) -> None:
        assert isinstance(checkpoint, int)
        self.rewind(sequence, checkpoint)

    def saved_bytes(self, sequence: int) -> int:
        """Return the size of the result of `save`."""
        steps = self._steps
        if steps is None:
            return 0
        rows = steps.network.held(sequence, self.length(sequence))
        n_bytes: int = rows.numel() * rows.element_size()
        return n_bytes

    def save(self, sequence: int) -> bytes:
        """Return the keys and values of the sequence, for `load`. Raises DeviceFailed."""
        with self._computing() as steps, steps.capturer.working():
            rows = steps.network.held(sequence, self.length(sequence))
            # One after the other, so that the device holds no second copy of all of them.
            parts = [part.contiguous().view(-1).view(torch.uint8).cpu() for part in rows]
            return b"".join(part.numpy().tobytes() for part in parts)

    def load(self, sequence: int, state: bytes, tokens: Sequence[int]) -> None:
        """Replace the sequence by a saved one of `tokens`. Raises DeviceFailed, DoesNotFit."""
        self.rewind(sequence, 0)
        self._check(sequence, tokens, 0)
        with self._computing() as steps, steps.capturer.working():
            rows = steps.network.held(sequence, len(tokens))
            if len(state) != rows.numel() * rows.element_size():
                raise DeviceFailed(f"{len(state)} bytes are no state of {len(tokens)} tokens")
            raw = torch.frombuffer(bytearray(state), dtype=rows.dtype)
            for held, part in zip(rows, raw.view(rows.shape), strict=True):
                held.copy_(part)
            steps.capturer.wait()
        self._lengths[sequence] = len(tokens)

    # -- drafting ---------------------------------------------------------------------------------

    def draft(
        self,
        parts: Sequence[tuple[int, Sequence[int]]],
        n_steps: int,
        drawing: Draws | None = None,
        top_k: int = 0,
    ) -> Drafted:
        """Append the new tokens of each (sequence, tokens) in one batch, and draft `n_steps` more.

        Each sequence then holds its new tokens and all drafted tokens but the last. Without draws,
        `p` and `gap` come from the softmax over the `top_k` greatest logits; 0: over all. Raises
        BadRequest, DoesNotFit or DeviceFailed.
        """
        for sequence, tokens in parts:
            self._check(sequence, tokens, n_steps - 1)
            if not tokens:
                raise BadRequest("nothing to draft from: no new token was given")
        self._check_steps(n_steps, drawing)
        sequences = tuple(sequence for sequence, _ in parts)
        if len(set(sequences)) != len(sequences):
            raise BadRequest("a sequence appears twice in one draft")
        for sequence, tokens in parts:
            if len(tokens) > MAX_FED:
                self.extend(sequence, tokens[:-1], 0)
        tails = [(s, tokens[-1:] if len(tokens) > MAX_FED else tokens) for s, tokens in parts]
        with self._computing() as steps:
            width = steps.begin({s: (self._lengths[s], tokens) for s, tokens in tails})
            n_positions = max(self._lengths[s] + len(tokens) for s, tokens in tails) + n_steps - 1
            drafted = self._run(steps, sequences, n_steps, width, n_positions, drawing, top_k)
        for sequence, tokens in tails:
            self._lengths[sequence] += len(tokens) + n_steps - 1
            self.counters.n_fed += len(tokens)
        self._parts = sequences
        return drafted

    def draft_more(
        self,
        sequences: Sequence[int],
        n_steps: int,
        drawing: Draws | None = None,
        top_k: int = 0,
    ) -> Drafted:
        """Draft `n_steps` more tokens on these sequences of the last draft.

        The last drafted token is appended first. The host feeds no tokens.
        """
        strange = [s for s in sequences if s not in self._parts]
        if strange:
            raise BadRequest(f"sequence {strange[0]} was not in the last draft")
        self._check_steps(n_steps, drawing)
        for sequence in sequences:
            self._check(sequence, (), n_steps)
        with self._computing() as steps:
            steps.go_on(sequences)
            n_positions = max(self._lengths[s] for s in sequences) + n_steps
            drafted = self._run(steps, tuple(sequences), n_steps, 0, n_positions, drawing, top_k)
        for sequence in sequences:
            self._lengths[sequence] += n_steps
        self._parts = tuple(sequences)
        return drafted

    def _run(
        self,
        steps: CapturedSteps,
        sequences: tuple[int, ...],
        n_steps: int,
        width: int,
        n_positions: int,
        drawing: Draws | None,
        top_k: int,
    ) -> Drafted:
        if drawing is not None:
            by_lane = np.zeros((n_steps, len(self._lengths)))
            by_lane[:, sequences] = drawing.uniforms
            temperatures = np.ones(len(self._lengths))  # unused lanes need a temperature too
            temperatures[list(sequences)] = drawing.temperature
            drawing = Draws(temperatures, by_lane)
        n_kv = bucket(n_positions, self.n_ctx)
        steps.run(n_steps, 1 + max(sequences), width, n_kv, drawing, top_k)
        out = steps.fetch("out", n_steps)[:, sequences]
        rows = None if drawing is None else steps.fetch("rows", n_steps)[:, sequences]
        tokens = out[:, :, 0].astype(np.int64)
        return Drafted(tokens, out[:, :, 1], out[:, :, 2], self.n_vocab, rows, self._kept)

    # -- checks -----------------------------------------------------------------------------------

    def _check(self, sequence: int, tokens: Sequence[int], n_more: int) -> None:
        needed = self.length(sequence) + len(tokens) + n_more
        if needed > self.n_ctx:
            raise DoesNotFit(
                f"{needed} tokens exceed the draft's context of {self.n_ctx}; raise --ctx-size"
            )
        bad = next((t for t in tokens if not 0 <= t < self.shape.n_vocab), None)
        if bad is not None:
            raise BadRequest(f"token {bad} is not in the vocabulary of {self.shape.n_vocab}")

    def _check_steps(self, n_steps: int, drawing: Draws | None) -> None:
        if not 1 <= n_steps <= self.n_steps_max:
            raise BadRequest(
                f"{n_steps} steps at once; between 1 and {self.n_steps_max} are possible"
            )
        if drawing is not None and not self.options.samples:
            raise BadRequest("this draft was opened without drawing (samples)")

    @contextmanager
    def _computing(self) -> Iterator[CapturedSteps]:
        """Turn torch's exceptions into ours. Lengths stay as before, so the draft may go on."""
        if self._steps is None:
            raise BadRequest("the draft has been closed")
        try:
            with torch.inference_mode():
                yield self._steps
        except torch.OutOfMemoryError as e:
            raise DoesNotFit(f"the torch draft ran out of memory on {self._device}: {e}") from e
        except RuntimeError as e:
            raise DeviceFailed(f"the torch draft failed on {self._device}: {e}") from e


class TorchEngine(ModelText):
    """A draft and its vocabulary, which libllama reads without weights. Close it, or use `with`."""

    def __init__(self, path: str | Path, options: TorchDraftOptions | None = None) -> None:
        """Open a draft and its vocabulary.

        Raises what TorchDraft raises, and BadModel for a file that libllama refuses.
        """
        self.options = options = options or TorchDraftOptions()
        self.sequences = TorchDraft(path, options)
        self.facts: ModelFacts = self.sequences.facts
        try:
            self._model = open_vocabulary(self.facts.path)
        except BaseException:
            self.sequences.close()
            raise

    @property
    def n_vocab(self) -> int:
        """Number of tokens in the file's vocabulary. Drafts may use fewer tokens."""
        return self._model.n_vocab

    @property
    def n_ctx(self) -> int:
        """Number of tokens that one sequence can hold."""
        return self.sequences.n_ctx

    def close(self) -> None:
        """Free everything; safe to call twice."""
        self.sequences.close()
        self._model.close()

    def __enter__(self) -> TorchEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
