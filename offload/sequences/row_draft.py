"""Drafts from the target's hidden rows, by layers for multi-token prediction (MTP) or EAGLE-3.

Such layers take a token and a row that the target computed at the position before it. They give
the logits of the next token and a hidden row of their own. So a draft repeats (token, row) ->
(logits, row). They have a KV cache of their own, which holds each token of the text once. After
each round, the entries of drafted tokens are computed again from the target's rows.

`RowDraft` follows the target: after each decode of the target it takes the rows of the decoded
tokens. The tokens wait until the next draft, and are computed in the same decode as the draft's
first token. A long prompt's tokens are computed in batches, as soon as enough of them wait
(`take_in`).

Models with several MTP layers use one layer for each drafted token. Each layer has its own keys and
values for the whole text. So all tokens of the text are computed by every layer, and each draft
step computes the draft so far again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from offload.decode import Batch, Rows
from offload.errors import BadRequest
from offload.ggml.row_context import RowContext

RowStep = Callable[..., tuple[Rows, Rows]]  # has the arguments and results of `RowContext.step`

UNKNOWN = -1  # stands for a token that is not known, such as one of a loaded text


class _Text:
    """The tokens and rows of one sequence.

    `held`: tokens that the context has computed with the target's rows. `waiting`: the tokens after
    them, which the target has decoded. `rows` [1 + len(waiting), width]: the target's row before
    each waiting token, and the row of the last one. `drafted`: tokens that the context has computed
    after the held ones. `own`: the layers' own rows, one for each drafting step. `paired`: the row
    that the last held token was computed with, or None if it is not known.
    """

    __slots__ = ("_chunks", "drafted", "held", "is_checked", "own", "paired", "waiting")

    def __init__(self, rows: Rows, held: list[int]) -> None:
        self._chunks = [rows]
        self.held = held
        self.waiting: list[int] = []
        self.drafted: list[int] = []
        self.own: list[Rows] = []
        self.paired: Rows | None = None
        self.is_checked = True  # False: `held` may belong to another text

    @property
    def rows(self) -> Rows:
        if len(self._chunks) > 1:
            self._chunks = [np.concatenate(self._chunks)]
        return self._chunks[0]

    @rows.setter
    def rows(self, rows: Rows) -> None:
        self._chunks = [rows]

    def wait(self, tokens: Sequence[int], rows: Rows) -> None:
        """Append waiting tokens. `rows` [n_tokens, width]: the target's row of each token."""
        self.waiting += tokens
        self._chunks.append(rows)


class RowDraft:
    """A drafter that uses the model's own layers, with the interface of specdec's draft models."""

    can_rewind = True
    needs_equal_lengths = False

    def __init__(self, context: RowContext, step: RowStep, n_ctx: int, n_sequences: int) -> None:
        """`step` decodes tokens in `context`. `n_ctx`: most tokens of a sequence of the target."""
        self._context, self._step = context, step
        self.n_heads, self.first = context.n_heads, context.first
        self.n_vocab, self.n_ctx = context.n_vocab, n_ctx
        self.n_batch, self.n_outputs = context.n_batch, n_sequences
        self._texts = [_Text(self._no_row(), []) for _ in range(n_sequences)]
        self.n_taken = 0  # tokens computed with the target's rows
        self.n_unknown_rows = 0  # tokens whose row was not known, which makes drafts worse
        # True while rows are not taken: the target decodes tokens that belong to no text, or nobody
        # will draft for long.
        self.is_paused = False
        self._tree: list[Rows] = []  # the target's rows of a tree's nodes, by decode
        context.follow()

    def _no_row(self) -> Rows:
        return self._no_rows(1)

    def _no_rows(self, n_rows: int) -> Rows:
        return np.zeros((n_rows, self._context.taken_width), np.float32)

    @property
    def most_drafted(self) -> int | None:
        """Most tokens of a draft: one for each layer. None if one layer drafts without limit."""
        return self.n_heads if self.n_heads > 1 else None

    # -- following the target ----------------------------------------------------------------------

    def decoded(self, parts: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Take the rows of the target's last decode.

        `parts`: (sequence, position of the first token, tokens), in the order of the batch.
        """
        if self.is_paused:
            return
        rows, at = self._context.take(sum([len(tokens) for _, _, tokens in parts])), 0
        for sequence, start, tokens in parts:
            self._grown(sequence, start, tokens, rows[at : at + len(tokens)])
            at += len(tokens)
            if len(self._texts[sequence].waiting) >= self.n_batch:  # a tail has one more
                self.take_in([sequence])

    def tree_decoded(self, n_nodes: int) -> None:
        """Take the rows of the target's last decode, which evaluated `n_nodes` nodes of a tree."""
        if not self.is_paused:
            self._tree.append(self._context.take(n_nodes))

    def tree_ended(
        self, sequence: int, start: int, tokens: Sequence[int], path: Sequence[int]
    ) -> None:
        """Keep the rows of the tree's nodes in `path`, and forget the others.

        `tokens` are those of the path, which the target appended to the sequence at `start`.
        """
        decodes, self._tree = self._tree, []
        if path and decodes:
            self._grown(sequence, start, tokens, np.concatenate(decodes)[list(path)])

    def _grown(self, sequence: int, start: int, tokens: Sequence[int], rows: Rows) -> None:
        text = self._texts[sequence]
        n_held = len(text.held)
        n_known = n_held + len(text.waiting)
        if start > n_known:
            self._begin(sequence, [UNKNOWN] * start)
            text = self._texts[sequence]
        elif start < n_held:
            # Held tokens that the target decoded again stay. The row of the last one is known now.
            n = 0
            while n < min(len(tokens), n_held - start) and text.held[start + n] == tokens[n]:
                n += 1
            self._cut(sequence, start + n)
            if n:
                text.rows = rows[n - 1 : n]
                tokens, rows = tokens[n:], rows[n:]
        elif start < n_known:
            del text.waiting[start - n_held :]
            text.rows = text.rows[: 1 + len(text.waiting)]
        if len(tokens):
            text.wait(tokens, rows)
        if len(text.held) < self.first and text.waiting:
            # The text's first token has no row before it, and is never computed.
            text.held.append(text.waiting.pop(0))
            text.rows = text.rows[1:]

    def _begin(self, sequence: int, held: list[int], row: Rows | None = None) -> None:
        """Replace the sequence's text by `held`, and empty the sequence in the context.

        `row` is the target's row of the last token, if it is known.
        """
        self._remove(sequence, 0)
        self._texts[sequence] = _Text(self._no_row() if row is None else row, held)
        self._texts[sequence].is_checked = False

    def _cut(self, sequence: int, length: int) -> None:
        """Keep at most the first `length` held tokens, and no waiting ones."""
        text = self._texts[sequence]
        self._drop_drafted(sequence)
        if length < len(text.held):
            row = text.paired if length == len(text.held) - 1 else None
            self._remove(sequence, length)
            del text.held[length:]
            text.rows = self._no_row() if row is None else row
            text.paired = None
        else:
            text.rows = text.rows[:1]
        text.waiting = []

    def _drop_drafted(self, sequence: int) -> None:
        text = self._texts[sequence]
        if text.drafted:
            self._remove(sequence, len(text.held))
        text.drafted, text.own = [], []

    def was_cut(self, sequence: int, length: int) -> None:
        """Called when the target's sequence was cut to `length` tokens, which is not 0.

        A paused draft hears of no later tokens, so it cuts its text now. Without a pause, the next
        decode tells where its tokens begin, and the draft cuts its text then.
        """
        if self.is_paused:
            self._trimmed(sequence, length)

    def emptied(self, sequence: int) -> None:
        """Free the sequence's cells. Called when the target's sequence was emptied."""
        text = self._texts[sequence]
        if text.held or text.waiting or text.drafted:
            self._begin(sequence, [])

    def saved(self, sequence: int, length: int) -> bytes:
        """Return the last rows and the layers' cache of the first `length` tokens, for `loaded`.

        Returns b"" if some of these tokens are not known.
        """
        text = self._trimmed(sequence, length)
        self.take_in([sequence])
        if not length or len(text.held) < length or UNKNOWN in text.held:
            return b""
        paired = self._no_row() if text.paired is None else text.paired
        return b"".join((paired.tobytes(), text.rows.tobytes(), self._context.state(sequence, 0)))

    def saved_bytes(self, sequence: int) -> int:
        """Return the size of the result of `saved`, without tokens that wait to be computed."""
        return 2 * self._no_row().nbytes + self._context.state_bytes(sequence, 0)

    def loaded(self, sequence: int, tokens: Sequence[int], saved: bytes) -> None:
        """Take over a text. Called when the target loaded it. `saved`: the result of `saved`.

        Raises DeviceFailed if the layers' cache has no room for it, or if it is of another model.
        """
        if not saved:
            self._begin(sequence, [UNKNOWN] * len(tokens))
            return
        self._begin(sequence, [])
        end = 2 * self._no_row().nbytes
        self._context.set_state(sequence, saved[end:], 0)
        paired, row = np.frombuffer(saved[:end], np.float32).reshape(2, 1, -1)
        text = self._texts[sequence]
        text.held, text.rows = list(tokens), row
        text.paired = paired if paired.any() else None

    def shared(self, source: int, sequence: int, n_tokens: int) -> None:
        """Copy the first `n_tokens` of `source`. Called when the target's sequence shares them."""
        theirs = self._texts[source]
        row = self.row(source, n_tokens)
        self.take_in([source])
        # If the row is not known, one more token is kept. The target may decode that token again,
        # and then its row is known (`Sequences.resumable`).
        n = min(n_tokens + (row is None), len(theirs.held))
        self._begin(sequence, theirs.held[:n] + [UNKNOWN] * (n_tokens - n), row)
        if n:
            self._context.copy_sequence(source, sequence, 0, max(0, n - self.first))

    def row(self, sequence: int, length: int) -> Rows | None:
        """Return the target's row of the last of the first `length` tokens, or None if unknown."""
        text = self._texts[sequence]
        at = length - len(text.held)
        if at == -1:
            return text.paired
        return text.rows[at : at + 1].copy() if 0 <= at < len(text.rows) else None

    def restored(self, sequence: int, length: int, row: Rows | None) -> None:
        """Cut the text to `length`. Called when the target restored a checkpoint of that length.

        `row` is the target's row that was known when the checkpoint was made. Does nothing if it is
        None or if fewer tokens are held.
        """
        text = self._texts[sequence]
        if row is not None and length <= len(text.held):
            self._cut(sequence, length)
            text.rows = row

    def take_in(self, sequences: Sequence[int], *, least: int = 0) -> None:
        """Compute the waiting tokens of those sequences that have more than `least` of them."""
        for sequence in sequences:
            text = self._texts[sequence]
            if len(text.waiting) <= least:
                continue
            self._drop_drafted(sequence)
            while text.waiting:
                n = min(len(text.waiting), self.n_batch)
                start = len(text.held)
                self._count_unknown(text)
                for head in self._heads():
                    self._remove(sequence, start)
                    self._compute(sequence, text.waiting[:n], start, text.rows[: n + 1], head)
                self._settle(text, n)

    def keep_recent(self, sequence: int, most: int, kept: int) -> None:
        """If more than `most` tokens wait, keep the last `kept` and compute none of the others.

        Later drafts then see only these tokens of the text, and those after them.
        """
        text = self._texts[sequence]
        if len(text.waiting) <= most:
            return
        n_known = len(text.held) + len(text.waiting)
        tokens, rows = text.waiting[-kept:], text.rows[-kept - 1 :].copy()
        self._begin(sequence, [UNKNOWN] * (n_known - kept), rows[:1])
        self._texts[sequence].wait(tokens, rows[1:])

    def _heads(self) -> range:
        """Return the numbers of the layers in the order in which they take in tokens: 0 last."""
        return range(self.n_heads - 1, -1, -1)

    def _compute(
        self, sequence: int, tokens: Sequence[int], start: int, rows: Rows, head: int
    ) -> None:
        """Compute tokens from position `start`. `rows`: the row before each, and the last one's."""
        self._use(head)
        n, at = len(tokens), start - self.first
        batch = Batch(tokens, range(at, at + n), [sequence] * n, [False] * n, n, is_draft=True)
        self._step(batch, rows[:-1], taken=True)

    def _remove(self, sequence: int, length: int) -> None:
        """Keep the cells of at most the first `length` tokens."""
        self._context.remove(sequence, max(0, length - self.first))

    def _use(self, head: int) -> None:
        if self.n_heads > 1:
            self._context.use_head(head)

    def _settle(self, text: _Text, n: int) -> None:
        """Record that the first `n` waiting tokens were computed: they are held now."""
        if not n:
            return
        text.held += text.waiting[:n]
        del text.waiting[:n]
        text.paired, text.rows = text.rows[n - 1 : n].copy(), text.rows[n:].copy()
        self.n_taken += n

    def _count_unknown(self, text: _Text) -> None:
        if text.held and not text.rows[0].any():
            self.n_unknown_rows += 1

    # -- drafting ----------------------------------------------------------------------------------

    def tail(self, sequence: int, history: Sequence[int]) -> list[int]:
        """Return the last tokens of `history` that a draft has to compute first, at least one.

        The target has decoded all tokens of `history` except the last.
        """
        text = self._texts[sequence]
        self._drop_drafted(sequence)
        length, n_held = len(history) - 1, len(text.held)
        if not text.is_checked:
            n = next((i for i, t in enumerate(text.held[:length])
                      if t not in (UNKNOWN, history[i])), min(n_held, length))  # fmt: skip
            if n < n_held:
                self._cut(sequence, n)
            text.is_checked = True
        n_known = len(text.held) + len(text.waiting)
        if n_known < length:  # the target decoded tokens while `RowDraft` was paused
            self._begin(sequence, [UNKNOWN] * length)
            self._texts[sequence].is_checked = True
        return [*self._trimmed(sequence, length).waiting, history[-1]]

    def _trimmed(self, sequence: int, length: int) -> _Text:
        """Keep at most the first `length` tokens, held and waiting, and no drafted ones."""
        text = self._texts[sequence]
        self._drop_drafted(sequence)
        if len(text.held) > length:
            self._cut(sequence, length)
        del text.waiting[length - len(text.held) :]
        text.rows = text.rows[: 1 + len(text.waiting)]
        return text

    def forget(self, sequence: int) -> None:
        """Make the next `tail` compare the held tokens with its history from the first token."""
        self._texts[sequence].is_checked = False

    def length(self, sequence: int) -> int:
        """Return the number of tokens that the context holds, drafted ones included."""
        text = self._texts[sequence]
        return len(text.held) + len(text.drafted)

    def begin(self, sequence: int, tokens: Sequence[int]) -> None:
        """Compute these tokens with rows of zeros, for measurements, which need no good drafts."""
        self._begin(sequence, [])
        self.follow(sequence, tokens)
        self.take_in([sequence])

    def follow(self, sequence: int, history: Sequence[int]) -> None:
        """Let the new tokens of `history` wait with rows of zeros, for measurements."""
        text = self._texts[sequence]
        n_known = len(text.held) + len(text.waiting)
        tokens = history[n_known:]
        self._grown(sequence, n_known, tokens, self._no_rows(len(tokens)))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take no rows inside the context, because the target decodes tokens of no text there."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def extend(self, sequence: int, tokens: Sequence[int], n_logits: int | None = None) -> Rows:
        """Compute the tokens of `tail`, or one drafted token, and return logits [1, n_vocab]."""
        return self.extend_batch([(sequence, tokens, 1 if n_logits is None else n_logits)])[0]

    def extend_batch(self, parts: Sequence[tuple[int, Sequence[int], int]]) -> list[Rows]:
        """Compute tokens of several sequences. Return each part's last logits [1, n_vocab].

        A part is (sequence, tokens, 1): the tokens of `tail`, or one drafted token. All sequences
        must have drafted equally many tokens. Raises the errors of a decode, and then drops all
        drafted tokens of these sequences.
        """
        try:
            if self.n_heads > 1:
                return self._chain([(sequence, tokens) for sequence, tokens, _ in parts])
            return self._grow([(sequence, tokens) for sequence, tokens, _ in parts])
        except BaseException:
            for sequence, _, _ in parts:
                self._drop_all_after_held(sequence)
            raise

    def _drop_all_after_held(self, sequence: int) -> None:
        text = self._texts[sequence]
        self._remove(sequence, len(text.held))
        text.drafted, text.own = [], []

    def _grow(self, parts: Sequence[tuple[int, Sequence[int]]]) -> list[Rows]:
        """Compute the tokens with the only layer, and add them to its cache."""
        begun = [(s, self._texts[s], tokens) for s, tokens in parts]
        batch = [
            (s, len(t.held) + len(t.drafted), tokens, t.own[-1] if t.own else t.rows)
            for s, t, tokens in begun
        ]
        logits, rows = self._last_rows(batch, taken=not begun[0][1].own)
        for i, (_, text, tokens) in enumerate(begun):
            if text.own:
                text.drafted += tokens
                text.own.append(rows[i : i + 1])
                continue
            # The text's last token is held from now on, as it was computed with the target's row.
            self._count_unknown(text)
            text.waiting = list(tokens)
            text.rows = np.concatenate([text.rows, self._no_row()])
            self._settle(text, len(tokens))
            text.own = [rows[i : i + 1]]
        return [logits[i : i + 1] for i in range(len(parts))]

    def _chain(self, parts: Sequence[tuple[int, Sequence[int]]]) -> list[Rows]:
        """Compute each draft so far with the next layer."""
        begun = [(s, self._texts[s], tokens) for s, tokens in parts]
        depth = len(begun[0][1].drafted)
        if depth >= self.n_heads:
            raise BadRequest(f"{self.n_heads} layers draft {self.n_heads} tokens at most")
        batch = []
        for sequence, text, tokens in begun:
            if not depth:
                self.take_in([sequence])
                self._count_unknown(text)
            fed = [*text.drafted, tokens[-1]]
            self._remove(sequence, len(text.held))
            batch.append((sequence, len(text.held), fed, np.concatenate([text.rows, *text.own])))
        self._use(depth)
        logits, rows = self._last_rows(batch, taken=False)
        for i, (_, text, tokens) in enumerate(begun):
            text.drafted.append(tokens[-1])
            text.own.append(rows[i : i + 1])
        return [logits[i : i + 1] for i in range(len(parts))]

    def _last_rows(
        self, batch: Sequence[tuple[int, int, Sequence[int], Rows]], *, taken: bool
    ) -> tuple[Rows, Rows]:
        """Decode parts of (sequence, first position, tokens, rows).

        `taken`: the rows are the target's. Returns the logits and the hidden rows of each part's
        last token.
        """
        tokens: list[int] = []
        positions: list[int] = []
        sequences: list[int] = []
        wanted: list[bool] = []
        for sequence, start, part, _ in batch:
            n, at = len(part), start - self.first
            tokens += part
            positions += range(at, at + n)
            sequences += [sequence] * n
            wanted += [False] * (n - 1) + [True]
        rows = batch[0][3] if len(batch) == 1 else np.concatenate([r for *_, r in batch])
        step = Batch(tokens, positions, sequences, wanted, len(tokens), is_draft=True)
        return self._step(step, rows, taken=taken)

    # -- the memory interface of a draft model -----------------------------------------------------

    def rewind(self, sequence: int, length: int) -> None:
        """Keep at most the first `length` held tokens, and no drafted ones."""
        self._cut(sequence, length)

    def n_droppable(self, parts: Sequence[tuple[int, int]]) -> int:
        return 0

    def checkpoint(self, sequence: int) -> object:
        raise AssertionError("this memory can be cut")

    def restore(self, sequence: int, checkpoint: object) -> None:
        raise AssertionError("this memory can be cut")
