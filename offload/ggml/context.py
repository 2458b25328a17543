"""Wraps libllama's contexts in objects that take and return bytes and arrays."""

from __future__ import annotations

import ctypes as C
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol, cast

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from offload.decode import SMALL_BATCH, Batch
from offload.errors import BadRequest, DecodeStopped, DeviceFailed, DoesNotFit, OffloadError
from offload.ggml.cells import Cells, OwnCells
from offload.ggml.compute_buffer import ComputeBuffer
from offload.ggml.library import interrupt, log
from offload.ggml.library.callback import Pending
from offload.ggml.library.lib import library
from offload.ggml.model import Model, making
from offload.ggml.ram_cache import RamCache
from offload.times.context_memory import POOLINGS, ROPE_SCALINGS, ContextOptions, RopeOptions

_CTX_PADDING = 256
FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}
ABORTED = 2
PARTIAL_STATE = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: recurrent and SWA parts only
ON_DEVICE = 2  # LLAMA_STATE_SEQ_FLAGS_ON_DEVICE: the tensors stay where they are
_LENDER = 255  # the last sequence that one stream of cells knows (LLAMA_MAX_SEQ), and no text has


class LlamaBatch:
    """A llama_batch over arrays of ours, filled anew for each decode."""

    def __init__(self, struct: Any, capacity: int, n_sequences: int) -> None:
        self._token = np.zeros(capacity, np.int32)
        self._pos = np.zeros(capacity, np.int32)
        self._n_seq_id = np.ones(capacity, np.int32)
        self._seq_id = np.zeros((capacity, n_sequences), np.int32)
        first, stride = self._seq_id.ctypes.data, self._seq_id.strides[0]
        self._seq_rows = np.array([first + i * stride for i in range(capacity)], np.uint64)
        self._wanted = np.zeros(capacity, np.int8)
        self.raw = struct()
        self._is_one = False  # the last batch was a single row with its logits wanted
        self._n_axes = 1  # axes of a row's position
        for name, array in (
            ("token", self._token),
            ("pos", self._pos),
            ("n_seq_id", self._n_seq_id),
            ("seq_id", self._seq_rows),
            ("logits", self._wanted),
        ):
            field = dict(struct._fields_)[name]
            setattr(self.raw, name, C.cast(array.ctypes.data, field))

    def take_rows(self, rows: NDArray[np.float32], *, alone: bool = False) -> None:
        """Attach row i of `rows` to token i of all later batches.

        With `alone`, later batches have rows but no tokens, and the library sets their positions.
        """
        self.raw.embd = C.cast(rows.ctypes.data, dict(self.raw._fields_)["embd"])
        if alone:
            self.raw.token = self.raw.pos = None

    def take_placed_rows(self, rows: NDArray[np.float32], *, has_mrope: bool) -> None:
        """Give all later batches row i of `rows` in place of token i, at the token's position.

        With `has_mrope`, the library reads four positions of each row: three that are the token's,
        and 0 (`llama_batch_compat::init`).
        """
        self.raw.embd = C.cast(rows.ctypes.data, dict(self.raw._fields_)["embd"])
        self.raw.token = None
        if has_mrope:
            self._n_axes = 3
            self._pos = np.zeros(4 * len(self._pos), np.int32)
            self.raw.pos = C.cast(self._pos.ctypes.data, dict(self.raw._fields_)["pos"])

    def fill(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int],
        wanted: Sequence[bool],
    ) -> Any:
        n = len(tokens)
        if n == 1 and wanted[0]:
            self._fill_one(tokens[0], positions[0], sequences[0])
            return self.raw
        self._is_one = False
        self.raw.n_tokens = n
        self._token[:n], self._pos[:n], self._wanted[:n] = tokens, positions, wanted
        self._n_seq_id[:n], self._seq_id[:n, 0] = 1, sequences
        if self._n_axes > 1:
            self._pos[: self._n_axes * n] = np.tile(self._pos[:n], self._n_axes)
            self._pos[self._n_axes * n : (self._n_axes + 1) * n] = 0
        return self.raw

    def fill_tree(
        self, tokens: Sequence[int], positions: Sequence[int], rows: Sequence[Sequence[int]]
    ) -> Any:
        """A batch whose rows belong to several sequences each. All logits are wanted."""
        n = len(tokens)
        self._is_one = False
        self.raw.n_tokens = n
        self._token[:n], self._pos[:n], self._wanted[:n] = tokens, positions, 1
        for i, row in enumerate(rows):
            self._n_seq_id[i], self._seq_id[i, : len(row)] = len(row), row
        return self.raw

    def _fill_one(self, token: int, position: int, sequence: int) -> None:
        """Fill in one token, the most frequent batch. Slices would take ten times as long."""
        self._token[0], self._pos[0], self._seq_id[0, 0] = token, position, sequence
        if not self._is_one:
            self.raw.n_tokens = self._n_seq_id[0] = self._wanted[0] = 1
            self._is_one = True


class _LibraryRows:
    """Numpy arrays over the library's row buffers, cached by the buffer's address.

    Making such an array takes longer than copying a few rows out of it.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._arrays: dict[int, NDArray[np.float32]] = {}

    def viewed(self, address: int, n_rows: int) -> NDArray[np.float32]:
        """The library's first `n_rows` rows at `address`, which the next decode changes."""
        rows = self._arrays.get(address)
        if rows is None or len(rows) < n_rows:
            # The library keeps its buffer until a batch needs a larger one.
            memory: Any = (C.c_float * (n_rows * self._width)).from_address(address)
            rows = np.frombuffer(memory, np.float32).reshape(-1, self._width)
            self._arrays[address] = rows
        return rows[:n_rows]


def with_a_row_each(wanted: Sequence[bool], n_ubatch: int, n_most: int) -> Sequence[bool]:
    """Return `wanted`, plus the last row of each ubatch that ends before the first wanted row.

    All added rows come before the rows that were wanted. Returns `wanted` itself if more than
    `n_most` rows would be asked for.
    """
    first = next((i for i, is_wanted in enumerate(wanted) if is_wanted), len(wanted))
    added = range(n_ubatch - 1, first // n_ubatch * n_ubatch, n_ubatch)
    if len(added) + sum(wanted) > n_most:
        return wanted
    asked = list(wanted)
    for i in added:
        asked[i] = True
    return asked


_ROPE_FIELDS = {
    "freq_base": "rope_freq_base",
    "freq_scale": "rope_freq_scale",
    **{name: name for name in ("yarn_orig_ctx", "yarn_ext_factor", "yarn_attn_factor")},
    **{name: name for name in ("yarn_beta_slow", "yarn_beta_fast")},
}


def _set_rope(params: Any, rope: RopeOptions) -> None:
    """Set the fields of llama_context_params that were chosen. Others keep the file's values."""
    if rope.scaling is not None:
        params.rope_scaling_type = ROPE_SCALINGS.index(rope.scaling)
    for name, field in _ROPE_FIELDS.items():
        value = getattr(rope, name)
        if value is not None:
            setattr(params, field, value)


_OF_MEMORY = re.compile(r"alloc|out of memory", re.I)


def _no_context(n_ctx: int, reason: str) -> OffloadError:
    """Return the error for a context that libllama did not make for this reason of its log.

    A smaller context helps only where memory is missing. Other reasons are about options.
    """
    if _OF_MEMORY.search(reason):
        return DoesNotFit(
            f"no context of {n_ctx} tokens could be made ({reason}); lower --ctx-size"
        )
    return BadRequest(f"the library makes no context with these options ({reason})")


class Tenant(Protocol):
    """The owner of data that lies in a scheduler's compute buffer between prompts."""

    compute_buffer: ComputeBuffer | None

    def planned_small(self) -> None:
        """The scheduler has planned a small graph, and has forgotten all others."""


class Context:
    """The KV cache and compute state of a model, and decoding with it."""

    def __init__(
        self,
        model: Model,
        options: ContextOptions,
        pending: Pending,
        pooling_type: int | None = None,
        target: Context | None = None,
        context_type: int = 0,
        ram_cache: RamCache | None = None,
        tenant: Tenant | None = None,
    ) -> None:
        """Make a context. With a `pooling_type` (llama.cpp's numbers) it computes embeddings too.

        With `target`, it drafts for that context. `context_type` is one of llama.cpp's numbers.
        `ram_cache` places the memory of a context whose KV cache is in RAM. `tenant` is the device
        that streams weights, and is told of graphs that were planned small. With it, prompts of
        several ubatches keep one allocation of their graphs (`_reserve`).
        """
        self._lib = lib = library()
        self._model, self._pending = model, pending
        params = lib.llama_context_default_params()
        if pooling_type is not None:
            params.embeddings, params.pooling_type = True, pooling_type
        if target is not None:
            params.ctx_type, params.ctx_other = context_type, target.handle
        # The library rounds n_ctx up to this multiple, but caps n_batch by the n_ctx it was given.
        # Each stream is rounded up, too.
        padding = _CTX_PADDING * options.n_streams
        params.n_ctx = -(-options.n_ctx // padding) * padding
        params.n_batch = options.n_batch
        n_sequences = options.n_sequences + options.n_tree_leaves
        params.n_ubatch, params.n_seq_max = options.n_ubatch, n_sequences
        params.n_outputs_max = params.n_outputs_max_per_seq = options.n_outputs
        params.n_rs_seq = options.n_rs_seq
        self._n_ubatch = options.n_ubatch
        self._n_outputs = min(options.n_outputs, options.n_ubatch)
        self._masked = False  # True: the library keeps hidden rows only of wanted tokens
        self._tenant = tenant  # the owner of data in the compute buffer
        self._was_small = False  # True if the scheduler's last plan was for a small graph
        params.n_threads, params.n_threads_batch = options.n_threads, options.n_threads_batch
        params.flash_attn_type = FLASH_ATTN[options.flash_attn]
        params.offload_kqv, params.kv_unified = options.kv_offload, options.n_streams == 1
        if options.n_streams > 1 and options.n_tree_leaves:
            raise BadRequest("the leaves of a tree of drafts share cells (kv_unified)")
        self.n_streams = options.n_streams  # parts of the KV cache that hold a sequence each
        # Our threshold, in supports_op, replaces ggml's own offload of host weights.
        params.op_offload = False
        if model.watch is not None:
            params.cb_eval = model.watch.callback
        _set_rope(params, options.rope)
        params.swa_full = options.swa_full
        params.no_perf = True
        params.type_k = int(GGMLQuantizationType[options.type_k.upper()])
        params.type_v = int(GGMLQuantizationType[options.type_v.upper()])
        self._ram_cache = ram_cache
        placing = nullcontext() if ram_cache is None else ram_cache.placing()
        self.handle: int | None = None
        with making(pending, self.close), placing:
            self.handle = lib.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise _no_context(options.n_ctx, log.take_reason())
        self._memory = lib.llama_get_memory(self.handle)
        self.n_ctx = int(lib.llama_n_ctx(self.handle))
        self.n_ctx_each = self.n_ctx // self.n_streams  # most tokens of one sequence
        if options.most_each:
            self.n_ctx_each = min(self.n_ctx_each, options.most_each)
        self.n_rs_seq = int(lib.llama_n_rs_seq(self.handle))
        self.n_batch = int(lib.llama_n_batch(self.handle))
        self.n_ubatch = int(lib.llama_n_ubatch(self.handle))
        self._batch = LlamaBatch(lib.structs.llama_batch, options.n_batch, n_sequences)
        self._logit_rows = _LibraryRows(model.n_vocab)
        self._hidden_rows = _LibraryRows(model.row_width)
        self.n_vocab, self.row_width = model.n_vocab, model.row_width
        own = self.n_streams > 1
        self.cells = OwnCells() if own else Cells(self.n_ctx, n_sequences)
        # A decode that a signal aborts is redone. Recurrent memory does not allow that, so signals
        # then wait for the end of the decode.
        self._can_abort = not model.is_recurrent
        if self._can_abort or interrupt.may_stop():
            interrupt.watch(lib, self.handle)

    def close(self) -> None:
        handle, self.handle = self.handle, None
        if handle and self._ram_cache is not None:
            self._ram_cache.close_before()
        if handle:
            self._lib.llama_free(handle)
        if self._ram_cache is not None:
            self._ram_cache.close_after()

    def decode(self, asked: Batch) -> NDArray[np.float32]:
        """Evaluate one batch; return a copy of the logits [number wanted, n_vocab], in batch order.

        All logits of a tree must be wanted. Raises what a callback raised, KeyboardInterrupt,
        DecodeStopped, DoesNotFit if the KV cache is full, or DeviceFailed. The memory may then hold
        part of the batch, so the caller must rewind.
        """
        tokens, positions, wanted = asked.tokens, asked.positions, asked.wanted
        sequences = asked.sequences
        if self._tenant is not None:
            self._plan_small(self._tenant, len(wanted))
        if isinstance(sequences[0], int):
            held = cast(Sequence[int], sequences)
            read = self._reserve(wanted) if self._tenant is not None else wanted
            batch = self._batch.fill(tokens, positions, held, read)
        else:
            batch = self._batch.fill_tree(
                tokens, positions, cast(Sequence[Sequence[int]], sequences)
            )
        status = ABORTED
        try:
            status = self._compute_whole(
                self._lib.llama_decode, batch, lambda: self._take_back(sequences, positions)
            )
        finally:
            self._placed(sequences, positions, is_whole=status == 0)
        if status != 0:
            self._raise(status, len(tokens))
        return self._logits([i for i, w in enumerate(wanted) if w])

    def decode_image(
        self,
        compute: Callable[[int | None, int], int],
        n_tokens: int,
        sequence: int,
        position: int,
    ) -> None:
        """Let `compute` decode an image of `n_tokens` at the end of the sequence, from `position`.

        `compute` gets the context and the most tokens of a batch, and returns libllama's status.
        Raises the errors of `decode`.
        """
        if self._tenant is not None:
            self._plan_small(self._tenant, n_tokens)
        status = ABORTED
        try:
            status = self._compute_whole(
                compute, self.n_batch, lambda: self.remove(sequence, position)
            )
        finally:
            # An image is removed whole, so one position stands for those of all its tokens.
            self._placed([sequence] * n_tokens, [position] * n_tokens, is_whole=status == 0)
        if status != 0:
            self._raise(status, n_tokens)

    def _placed(
        self, sequences: Sequence[int | Sequence[int]], positions: Sequence[int], *, is_whole: bool
    ) -> None:
        """Record the cells of a decode. One that failed keeps the tokens of its whole ubatches."""
        if not is_whole:
            firsts = [held if isinstance(held, int) else held[0] for held in sequences]
            ends = {sequence: self.last_position(sequence) for sequence in {*firsts}}
            kept = [i for i, at in enumerate(positions) if at <= ends[firsts[i]]]
            sequences, positions = [sequences[i] for i in kept], [positions[i] for i in kept]
        self.cells.place(sequences, positions)

    def _reserve(self, wanted: Sequence[bool]) -> Sequence[bool]:
        """Prepare the scheduler for a prompt of several ubatches. Returns the rows to ask for.

        Without this, the scheduler allocates each ubatch's graph anew, because the mask grows with
        the cache. It waits for all devices before each allocation, so none can compute ahead. It
        keeps an allocation only while graphs have the same number of nodes. A graph without logits
        has a different number, so each ubatch asks for a row.
        """
        n, n_ubatch = len(wanted), self._n_ubatch
        if n <= n_ubatch or self._masked or not self._lib.has_graph_reserve:
            return wanted
        asked = with_a_row_each(wanted, n_ubatch, self._n_outputs)
        was_small, self._was_small = self._was_small, False
        if asked is not wanted or was_small:
            self._lib.llama_graph_reserve(self.handle, n_ubatch, self.n_streams, self._n_outputs)
        return asked

    def _plan_small(self, tenant: Tenant, n_tokens: int) -> None:
        """Let the scheduler plan a small graph if the next one is small and its last plan was not.

        The scheduler keeps a prompt's plan for graphs with as many nodes. Their tensors would then
        be scattered over all of the buffer. A plan for a small graph uses its first bytes.
        """
        buffer, is_small = tenant.compute_buffer, n_tokens <= SMALL_BATCH
        if buffer is None:
            return
        if buffer.has_moved or (is_small and not buffer.is_planned_small):
            n, n_streams = min(SMALL_BATCH, self._n_ubatch), self.n_streams
            self._lib.llama_graph_reserve(self.handle, n, n_streams, min(n, self._n_outputs))
            self._pending.raise_first()
            tenant.planned_small()
        self._was_small = buffer.is_planned_small
        buffer.is_planned_small = is_small

    def _compute_whole(
        self,
        function: Callable[[int | None, Any], int],
        batch: Any,
        take_back: Callable[[], object],
    ) -> int:
        """Compute a batch, and again if a signal aborted it whose handler returned.

        `take_back` removes what an aborted decode wrote. Returns libllama's status.
        """
        self._pending.forget()
        while (status := self._compute_once(function, batch)) == ABORTED:
            take_back()
        return status

    def _take_back(
        self, sequences: Sequence[int | Sequence[int]], positions: Sequence[int]
    ) -> None:
        """Remove the tokens of a decode from the sequences that hold them."""
        for held_by, position in zip(sequences, positions, strict=True):
            for sequence in (held_by,) if isinstance(held_by, int) else held_by:
                self.remove(sequence, position)

    def _compute_once(self, function: Callable[[int | None, Any], int], batch: Any) -> int:
        with interrupt.during_decode(self._pending, can_abort=self._can_abort):
            status = function(self.handle, batch)
            # A device may still compute an earlier ubatch of a batch that failed.
            self._lib.llama_synchronize(self.handle)
        self._pending.raise_first()
        log.pending.raise_first()
        if status == ABORTED and interrupt.is_stopped():
            raise DecodeStopped("the decode was stopped")
        return status

    def _raise(self, status: int, n: int) -> None:
        if status == 1:
            raise DoesNotFit(
                f"no room for {n} more tokens in the KV cache of {self.n_ctx}; raise --ctx-size"
            )
        reason = log.take_reason()
        if status == -1:
            raise BadRequest(f"libllama refuses the batch of {n} tokens ({reason})")
        raise DeviceFailed(f"decoding {n} tokens failed with status {status} ({reason})")

    def _logits(self, rows: list[int]) -> NDArray[np.float32]:
        if not rows:
            return np.empty((0, self.n_vocab), np.float32)
        # Wanted rows lie one after the other in the output buffer, in batch order.
        address = self._lib.llama_get_logits_ith(self.handle, rows[0])
        if not address:
            raise DeviceFailed("libllama returned no logits for a row that asked for them")
        return self._logit_rows.viewed(address, len(rows)).copy()

    def keep_rows(self, *, masked: bool = False) -> None:
        """Make later decodes keep the hidden row of every token, which `rows` returns.

        With `masked`, they keep only the rows of tokens whose logits are wanted.
        """
        self._masked = masked
        self._lib.llama_set_embeddings_nextn(self.handle, True, masked)

    def add_nothing(self) -> None:
        """Add zeros to the rows after the last layer, which changes no row.

        Needed if later nodes of an architecture's graph overwrite these rows before `rows` reads
        them. The sum is a separate tensor, which the library keeps (llama_set_adapter_cvec).
        """
        lib, model = self._lib, self._model.handle
        width, last = lib.llama_model_n_embd(model), lib.llama_model_n_layer(model) - 1
        zeros = np.zeros(max(1, last) * width, np.float32)
        address = zeros.ctypes.data
        if lib.llama_set_adapter_cvec(self.handle, address, zeros.size, width, last, last) != 0:
            raise DeviceFailed(f"libllama refused a control vector ({log.take_reason()})")

    def rows(self, n_rows: int) -> NDArray[np.float32]:
        """Return a copy of the last decode's first `n_rows` hidden rows [n_rows, row_width]."""
        return self._viewed(self._lib.llama_get_embeddings_nextn(self.handle), n_rows).copy()

    def keep_layer_inputs(self, layers: Sequence[int]) -> None:
        """Make later decodes keep every token's input of these layers, for `layer_inputs`.

        -1 stands for the rows after the last layer. The library aborts if its graph of the model
        does not name a layer's input (`plan/row_draft.py`).
        """
        for layer in layers:
            if layer < 0:
                self.keep_rows()
            else:
                self._lib.llama_set_embeddings_layer_inp(self.handle, layer, True)

    def layer_inputs(self, layers: Sequence[int], n_rows: int) -> NDArray[np.float32]:
        """Return a copy of the last decode's layer inputs [n_rows, len(layers) * row_width]."""
        out = np.empty((n_rows, len(layers), self.row_width), np.float32)
        for i, layer in enumerate(layers):
            if layer < 0:
                address = self._lib.llama_get_embeddings_nextn(self.handle)
            else:
                address = self._lib.llama_get_embeddings_layer_inp(self.handle, layer)
            out[:, i] = self._viewed(address, n_rows)
        return out.reshape(n_rows, -1)

    def _viewed(self, address: int | None, n_rows: int) -> NDArray[np.float32]:
        """The library's rows at this address [n_rows, row_width], which the next decode changes."""
        if not address:
            raise DeviceFailed("libllama returned no hidden rows")
        return self._hidden_rows.viewed(address, n_rows)

    def remove(self, sequence: int, start: int) -> bool:
        """Forget positions from `start` on. Returns False if the memory cannot drop only these."""
        is_removed = bool(self._lib.llama_memory_seq_rm(self._memory, sequence, start, -1))
        if is_removed:
            self.cells.remove(sequence, start)
        return is_removed

    def clear(self) -> None:
        """Forget all sequences; the next token then gets the first cell again."""
        self._lib.llama_memory_clear(self._memory, False)
        self.cells.clear()

    def first_position(self, sequence: int) -> int:
        """Return the smallest position that every layer still holds; -1 for an empty sequence."""
        return int(self._lib.llama_memory_seq_pos_min(self._memory, sequence))

    def last_position(self, sequence: int) -> int:
        """Return the largest position that the memory holds; -1 for an empty sequence."""
        return int(self._lib.llama_memory_seq_pos_max(self._memory, sequence))

    def copy_sequence(self, source: int, target: int, start: int = -1, end: int = -1) -> None:
        """Let `target` share the cells of `source` at positions [start, end); -1: all.

        Sequences with cells of their own share none (`n_streams`).
        """
        assert self.n_streams == 1
        self._lib.llama_memory_seq_cp(self._memory, source, target, start, end)
        self.cells.copy(source, target, start, end)

    def state_bytes(self, sequence: int, flags: int) -> int:
        """Return the size of the result of `state`."""
        return int(self._lib.llama_state_seq_get_size_ext(self.handle, sequence, flags))

    def state(self, sequence: int, flags: int) -> bytes:
        size = self.state_bytes(sequence, flags)
        buffer = C.create_string_buffer(size)
        written = self._lib.llama_state_seq_get_data_ext(self.handle, buffer, size, sequence, flags)
        if not written:
            reason = log.take_reason()
            raise DeviceFailed(f"the state of sequence {sequence} could not be saved ({reason})")
        return buffer.raw[:written]

    def part_of_state(self, sequence: int, start: int, end: int) -> bytes:
        """Return the state of the positions [start, end) alone, for `add_state`.

        The memory must keep a cell of each token. The sequence's tokens are lent to another one
        meanwhile, which moves no cell. Ctrl-C waits until they are given back.
        """
        copy, remove = self._lib.llama_memory_seq_cp, self._lib.llama_memory_seq_rm
        with self._uninterrupted():
            copy(self._memory, sequence, _LENDER, -1, -1)
            try:
                remove(self._memory, sequence, -1, -1)
                copy(self._memory, _LENDER, sequence, start, end)
                return self.state(sequence, 0)
            finally:
                remove(self._memory, sequence, -1, -1)
                copy(self._memory, _LENDER, sequence, -1, -1)
                remove(self._memory, _LENDER, -1, -1)

    def add_state(self, sequence: int, state: bytes, positions: Sequence[int]) -> None:
        """Append the tokens of a `part_of_state`, at these positions. Raises DeviceFailed."""
        with self._uninterrupted():
            try:
                self.set_state(_LENDER, state, 0)
                self._lib.llama_memory_seq_cp(self._memory, _LENDER, sequence, -1, -1)
            finally:
                self._lib.llama_memory_seq_rm(self._memory, _LENDER, -1, -1)
            self.cells.place([sequence] * len(positions), positions)

    @contextmanager
    def _uninterrupted(self) -> Iterator[None]:
        """Let SIGINT's handler run after the block, which leaves nothing half done.

        It runs also after a block that failed. Otherwise the next decode would be interrupted.
        """
        try:
            with interrupt.deferred(self._pending):
                yield
        finally:
            self._pending.raise_first()

    def set_state(
        self, sequence: int, state: bytes, flags: int, positions: Sequence[int] | None = None
    ) -> None:
        """Replace what a sequence holds by a state of tokens at these `positions`.

        None: a partial state, which has no cells of full attention.
        """
        log.take_errors()
        read = self._lib.llama_state_seq_set_data_ext(
            self.handle, state, len(state), sequence, flags
        )
        if read != len(state):
            reason = log.take_reason()
            raise DeviceFailed(f"the state of sequence {sequence} could not be restored ({reason})")
        if positions is not None:
            self.cells.remove(sequence, -1)
            self.cells.place([sequence] * len(positions), positions)

    def attend_causally(self, is_causal: bool) -> None:
        """Let each token of later batches see only those before it, or all tokens of its batch."""
        self._lib.llama_set_causal_attn(self.handle, is_causal)

    def set_threads(self, n_threads: int, n_threads_batch: int) -> None:
        self._lib.llama_set_n_threads(self.handle, n_threads, n_threads_batch)


_Compute = Callable[[Batch], NDArray[np.float32]]  # returns the rows that the batch asks for


class Embedder(Context):
    """A context that embeds one text at a time. Close it before the model.

    An embedding is made of the model's last hidden states. llama.cpp pools them within one ubatch,
    so a longer text cannot be embedded.
    """

    def __init__(
        self,
        model: Model,
        options: ContextOptions,
        pooling: str,
        pending: Pending,
        decoder_of: Callable[[Embedder], _Compute] | None = None,
    ) -> None:
        """`options` are those of the context that generates. Raises DoesNotFit.

        `decoder_of` returns the function that computes embeddings on devices; None: the CPU does.
        """
        n = min(options.n_ubatch, options.n_ctx)
        own = replace(
            options, n_ctx=n, n_batch=n, n_ubatch=n, n_sequences=1, n_outputs=n, n_rs_seq=0
        )
        super().__init__(model, own, pending, POOLINGS.index(pooling))
        self.pooling = pooling
        self.n_most = n  # most tokens of a text
        self._compute: _Compute = self.decode if decoder_of is None else decoder_of(self)
        self._is_pooled = pooling != "none"
        self._width = self.row_width

    def embed(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return the embedding [1, width], or [number of tokens, width] without pooling.

        Embeddings are not normalised. Raises DoesNotFit for more than `n_most` tokens.
        """
        n = len(tokens)
        if n > self.n_most:
            raise DoesNotFit(
                f"a text of {n} tokens cannot be embedded: at most {self.n_most} are read at once; "
                "raise --ubatch-size"
            )
        try:
            return self._compute(Batch(tokens, range(n), [0] * n, [True] * n, n))
        finally:
            self.remove(0, 0)

    def _logits(self, rows: list[int]) -> NDArray[np.float32]:
        """Return the embedding [1, width] of sequence 0, or without pooling one row per token."""
        out = np.empty((1 if self._is_pooled else len(rows), self._width), np.float32)
        for at in range(len(out)):
            if self._is_pooled:
                address = self._lib.llama_get_embeddings_seq(self.handle, 0)
            else:
                address = self._lib.llama_get_embeddings_ith(self.handle, rows[at])
            if not address:
                raise DeviceFailed("libllama returned no embeddings")
            C.memmove(out[at].ctypes.data, address, out[at].nbytes)
        return out
