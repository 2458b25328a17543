"""Sequences of tokens in a context: extends, rewinds, shares, saves and restores them.

libllama holds the context. This module keeps each sequence's length and the number of tokens that
can be removed again. Recurrent and hybrid memories cannot be cut at any token: they roll back by
snapshots of the last decode (llama.cpp's n_rs_seq) or by checkpoints (docs/background.md).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from offload.decode import Batch, Rows
from offload.errors import BadRequest, DecodeStopped, DeviceFailed, DoesNotFit
from offload.ggml.cells import Cells
from offload.ggml.context import ON_DEVICE, PARTIAL_STATE, Context
from offload.ggml.library import interrupt
from offload.images.place_tokens import ImageSpan, image_spans, positions_of
from offload.sequences.leaf_sequences import LeafSequences
from offload.sequences.saved_state import MOST_HEAD_BYTES, PART_BYTES, end_of, parted, whole_of

if TYPE_CHECKING:
    from offload.sequences.row_draft import RowDraft

Decode = Callable[[Batch], Rows]  # returns the logits [number wanted, n_vocab], in batch order

# Decodes an image: (its numbers, sequence, position of its first place).
DecodeImage = Callable[[Sequence[int], int, int], None]

# Least share of a text that is worth copying all of it to a sequence with cells of its own. The
# rest is copied for nothing. Copying a token out and in takes a tenth of reading one, or less.
_WORTH_COPYING = 1 / 8
_LONG_TOKENS = 128  # tokens of a batch from which a recurrent memory is saved, so that it may stop


@dataclass(frozen=True)
class Checkpoint:
    """The recurrent state of a sequence at `length` tokens.

    A checkpoint on the device has a number, `serial`. The library keeps only the newest one of each
    sequence. For any other checkpoint, `state` holds the whole state, and `serial` is 0.
    """

    length: int
    state: bytes
    serial: int = 0
    n_cuts: int = 0  # number of cuts before; a later cut may free cells that the checkpoint needs
    row: Rows | None = None  # the follower's row at this length, if known
    is_asked: bool = False  # a request asked for it, so it is dropped after all others


@dataclass
class RollbackCounters:
    """Counts of checkpoints and restores."""

    checkpoints: int = 0
    restores: int = 0
    checkpoint_bytes: int = 0  # bytes copied through host memory


@dataclass(frozen=True)
class MemoryTraits:
    """How a model's memory holds sequences.

    `n_swa` is the sliding window in tokens if older keys are overwritten, else 0. `window` is the
    sliding window in both cases: the library never saves older keys.
    `most_state_bytes` is an upper bound of the size of a saved sequence.
    """

    architecture: str
    is_recurrent: bool
    is_hybrid: bool
    device_checkpoints: bool
    most_state_bytes: int
    n_swa: int = 0
    window: int = 0
    saves_parts: bool = False  # True: a state can be saved and loaded in parts
    made_by: Callable[[], Mapping[str, str]] = dict  # what a saved state depends on, by name

    @property
    def keeps_all(self) -> bool:
        """True if the memory keeps a cell of each token until it is removed, as trees need."""
        return not (self.is_recurrent or self.n_swa)


class Sequences:
    """`n_sequences` sequences of tokens in one context."""

    def __init__(
        self,
        context: Context,
        decode: Decode,
        memory: MemoryTraits,
        *,
        n_sequences: int,
        n_outputs: int,
        n_tree_leaves: int = 0,
        n_devices: int = 1,
        follower: RowDraft | None = None,
        on_text: Callable[[int, Sequence[int]], None] | None = None,
        decode_image: DecodeImage | None = None,
    ) -> None:
        """`follower` is notified of all changes of the sequences. `n_devices` compute the layers.

        `on_text` gets a sequence and a text that it will hold (`foresee`). Without `decode_image`,
        no prompt may have images.
        """
        self._context, self._decode, self._follower = context, decode, follower
        self._architecture = memory.architecture
        self._made_by = memory.made_by
        self._n_sequences = n_sequences
        self.n_outputs = n_outputs
        self.n_batch = context.n_batch
        self.most_state_bytes = memory.most_state_bytes
        self._n_swa, self._window = memory.n_swa, max(memory.n_swa, memory.window)
        self.saves_parts = memory.saves_parts
        self.part_bytes = PART_BYTES
        self._on_text, self._decode_image = on_text, decode_image
        self._images: list[list[ImageSpan]] = [[] for _ in range(n_sequences)]
        # Tokens by which a sequence is longer than its positions, because of images with M-RoPE.
        self._n_saved = [0] * n_sequences
        self.n_tree_leaves = n_tree_leaves if memory.keeps_all else 0
        self._tree: LeafSequences | None = None  # between extend_tree and keep_path
        self._tree_of = 0  # its sequence
        self._tree_tokens: list[int] = []  # by node
        self.device_checkpoints = memory.device_checkpoints
        self.n_vocab, self.n_ctx = context.n_vocab, context.n_ctx_each
        self.n_cells = context.n_ctx  # cells of all sequences together
        self.has_own_cells = context.n_streams > 1  # each sequence has; otherwise all share them
        self.can_rewind = not memory.is_recurrent
        self._is_hybrid = memory.is_hybrid
        self._n_ubatch = context.n_ubatch
        self.n_rs_seq = context.n_rs_seq
        self.rollbacks = RollbackCounters()
        self._lengths = [0] * n_sequences
        # Tokens at the end of each recurrent sequence that snapshots of the last decode can remove.
        # Older snapshots are stale, but the library would restore them without an error.
        self._snapshots = [0] * n_sequences
        self._serials = [0] * n_sequences
        self._n_cuts = [0] * n_sequences
        self._newest: list[Checkpoint | None] = [None] * n_sequences  # those on the device
        # The last of several devices may still compute the ubatch before the one that is stopped.
        self._n_unsure = context.n_ubatch if n_devices > 1 else 0
        self.may_stop = self.can_rewind  # False: the running batch would lose texts if it stopped
        # (number of a cut, length after it), both rising, to find the shortest length since a cut.
        self._cuts: list[list[tuple[int, int]]] = [[] for _ in range(n_sequences)]

    @functools.cached_property
    def made_by(self) -> Mapping[str, str]:
        """The settings that a saved state depends on. They are equal where it can be restored."""
        return self._made_by()

    def length(self, sequence: int = 0) -> int:
        """Return the tokens that the sequence holds. Raises BadRequest if it does not exist."""
        if not 0 <= sequence < self._n_sequences:
            raise BadRequest(
                f"sequence {sequence} does not exist; the engine has {self._n_sequences}"
            )
        return self._lengths[sequence]

    def foresee(self, sequence: int, text: Sequence[int]) -> None:
        """Say that the sequence will hold `text`, so that rows of tables can be read ahead.

        It may hold the beginning already. Nothing else depends on it.
        """
        if self._on_text is not None and min(text, default=0) >= 0:
            self._on_text(sequence, text)

    @property
    def cells(self) -> Cells:
        """The cells of the KV cache, and who holds them."""
        return self._context.cells

    # -- extending -------------------------------------------------------------------------------

    def extend(self, sequence: int, tokens: Sequence[int], n_logits: int | None = None) -> Rows:
        """Append tokens; return logits [n_logits, n_vocab] after each of the last `n_logits`.

        `n_logits` defaults to all tokens. The caller may keep the array. After an error the
        sequence holds the same tokens as before, or nothing if the model is recurrent.
        Raises BadRequest, DoesNotFit, DeviceFailed.
        """
        start = self.length(sequence)
        n_logits = len(tokens) if n_logits is None else n_logits
        self._check(tokens, start, n_logits)
        if n_logits == len(tokens) == 1:
            return self._extend_one(sequence, tokens, start)
        first_wanted = len(tokens) - n_logits
        parts: list[Rows] = []
        done = 0
        try:
            for end in self._chunk_ends(len(tokens), first_wanted):
                chunk = tokens[done:end]
                wanted = [i >= first_wanted for i in range(done, end)]
                at = start - self._n_saved[sequence]
                positions = range(at + done, at + end)
                rows = self._decode(
                    Batch(chunk, positions, [sequence] * len(chunk), wanted, self._n_ubatch)
                )
                if len(rows):
                    parts.append(rows)
                if self._follower is not None:
                    self._follower.decoded([(sequence, start + done, chunk)])
                self._grown([(sequence, end - done)])
                done = end
        except BaseException:
            self._undo(sequence, start)
            raise
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty((0, self.n_vocab), np.float32)

    def _extend_one(self, sequence: int, tokens: Sequence[int], start: int) -> Rows:
        """A faster `extend` for one token, which is by far the most frequent case."""
        try:
            position = start - self._n_saved[sequence]
            rows = self._decode(Batch(tokens, (position,), (sequence,), (True,), self._n_ubatch))
            if self._follower is not None:
                self._follower.decoded(((sequence, start, tokens),))
        except BaseException:
            self._undo(sequence, start)
            raise
        self._grown(((sequence, 1),))
        return rows

    def prefill(self, sequence: int, tokens: Sequence[int]) -> Iterator[None]:
        """Append tokens without logits. Yields after each decode, so that the caller may stop.

        Raises the errors of `extend`. After an error the sequence holds the tokens of the decodes
        before it, or nothing if the model is recurrent.
        """
        done = 0
        for end in self._chunk_ends(len(tokens), len(tokens)):
            self.extend(sequence, tokens[done:end], 0)
            done = end
            yield

    def _chunk_ends(self, n_tokens: int, first_wanted: int) -> list[int]:
        """Return the ends of decodes with at most n_batch tokens and n_outputs wanted rows each."""
        ends, done = [], 0
        while done < n_tokens:
            end = min(done + self.n_batch, n_tokens)
            if end - max(done, first_wanted) > self.n_outputs:
                end = max(done, first_wanted) + self.n_outputs
            ends.append(end)
            done = end
        return ends

    def extend_batch(self, parts: Sequence[tuple[int, Sequence[int], int]]) -> list[Rows]:
        """Append tokens to several sequences in one decode.

        Each part is (sequence, tokens, n_logits). Returns for each part the logits
        [n_logits, n_vocab] after its last `n_logits` tokens.

        After an error each sequence holds the same tokens as before, or nothing if the model is
        recurrent. Raises BadRequest, DoesNotFit, DeviceFailed, and DecodeStopped. A stopped batch
        keeps the tokens of its whole ubatches (`keeps_ubatches`) in parts without logits. A
        recurrent memory that was saved before (`may_stop`) goes back to that state.

        A part may be the numbers of one image (`offload/images/place_tokens.py`), without logits.
        """
        if any([part and part[0] < 0 for _, part, _ in parts]):
            return self._extend_with_images(parts)
        # Recurrent memories batch sequences only in ascending order.
        order = sorted(range(len(parts)), key=lambda i: parts[i][0])
        tokens: list[int] = []
        positions: list[int] = []
        sequences: list[int] = []
        wanted: list[bool] = []
        starts = {}
        for i in order:
            sequence, part, n_logits = parts[i]
            start = self.length(sequence)
            if sequence in starts:
                raise BadRequest(f"sequence {sequence} appears twice in one batch")
            self._check(part, start, n_logits)
            starts[sequence] = start
            tokens += part
            at = start - self._n_saved[sequence]
            positions += range(at, at + len(part))
            sequences += [sequence] * len(part)
            wanted += [False] * (len(part) - n_logits) + [True] * n_logits
        n_wanted = sum(wanted)
        if len(tokens) > self.n_batch or n_wanted > self.n_outputs:
            raise DoesNotFit(
                f"a batch of {len(tokens)} tokens with {n_wanted} rows of logits exceeds "
                f"{self.n_batch} tokens (--batch-size) or {self.n_outputs} rows"
            )
        saved = self._saved(starts) if len(tokens) >= _LONG_TOKENS else {}
        try:
            rows = self._decode(Batch(tokens, positions, sequences, wanted, self._n_ubatch))
            if self._follower is not None:
                self._follower.decoded(
                    [(s, starts[s], part) for s, part, _ in map(parts.__getitem__, order)]
                )
        except DecodeStopped:
            for sequence, part, n_logits in parts:
                if sequence in saved:
                    self.restore(sequence, saved[sequence])
                elif n_logits or not self._keep_whole(sequence, len(part)):
                    self._undo(sequence, starts[sequence])
            raise
        except BaseException:
            for sequence, start in starts.items():
                self._undo(sequence, start)
            raise
        finally:
            self.may_stop = self.can_rewind
        self._grown([(sequence, len(part)) for sequence, part, _ in parts])
        out: list[Rows] = [rows] * len(parts)
        at = 0  # of the rows
        for i in order:
            n_logits = parts[i][2]
            out[i] = rows[at : at + n_logits]
            at += n_logits
        return out

    def _extend_with_images(self, parts: Sequence[tuple[int, Sequence[int], int]]) -> list[Rows]:
        """Decode the images one at a time, then the texts in one decode.

        If that decode is stopped, the images stay.
        """
        images = [(sequence, part) for sequence, part, _ in parts if part[0] < 0]
        texts = [part for part in parts if part[1][0] >= 0]
        starts = {sequence: self.length(sequence) for sequence, _ in images}
        try:
            for sequence, numbers in images:
                self._extend_image(sequence, numbers)
            rows = iter(self.extend_batch(texts) if texts else ())
        except DecodeStopped:
            raise
        except BaseException:
            for sequence, start in starts.items():
                if self._lengths[sequence] > start:
                    self._undo(sequence, start)
            raise
        none = np.empty((0, self.n_vocab), np.float32)
        return [none if part[0] < 0 else next(rows) for _, part, _ in parts]

    def _extend_image(self, sequence: int, numbers: Sequence[int]) -> None:
        start = self.length(sequence)
        span = image_spans(numbers)[0]
        if self._decode_image is None or span.n_places != len(numbers):
            raise BadRequest(f"{len(numbers)} numbers of an image of {span.n_places} tokens")
        self._check_room(start + len(numbers))
        try:
            self._decode_image(numbers, sequence, start - self._n_saved[sequence])
        except BaseException:
            self._undo(sequence, start)
            raise
        self._grown([(sequence, len(numbers))])
        self._snapshots[sequence] = 0  # an image is removed whole, or not at all
        self._add_image(sequence, replace(span, start=start))

    def _add_image(self, sequence: int, span: ImageSpan) -> None:
        self._images[sequence].append(span)
        self._n_saved[sequence] += span.n_saved

    def _position(self, sequence: int, length: int) -> int:
        """Return the position after the first `length` tokens of the sequence."""
        images = self._images[sequence]
        return length - sum([span.n_saved for span in images if span.end <= length])

    def _before_image(self, sequence: int, length: int) -> int:
        """Return the start of the image that is cut at `length`; `length` if none is."""
        cut = (span.start for span in self._images[sequence] if span.start < length < span.end)
        return next(cut, length)

    def __repr__(self) -> str:
        return f"Sequences({self._n_sequences} of {self.n_cells} cells, lengths {self._lengths})"

    @property
    def needs_equal_lengths(self) -> bool:
        """True if an ubatch takes equally many tokens of each sequence.

        Recurrent memories batch so, and so do caches with cells for each sequence (`split_equal`).
        What is longer goes into further ubatches.
        """
        return not self.can_rewind or self.has_own_cells

    @property
    def keeps_ubatches(self) -> bool:
        """True if a stopped batch keeps the tokens of the ubatches that were computed.

        The follower would lack the rows of these tokens.
        """
        return self.can_rewind and self._follower is None

    def _saved(self, sequences: Iterable[int]) -> dict[int, Checkpoint]:
        """Save recurrent sequences before a long batch that another thread may stop.

        An empty sequence needs nothing, because it is emptied again.
        """
        if self.can_rewind or not interrupt.may_stop():
            return {}
        saved = {s: self.checkpoint(s) for s in sequences if self._lengths[s]}
        self.may_stop = True
        return saved

    def _keep_whole(self, sequence: int, n_tokens: int) -> bool:
        """Keep what a stopped batch has computed of `n_tokens` new tokens of the sequence.

        The library has removed the tokens of the ubatch in which it stopped. Returns False if
        nothing new can be kept.
        """
        start = self._lengths[sequence]
        end = self._context.last_position(sequence) + 1 - self._n_unsure + self._n_saved[sequence]
        if not (self.keeps_ubatches and start < end <= start + n_tokens):
            return False
        if not self._context.remove(sequence, self._position(sequence, end)):
            return False
        self._was_cut(sequence, end)
        return True

    def _grown(self, parts: Sequence[tuple[int, int]]) -> None:
        """Record the appended tokens of a decode: (sequence, number of tokens) of each part."""
        n_droppable = self.n_droppable(parts)
        self._snapshots = [0] * self._n_sequences
        for sequence, n_tokens in parts:
            self._lengths[sequence] += n_tokens
            # The state before the first token of a decode is not among its snapshots.
            self._snapshots[sequence] = min(n_tokens - 1, n_droppable)

    def n_droppable(self, parts: Sequence[tuple[int, int]]) -> int:
        """Return the most tokens that snapshots can remove from each sequence after a decode.

        `parts`: (sequence, number of tokens) of the decode. Applies to recurrent models. Returns 0
        if only checkpoints work.

        Snapshots of several sequences are usable only if one ubatch computed all of them: the next
        ubatch may move a sequence's state to another cell without its snapshots
        (llama-memory-recurrent.cpp: find_slot). One ubatch takes sequences of equal length, and
        only neighbours, unless the memory is hybrid and all share one cache.
        """
        if len(parts) > 1:
            if len({n for _, n in parts}) > 1 or parts[0][1] * len(parts) > self._n_ubatch:
                return 0
            first, last = min(parts)[0], max(parts)[0]
            takes_any = self._is_hybrid and not self.has_own_cells
            if not takes_any and last - first >= len(parts):
                return 0
        return self.n_rs_seq

    def _check(
        self, tokens: Sequence[int], start: int, n_logits: int, n_positions: int | None = None
    ) -> None:
        if not len(tokens):
            raise BadRequest("no tokens to evaluate: the prompt is empty")
        if not 0 <= n_logits <= len(tokens):
            raise BadRequest(f"{n_logits} rows of logits were asked of {len(tokens)} tokens")
        self._check_room(start + (len(tokens) if n_positions is None else n_positions))
        low, high = min(tokens), max(tokens)
        if low < 0 or high >= self.n_vocab:
            bad = low if low < 0 else high
            raise BadRequest(f"token {bad} is not in the vocabulary of {self.n_vocab}")

    def _check_room(self, n_tokens: int) -> None:
        if n_tokens > self.n_ctx:
            raise DoesNotFit(
                f"{n_tokens} tokens exceed the context of {self.n_ctx}; "
                "shorten the prompt or raise --ctx-size"
            )

    # -- trees -----------------------------------------------------------------------------------

    def extend_tree(self, sequence: int, tokens: Sequence[int], parents: Sequence[int]) -> Rows:
        """Evaluate nodes of a tree after the sequence; return logits [len(tokens), n_vocab].

        A row sees the sequence and its own ancestors. `parents` are indices of the tree's nodes,
        those of earlier calls included, or -1 for the sequence's last token. `keep_path` ends the
        tree. After an error the tree is gone, and the sequence holds the same tokens as before.
        Raises BadRequest, DoesNotFit, DeviceFailed.
        """
        start = self.length(sequence)
        try:
            if not self.n_tree_leaves:
                raise BadRequest(f"this context of {self._architecture} evaluates no trees")
            if self._n_saved[sequence]:
                raise BadRequest("no tree can follow an image with positions in two dimensions")
            if self._tree is None:
                leaves = range(self._n_sequences, self._n_sequences + self.n_tree_leaves)
                self._tree, self._tree_of = LeafSequences(sequence, start, leaves), sequence
            elif self._tree_of != sequence:
                raise BadRequest(f"sequence {self._tree_of} has a tree; keep_path must come first")
            if len(tokens) != len(parents):
                raise BadRequest(f"{len(tokens)} nodes of a tree have {len(parents)} parents")
            if len(tokens) > min(self.n_outputs, self.n_batch):
                raise DoesNotFit(f"{len(tokens)} nodes of a tree exceed {self.n_outputs} rows")
            level = self._tree.grow(parents)
            self._check(tokens, start, len(tokens), max(level.positions, default=0) + 1 - start)
            for copy in level.copies:
                self._context.copy_sequence(copy.source, copy.target, 0, copy.end)
            wanted = [True] * len(tokens)
            rows = self._decode(Batch(tokens, level.positions, level.rows, wanted, self._n_ubatch))
            self._tree_tokens += tokens
            if self._follower is not None:
                self._follower.tree_decoded(len(tokens))
            return rows
        except BaseException:
            self._drop_tree()
            raise

    def keep_path(self, sequence: int, path: Sequence[int]) -> None:
        """End the tree after `sequence`: append the nodes of `path`, root first, drop the others.

        An empty path does nothing if there is no tree. Raises BadRequest if `path` is of no tree.
        """
        tree = self._tree
        if not path:
            self._drop_tree()
            return
        if tree is None or self._tree_of != sequence:
            raise BadRequest(f"sequence {sequence} has no tree to keep a path of")
        try:
            end = tree.start + len(path)
            self._context.copy_sequence(tree.holder_of(path), sequence, tree.start, end)
            self._lengths[sequence] = end
        except BaseException:
            self._drop_tree()
            raise
        self._drop_tree(path)

    def _drop_tree(self, kept: Sequence[int] = ()) -> None:
        """Forget the tree. The sequence holds the nodes of the path `kept` by now."""
        tree, tokens = self._tree, [self._tree_tokens[node] for node in kept]
        self._tree, self._tree_tokens = None, []
        if tree is not None:
            if self._follower is not None:
                self._follower.tree_ended(self._tree_of, tree.start, tokens, kept)
            for leaf in tree.used:
                self._context.remove(leaf, -1)
            self._clear_if_empty()

    # -- going back ------------------------------------------------------------------------------

    def can_drop(self, sequence: int, n_tokens: int) -> bool:
        """True if `rewind` can remove the last `n_tokens` of the sequence now."""
        held = self.length(sequence)
        if n_tokens in (0, held):
            return True
        if not self._window_holds(sequence, held - n_tokens):
            return False
        return self.can_rewind or n_tokens <= self._snapshots[sequence]

    def resumable(self, sequence: int, length: int) -> int:
        """Return the length to cut to, if the next text begins with the first `length` tokens held.

        That is `length`, or one less if the follower needs the last of these tokens computed again
        and the sequence can be cut there. An image is kept whole or dropped whole.
        """
        length = self._before_image(sequence, length)
        if self._follower is None or not length:
            return length
        if self._follower.row(sequence, length) is not None:
            return length
        if self._before_image(sequence, length - 1) != length - 1:
            return length  # only the whole image could be computed again
        dropped = self.length(sequence) - length + 1
        return length - 1 if self.can_drop(sequence, dropped) else length

    def _window_holds(self, sequence: int, length: int) -> bool:
        """True if no key in the sliding windows that end at `length` was overwritten."""
        if not self._window:
            return True
        position = self._position(sequence, length)
        return self._context.first_position(sequence) <= max(0, position - self._window)

    def rewind(self, sequence: int, length: int) -> None:
        """Keep the first `length` tokens of the sequence.

        Raises BadRequest for recurrent models, unless `can_drop` says that it works.
        """
        held = self.length(sequence)
        if not 0 <= length <= held:
            raise BadRequest(f"cannot rewind sequence {sequence} from {held} to {length} tokens")
        if length == held:
            return
        if self._before_image(sequence, length) != length:
            raise BadRequest(f"{held} tokens cannot be cut to {length}, inside an image")
        position = self._position(sequence, length)
        if length and not self._window_holds(sequence, length):
            raise BadRequest(
                f"{held} tokens cannot be cut to {length}: the sliding windows of "
                f"{self._architecture} have passed what comes before; evaluate them anew, or open "
                "the model with --swa-full"
            )
        if not (
            self.can_drop(sequence, held - length) and self._context.remove(sequence, position)
        ):
            raise BadRequest(
                f"{self._architecture} models are recurrent: {held} tokens cannot be cut to "
                f"{length}, only to the last {self._snapshots[sequence]} less; use a checkpoint"
            )
        # After restoring one snapshot, no other one can be restored until the next decode.
        self._was_cut(sequence, length)
        self._clear_if_empty()

    def _was_cut(self, sequence: int, length: int) -> None:
        self._lengths[sequence] = length
        if self._follower is not None:
            if length:
                self._follower.was_cut(sequence, length)
            else:
                self._follower.emptied(sequence)
        self._snapshots[sequence] = 0
        if self._images[sequence]:
            kept = [span for span in self._images[sequence] if span.end <= length]
            self._set_images(sequence, kept)
        self._n_cuts[sequence] += 1
        cuts = self._cuts[sequence]
        while cuts and cuts[-1][1] >= length:
            cuts.pop()
        cuts.append((self._n_cuts[sequence], length))

    def _set_images(self, sequence: int, images: Iterable[ImageSpan]) -> None:
        self._images[sequence] = list(images)
        self._n_saved[sequence] = sum([span.n_saved for span in self._images[sequence]])

    def _undo(self, sequence: int, length: int) -> None:
        """Cut to `length` after a failed decode, or to 0 if the memory cannot be cut."""
        is_held = self.can_rewind and (not length or self._window_holds(sequence, length))
        position = self._position(sequence, length)
        if not (is_held and self._context.remove(sequence, position)):
            self._context.remove(sequence, 0)
            length = 0
        self._was_cut(sequence, length)
        self._clear_if_empty()

    def checkpoint(self, sequence: int, *, lasting: bool = False) -> Checkpoint:
        """Return the sequence's recurrent state now (LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY).

        Unless `lasting`, the state stays on the device if `device_checkpoints` is set. The
        sequence's next checkpoint then invalidates it (LLAMA_STATE_SEQ_FLAGS_ON_DEVICE).
        """
        length = self.length(sequence)
        newest = self._newest[sequence]
        if newest and not lasting and (newest.length, newest.n_cuts) == (
            length, self._n_cuts[sequence],
        ):  # fmt: skip
            return newest  # the sequence is as it was then
        row = None if self._follower is None else self._follower.row(sequence, length)
        self.rollbacks.checkpoints += 1
        if self.device_checkpoints and not lasting and length:
            self._serials[sequence] += 1
            state = self._context.state(sequence, PARTIAL_STATE | ON_DEVICE)
            made = Checkpoint(length, state, self._serials[sequence], self._n_cuts[sequence], row)
            self._newest[sequence] = made
            return made
        state = self._context.state(sequence, PARTIAL_STATE)
        self.rollbacks.checkpoint_bytes += len(state)
        return Checkpoint(length, state, 0, self._n_cuts[sequence], row)

    def checkpoint_bytes(self, sequence: int) -> int:
        """Return the size in bytes that a lasting checkpoint of the sequence would have now."""
        return self._context.state_bytes(sequence, PARTIAL_STATE)

    def can_restore(self, sequence: int, checkpoint: Checkpoint) -> bool:
        """False if the sequence was cut to fewer tokens than the checkpoint's since it was made."""
        return self._shortest_since(sequence, checkpoint) >= checkpoint.length

    def _shortest_since(self, sequence: int, checkpoint: Checkpoint) -> int:
        later = (n for number, n in self._cuts[sequence] if number > checkpoint.n_cuts)
        return next(later, self._lengths[sequence])

    def restore(self, sequence: int, checkpoint: object) -> None:
        """Go back to a checkpoint of this sequence.

        The attention cells of later tokens survive a partial restore, so they are removed. Raises
        BadRequest if a newer checkpoint has replaced this one, or if the sequence was cut to fewer
        tokens since, so that cells are missing.
        """
        if not isinstance(checkpoint, Checkpoint):
            raise BadRequest(f"not a checkpoint of this engine: {checkpoint!r}")
        self.length(sequence)
        if checkpoint.serial not in (0, self._serials[sequence]):
            raise BadRequest(
                f"checkpoint {checkpoint.serial} of sequence {sequence} was replaced by "
                f"{self._serials[sequence]}: the device keeps the newest only"
            )
        if not self.can_restore(sequence, checkpoint):
            raise BadRequest(
                f"the checkpoint at {checkpoint.length} tokens of sequence {sequence} is void: the "
                f"sequence was cut to {self._shortest_since(sequence, checkpoint)} since"
            )
        flags = PARTIAL_STATE | ON_DEVICE if checkpoint.serial else PARTIAL_STATE
        self._context.set_state(sequence, checkpoint.state, flags)
        self._context.remove(sequence, self._position(sequence, checkpoint.length))
        self._was_cut(sequence, checkpoint.length)
        if self._follower is not None:
            self._follower.restored(sequence, checkpoint.length, checkpoint.row)
        self.rollbacks.restores += 1

    def _clear_if_empty(self) -> None:
        """Clear the memory if no sequence holds a token, so that the next one gets the first cell.

        Attention sums over cells in order, in groups counted from the first cell. So the same
        tokens in other cells give results that differ in the last bits. Without clearing, the
        library may search for free cells from the middle of a sliding window's memory.
        """
        if not any(self._lengths):
            self._context.clear()

    # -- sharing and saving ----------------------------------------------------------------------

    def can_share(self, source: int, n_tokens: int) -> bool:
        """True if another sequence can begin with the first `n_tokens` tokens of `source`.

        A sequence with cells of its own gets a copy of all tokens, of which it keeps the first.
        A copy has no keys that sliding windows have passed, so it cannot be cut.
        """
        n_held = self.length(source)
        if n_tokens == n_held:
            return True
        if self.has_own_cells and (self._window or n_tokens < _WORTH_COPYING * n_held):
            return False
        return self.can_rewind and self._window_holds(source, n_tokens)

    def share(self, source: int, sequence: int, n_tokens: int) -> None:
        """Let an empty sequence begin with the first `n_tokens` of `source`.

        They share the cells, unless each sequence has its own. Then they are copied. Raises
        BadRequest if `can_share` returns False, or if the sequence is not empty. Raises
        DeviceFailed if a copy fails. The sequence is empty then.
        """
        if self.length(sequence) or not self.can_share(source, n_tokens):
            raise BadRequest(f"sequence {sequence} cannot begin with {n_tokens} tokens of {source}")
        if n_tokens:
            self._share_cells(source, sequence, n_tokens)
        self._begun(sequence, n_tokens)
        self._set_images(sequence, [i for i in self._images[source] if i.end <= n_tokens])
        if self._follower is not None:
            self._follower.shared(source, sequence, n_tokens)

    def _share_cells(self, source: int, sequence: int, n_tokens: int) -> None:
        """Give a sequence the cells of the first `n_tokens` of `source`, or a copy of them.

        The library copies only whole streams, and only at the next decode, from what the source
        holds by then (`llama_kv_cache::seq_cp`). So the copy goes through a saved state.
        """
        end = self._position(source, n_tokens)
        if not self.has_own_cells:
            self._context.copy_sequence(source, sequence, 0, end)
            return
        try:
            state, n_held = self._context.state(source, 0), self.length(source)
            self._context.set_state(sequence, state, 0, range(n_held))
            if n_tokens < n_held and not self._context.remove(sequence, end):
                raise DeviceFailed(f"a copy of {n_held} tokens was not cut to {n_tokens}")
        except BaseException:
            self._context.remove(sequence, 0)
            raise

    @property
    def goes_back_by_checkpoints(self) -> bool:
        """True for a recurrent memory, and for one with sliding windows, which forgets old keys."""
        return not self.can_rewind or bool(self._n_swa)

    @property
    def saves_all(self) -> bool:
        """False for models with sliding windows, whose older keys are not saved.

        A loaded sequence of such a model can be continued, but not cut.
        """
        return not self._window

    @property
    def can_cut_loaded(self) -> bool:
        """True if a loaded sequence can be cut to any of its tokens."""
        return self.can_rewind and self.saves_all

    def state_bytes(self, sequence: int) -> int:
        """Return the size in bytes of the target's own state of a sequence."""
        return self._context.state_bytes(sequence, 0)

    def saved_bytes(self, sequence: int) -> int:
        """Return an upper bound of the bytes to save, without tokens that wait in the follower."""
        n_bytes = self._context.state_bytes(sequence, 0)
        if self.saves_parts:
            n_bytes += n_bytes // self.part_bytes * MOST_HEAD_BYTES
        return n_bytes if self._follower is None else n_bytes + self._follower.saved_bytes(sequence)

    def save(self, sequence: int) -> bytes:
        """Return the state of the whole sequence and the follower's data, for `load`."""
        return whole_of(self._context.state(sequence, 0), self._followers_data(sequence))

    def _followers_data(self, sequence: int) -> bytes:
        if self._follower is None:
            return b""
        return self._follower.saved(sequence, self.length(sequence))

    def saving(self, sequence: int) -> Generator[None, None, tuple[bytes, tuple[bytes, ...]]]:
        """Save the sequence in parts, and yield after each part. It must not change meanwhile.

        Returns (state, parts) for `load` and `loading`. There are no parts if the memory is saved
        only whole, or if the sequence is short.
        """
        ends, parts, done = self._part_ends(sequence), [], 0
        if len(ends) < 2:
            return self.save(sequence), ()
        for end in ends:
            start, stop = self._position(sequence, done), self._position(sequence, end)
            parts.append(self._context.part_of_state(sequence, start, stop))
            done = end
            yield
        return end_of(parts, ends, self._followers_data(sequence)), tuple(parts)

    def n_parts(self, sequence: int) -> int:
        """Return the number of parts in which `saving` copies the sequence; 1: at once."""
        return max(1, len(self._part_ends(sequence)))

    def _part_ends(self, sequence: int) -> list[int]:
        """Return the lengths up to which the parts of a sequence go; [] if it is saved at once."""
        n, ends = self.length(sequence), [0]
        if not (n and self.saves_parts):
            return []
        n_each = n * self.part_bytes // self._context.state_bytes(sequence, 0)
        while n_each and ends[-1] < n:
            end = min(n, ends[-1] + n_each)
            cut = self._before_image(sequence, end)
            if cut <= ends[-1]:  # the part is one image
                cut = next((i.end for i in self._images[sequence] if i.start < end < i.end), end)
            ends.append(cut)
        return ends[1:]

    def load(
        self, sequence: int, state: bytes, tokens: Sequence[int], parts: Sequence[bytes] = ()
    ) -> None:
        """Replace the sequence by a saved one, whose tokens are `tokens`.

        Raises DeviceFailed if there is no room for the saved one. The sequence is then empty.
        """
        for _ in self.loading(sequence, state, tokens, parts):
            pass

    def loading(
        self, sequence: int, state: bytes, tokens: Sequence[int], parts: Sequence[bytes] = ()
    ) -> Iterator[None]:
        """Do what `load` does, and yield after each part, when the sequence holds its tokens.

        If the iterator is not used up, the follower does not know the tokens.
        """
        self.rewind(sequence, 0)
        saved, images = parted(state, parts), image_spans(tokens)
        positions, done = positions_of(len(tokens), images), 0
        if saved.ends and [*saved.ends] != sorted({*saved.ends} - {0}):
            raise DeviceFailed("the parts of a state are not in order")
        if saved.ends and saved.ends[-1] != len(tokens):
            raise DeviceFailed(
                f"the parts of a state have {saved.ends[-1]} of {len(tokens)} tokens"
            )
        for part, end in zip(saved.parts, saved.ends or (len(tokens),), strict=True):
            try:
                if not saved.ends:
                    self._context.set_state(sequence, bytes(part), 0, positions)
                else:
                    self._context.add_state(sequence, bytes(part), positions[done:end])
                self._begun(sequence, end)
                self._set_images(sequence, [span for span in images if span.end <= end])
                if self._follower is not None and end == len(tokens):
                    self._follower.loaded(sequence, tokens, saved.own)
            except BaseException:
                self._context.remove(sequence, 0)
                self._was_cut(sequence, 0)
                raise
            done = end
            yield

    def adopted(self, sequence: int, checkpoint: Checkpoint) -> Checkpoint:
        """Return a lasting checkpoint of a saved sequence as one of the sequence loaded from it."""
        return replace(checkpoint, n_cuts=self._n_cuts[sequence])

    def _begun(self, sequence: int, n_tokens: int) -> None:
        """Start a new sequence of `n_tokens` tokens; earlier checkpoints become invalid."""
        self._was_cut(sequence, 0)
        self._lengths[sequence] = n_tokens
