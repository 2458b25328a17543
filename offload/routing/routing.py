"""Records and guesses the experts that routers choose, and computes expected hits. Pure.

Routing does not depend on the machine, the plan or the threads. So hits counted in one run hold for
all later runs of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import numpy as np
from numpy.typing import NDArray

N_KEPT = 1024  # recorded tokens of each layer
# Shares of all experts that have a slot, at which hits are counted.
SHARES = (1/64, 1/32, 3/64, 1/16, 3/32, 1/8, 3/16, 1/4, 3/8, 1/2, 3/4)  # fmt: skip
LEAST_TOKENS = 64  # least recorded tokens to count hits; the first half only fills the slots
HALF_LIFE_STEPS = 4.0  # decodes after which a use counts half for the cache rule (docs/log.md)
_HALF_LIFE_TOKENS = 2048.0  # counted tokens after which earlier counts weigh half
_MOST_STEPS = 4000  # most tokens simulated; older uses have weights too small to tell apart
N_TOKEN_ROWS = 1 << 14  # remembered tokens; tokens with equal remainders share a row
_NO_ROWS = np.zeros(0, np.intp)
_MOST_USES = 1 << 16  # most uses counted, which takes a second for the largest models


def expected_union(n_tokens: Any, n_used: int, n_experts: int) -> Any:
    """Return the expected number of a layer's experts that `n_tokens` use with even routing.

    Each token picks `n_used` of `n_experts`. Real routers are less even, so fewer are used.
    `n_tokens` is a number or an array, and so is the result.
    """
    if not n_experts:
        return 0.0
    share = min(1.0, n_used / n_experts)  # a header may name more than there are
    return n_experts * (1.0 - (1.0 - share) ** n_tokens)


UNION_SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)  # batch sizes of counted unions
# Exponents of n in the number of experts that n neighbouring tokens use: for tokens that share
# experts only by chance, for the most sharing that was seen, and for the middle of both
# (docs/background.md, costs; docs/validation.md).
SHARING_LEAST, SHARING_MOST, SHARING_USUAL = 1.0, 0.66, 0.83
# Exponents of architectures whose neighbouring tokens were counted. Those of GLM-5 share experts
# only by chance (JustVugg/colibri issue 640, jundot/omlx issue 2077).
_SHARING_SEEN = {"glm-dsa": SHARING_LEAST}


def usual_sharing(architecture: str) -> float:
    """Return the exponent of `union_of_neighbours` for a model whose batches were not counted."""
    return _SHARING_SEEN.get(architecture, SHARING_USUAL)


def union_of_neighbours(
    n_tokens: Any, n_used: int, n_experts: int, exponent: float = SHARING_USUAL
) -> Any:
    """Return the expected number of a layer's experts that `n_tokens` neighbouring tokens use.

    Neighbouring tokens of a text choose some of the same experts. So n tokens use as many experts
    as n^`exponent` tokens that share none, and at most as many as tokens that choose evenly.
    """
    even = expected_union(n_tokens, n_used, n_experts)
    return np.minimum(even, n_used * np.asarray(n_tokens, float) ** exponent)[()]


@dataclass(frozen=True)
class UnionCurve:
    """The number of a layer's experts that neighbouring tokens use, counted in recorded routing."""

    points: tuple[tuple[int, float], ...]  # (tokens of a batch, experts), tokens rising from 1
    n_tokens: int
    counted_on: date

    def at(self, n_tokens: Any, n_used: int, n_experts: int) -> Any:
        """Return the experts of `n_tokens`, a number or an array, interpolated linearly.

        Batches that are larger than the largest counted one are taken as several independent ones.
        They use at most as many experts as tokens that choose evenly.
        """
        sizes, counts = (np.array(each, float) for each in zip(*self.points, strict=True))
        of_sizes = np.minimum(np.maximum.accumulate(counts), n_experts)
        n = np.asarray(n_tokens, float)
        missing = 1.0 - of_sizes[-1] / max(1, n_experts)
        beyond = n_experts * (1.0 - missing ** (np.maximum(n, sizes[-1]) / sizes[-1]))
        unions = np.where(n > sizes[-1], beyond, np.interp(n, sizes, of_sizes))
        return np.minimum(unions, expected_union(n, n_used, n_experts))[()]


# -- recorded --------------------------------------------------------------------------------------


class LayerRouting:
    """The experts of one layer's last N_KEPT tokens."""

    __slots__ = ("counts", "rows")

    def __init__(self, n_used: int) -> None:
        # The player (offload/stream/play.py) adds tokens to these arrays too.
        self.rows = np.zeros((N_KEPT, n_used), np.int16)
        self.counts = np.zeros(2, np.int64)  # end of the last token in `rows`, number of tokens

    @property
    def n_tokens(self) -> int:
        """Number of added tokens, whether they are still kept or not."""
        return int(self.counts[1])

    @property
    def n_used(self) -> int:
        return int(self.rows.shape[1])

    def add(self, ids: NDArray[np.int32]) -> None:
        """Add `ids` [n_tokens, n_used] of at most SMALL_BATCH tokens."""
        n, at = len(ids), int(self.counts[0])
        end = at + n
        if end <= N_KEPT:
            self.rows[at:end] = ids
        else:
            n_left = N_KEPT - at
            self.rows[at:] = ids[:n_left]
            end = n - n_left
            self.rows[:end] = ids[n_left:]
        self.counts[:] = end, self.n_tokens + n

    def last(self, n: int) -> NDArray[np.int16]:
        """Return the last `n` tokens' experts [n, n_used], oldest first."""
        at = int(self.counts[0])
        order = np.arange(at - n, at) % N_KEPT
        return self.rows.take(order, axis=0)

    def forget(self) -> None:
        """Drop all tokens."""
        self.counts[1] = 0


class RoutingRecorder:
    """Records the routing of all layers of a model while `is_on`."""

    def __init__(self) -> None:
        self.is_on = False
        self._layers: dict[int, LayerRouting] = {}

    def layer(self, layer: int, n_used: int) -> LayerRouting:
        """Return the layer's record. It is the same object in each call with the same arguments."""
        routing = self._layers.get(layer)
        if routing is None or routing.n_used != n_used:
            routing = self._layers[layer] = LayerRouting(n_used)
        return routing

    @property
    def n_tokens(self) -> int:
        """Number of tokens recorded for every layer, whether they are still kept or not."""
        return min((r.n_tokens for r in self._layers.values() if r.n_tokens), default=0)

    def recorded(self) -> Mapping[int, NDArray[np.int16]]:
        """Return the experts [n_tokens, n_used] by recorded layer, with equal n_tokens for all."""
        n = min(self.n_tokens, N_KEPT)
        return {at: layer.last(n) for at, layer in sorted(self._layers.items()) if layer.n_tokens}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing inside the context, for decodes that are not part of a text."""
        was_on, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = was_on

    def forget(self) -> None:
        """Drop all recorded tokens. Objects returned by `layer` stay valid."""
        for layer in self._layers.values():
            layer.forget()


# -- guessed ---------------------------------------------------------------------------------------


class RoutingGuess:
    """Guesses the experts of each layer's next batch from its tokens, or from its last batches.

    The target knows which tokens it decodes, drafted ones included, and a token mostly chooses the
    experts that it chose when it was decoded last. Experts that more of the batch's tokens chose
    come first.

    For tokens that were not seen yet, the last batches stand in: neighbouring tokens choose similar
    experts. A batch's weight is multiplied by `decay` with each later batch.
    """

    def __init__(self, decay: float = 0.5) -> None:
        self.decay = decay
        self._scores: dict[int, NDArray[np.float32]] = {}  # a score for each expert, by layer
        self._n_used: dict[int, int] = {}
        self.tokens: Sequence[int] = ()  # the next batch's
        self.rows = _NO_ROWS  # rows of these tokens in `last`
        self._last: dict[int, NDArray[np.int16]] = {}  # 1 + the experts that tokens chose, by layer

    def expect(self, tokens: Sequence[int]) -> None:
        """Take the next batch's tokens, in the order of its rows. Empty if they are not known."""
        self.tokens = tokens
        self.rows = np.array(tokens, np.intp) % N_TOKEN_ROWS if len(tokens) else _NO_ROWS

    def observe(self, layer: int, counts: NDArray[np.intp], ids: NDArray[np.integer]) -> None:
        """Learn from `ids` [n_tokens, n_used], the experts that a batch chose in a layer.

        `counts` are the numbers of tokens that chose expert 0, 1, ....
        """
        n_tokens, n_used = ids.shape
        scores = self.scores(layer, len(counts), n_used)
        scores *= self.decay
        scores[: len(counts)] += counts * (1.0 / n_tokens)
        if len(self.rows) == n_tokens:
            self.last(layer, n_used)[self.rows] = ids + 1

    def scores(self, layer: int, n_experts: int, n_used: int) -> NDArray[np.float32]:
        """Return the scores of a layer's experts. The player updates them as `observe` does.

        The array stays the same while `n_experts` does not grow.
        """
        scores = self._scores.get(layer)
        if scores is None or len(scores) < n_experts:
            wider = np.zeros(n_experts, np.float32)
            if scores is not None:
                wider[: len(scores)] = scores
            scores = self._scores[layer] = wider
        self._n_used[layer] = n_used
        return scores

    def last(self, layer: int, n_used: int) -> NDArray[np.int16]:
        """Return 1 + the experts that each token chose last [rows, n_used]. The player adds to it.

        0: the token was not seen. The memory of tokens that were not seen is not touched.
        """
        last = self._last.get(layer)
        if last is None:
            last = self._last[layer] = np.zeros((N_TOKEN_ROWS, n_used), np.int16)
        return last

    def chosen_before(self, layer: int, n_tokens: int) -> Sequence[int]:
        """Return the experts that the next batch's tokens chose last, the most chosen ones first.

        Returns none if the tokens are not known or one of them was not seen.
        """
        counts = self._counts(layer, n_tokens)
        return () if counts is None or counts[0] else _order(counts)

    def _counts(self, layer: int, n_tokens: int) -> NDArray[np.intp] | None:
        """Return how often the tokens chose each expert last, by 1 + expert. 0: unseen tokens.

        Returns None if the tokens are not known.
        """
        last = self._last.get(layer)
        if last is None or len(self.rows) != n_tokens:
            return None
        return np.bincount(last.take(self.rows, axis=0).ravel())

    def predict(self, layer: int, n_tokens: int, least: float = 1e-3) -> Sequence[int]:
        """Return experts that the layer's next batch is likely to use, likeliest first.

        If all tokens of the batch were seen before, returns the experts that they chose last.
        Otherwise returns at most as many experts as `n_tokens` would use with even routing, and
        only those with a score above `least`. An expert that all tokens chose scores at least 1.
        """
        scores = self._scores.get(layer)
        if scores is None:
            return ()
        counts = self._counts(layer, n_tokens)
        if counts is not None:
            if not counts[0]:
                return _order(counts)
            scores = scores * np.float32(counts[0] / (n_tokens * self._n_used[layer]))
            n_listed = min(len(counts) - 1, len(scores))
            scores[:n_listed] += counts[1 : 1 + n_listed] * (1.0 / n_tokens)
        n_used = min(self._n_used[layer], len(scores))
        order = np.argsort(-scores, kind="stable")
        order = order[: round(expected_union(n_tokens, n_used, len(scores)))]
        chosen: list[int] = order[scores[order] > least].tolist()
        return chosen


def _order(counts: NDArray[np.intp]) -> list[int]:
    """Return the experts with counts, which are by 1 + expert, the highest count first."""
    order = counts.argsort(kind="stable")[-np.count_nonzero(counts) :]
    experts: list[int] = (order[::-1] - 1).tolist()
    return experts


# -- hits ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HitCurve:
    """The share of used experts that are in a slot (hits), by the share of experts with a slot."""

    points: tuple[tuple[float, float], ...]  # (share with a slot, hits), both rising from 0 to 1
    n_tokens: int
    counted_on: date

    def at(self, share: Any) -> Any:
        """Return the hits if `share` of all experts have a slot, interpolated linearly.

        `share` is a number or an array, and so is the result.
        """
        shares, hits = zip((0.0, 0.0), *self.points, (1.0, 1.0), strict=True)
        return np.interp(share, shares, hits)

    @property
    def source(self) -> str:
        """A clause for messages on the source of the numbers."""
        return f"counted on {self.counted_on} over {self.n_tokens} tokens"


@dataclass(frozen=True)
class CountedHits:
    """Hits of each layer whose routing was recorded."""

    n_experts: int
    n_used: int
    layers: Mapping[int, tuple[float, ...]]  # hits at SHARES
    n_tokens: float  # counted tokens; earlier runs count for less
    counted_on: date  # day of the last count
    uses: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Tokens that used each expert at the end of the last run, by layer."""
    unions: Mapping[int, float] = field(default_factory=dict)
    """Experts that neighbouring tokens use, as a mean over layers, by number of tokens."""

    @property
    def curve(self) -> HitCurve:
        """The mean over all layers, which share the slots."""
        mean = np.mean([*self.layers.values()], axis=0)
        rising = np.maximum.accumulate(np.clip(mean, 0.0, 1.0)).tolist()
        points = tuple(zip(SHARES, rising, strict=True))
        return HitCurve(points, round(self.n_tokens), self.counted_on)

    @property
    def union_curve(self) -> UnionCurve | None:
        """The experts of batches; None if they were not counted."""
        if not self.unions:
            return None
        points = tuple(sorted(self.unions.items()))
        return UnionCurve(points, round(self.n_tokens), self.counted_on)

    def merged(self, newer: CountedHits) -> CountedHits:
        """Return the weighted average of both. The more tokens `newer` has, the more it weighs."""
        before = self.n_tokens * 0.5 ** (newer.n_tokens / _HALF_LIFE_TOKENS)
        total = before + newer.n_tokens

        def mixed(old: Any, new: Any) -> Any:
            return (before * old + newer.n_tokens * new) / total

        layers = {**self.layers, **newer.layers}
        for layer in self.layers.keys() & newer.layers.keys():
            old, new = np.array(self.layers[layer]), np.array(newer.layers[layer])
            layers[layer] = tuple(mixed(old, new).tolist())
        unions = {**self.unions, **newer.unions}
        for n in self.unions.keys() & newer.unions.keys():
            unions[n] = mixed(self.unions[n], newer.unions[n])
        uses, shape = {**self.uses, **newer.uses}, (self.n_experts, self.n_used)
        return CountedHits(*shape, layers, total, newer.counted_on, uses, unions)


def counted_hits(
    recorded: Mapping[int, NDArray[np.integer]], n_experts: int, today: date
) -> CountedHits | None:
    """Count the hits of recorded routing [n_tokens, n_used] by layer.

    Returns None if there are too few tokens, or if layers differ in the number of used experts.
    """
    rows = [*recorded.values()]
    if not rows or len({layer.shape for layer in rows}) > 1 or len(rows[0]) < LEAST_TOKENS:
        return None
    n_tokens, n_used = rows[0].shape
    hit_rates = recorded_hits(np.stack(rows, axis=1), n_experts)
    layers = {layer: tuple(hits) for layer, hits in zip(recorded, hit_rates.tolist(), strict=True)}
    uses = {
        layer: tuple(np.bincount(ids.ravel(), minlength=n_experts).tolist())
        for layer, ids in recorded.items()
    }
    unions = counted_unions(recorded, n_experts)
    return CountedHits(n_experts, n_used, layers, float(n_tokens), today, uses, unions)


def counted_unions(recorded: Mapping[int, NDArray[np.integer]], n_experts: int) -> dict[int, float]:
    """Count the different experts that neighbouring tokens use in a layer, by number of tokens.

    `recorded` has the routing [n_tokens, n_used] of consecutive tokens by layer. Returns the mean
    over all layers, for the `UNION_SIZES` of which the routing has a batch. Returns {} if there are
    too few tokens, or if layers differ in the number of used experts.
    """
    rows = [*recorded.values()]
    if not rows or len({layer.shape for layer in rows}) > 1 or len(rows[0]) < LEAST_TOKENS:
        return {}
    n_tokens = len(rows[0])
    is_used = np.zeros((len(rows), n_tokens, n_experts), np.bool_)
    np.put_along_axis(is_used, np.stack(rows).astype(np.intp), True, axis=2)
    unions = {}
    for n in UNION_SIZES:
        if n_batches := n_tokens // n:
            batches = is_used[:, : n_batches * n].reshape(len(rows), n_batches, n, n_experts)
            unions[n] = float(batches.any(axis=2).sum(axis=2).mean())
    return unions


def recorded_hits(
    routing: NDArray[np.integer],
    n_experts: int,
    shares: Sequence[float] = SHARES,
    half_life: float = HALF_LIFE_STEPS,
    n_last: int | None = None,
) -> NDArray[np.float64]:
    """Return the share of each layer's uses that are hits [n_layers, len(shares)].

    `routing` [n_tokens, n_layers, n_used]: experts of consecutive tokens, decoded one at a time.
    `shares`: shares of all experts that have slots. All layers share the slots, and every miss is
    copied. Hits of the last `n_last` tokens are counted; the tokens before only fill the slots.

    With the rule `Lrfu` the slots always hold the highest-ranked pieces, and pieces that are not
    used keep their order. So one pass gives the hits for every number of slots. A use is a hit if
    the number of pieces that rank above its own is less than the number of slots (Mattson and
    others, IBM Systems Journal 9, 1970: stack algorithms). An expert that was never used has no
    rank. Its first use counts with the probability of a hit if its rank is random among such
    pieces.
    """
    routing = routing[-_MOST_STEPS:]
    n_tokens, n_layers, n_used = routing.shape
    if n_last is None:
        n_last = max(1, min(n_tokens // 2, _MOST_USES // (n_layers * n_used)))
    n_pieces = n_layers * n_experts
    pieces = routing.astype(np.intp) + n_experts * np.arange(n_layers)[:, None]
    # Pieces with equal histories would have equal weights. The small addend makes the last one by
    # number rank highest, as in the queue of victims.
    fresh = 1.0 + 1e-13 * np.arange(n_pieces)
    fresh = fresh * np.repeat(2.0 ** (np.arange(n_layers) / (half_life * n_layers)), n_experts)
    weight, decay = np.zeros(n_pieces), 2.0 ** (-1.0 / half_life)
    for used in pieces[: n_tokens - n_last]:
        weight *= decay
        weight[used] += fresh[used]
    above = np.zeros((n_last, n_layers, n_used))  # number of pieces that rank above a use's own
    known = np.zeros(above.shape, np.bool_)
    n_touched = np.count_nonzero(weight)
    for token, of_token in enumerate(pieces[n_tokens - n_last :]):
        weight *= decay
        for layer, used in enumerate(of_token):
            before = weight[used]
            for nth, one in enumerate(before.tolist()):
                is_known = one > 0.0
                known[token, layer, nth] = is_known
                above[token, layer, nth] = np.count_nonzero(weight > one) if is_known else n_touched
            n_touched += n_used - np.count_nonzero(before)
            weight[used] += fresh[used]
    hits = []
    for n_slots in np.floor(np.array(shares) * n_pieces + 1e-9).tolist():
        unknown = np.clip((n_slots - above) / np.maximum(1.0, n_pieces - above), 0.0, 1.0)
        hits.append(np.where(known, above < n_slots, unknown).mean(axis=(0, 2)))
    return np.stack(hits, axis=1)
