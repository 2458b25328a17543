"""A layer's experts between slots, link and CPU, so that the later of CPU and device ends soonest.

The CPU computes its experts in place while the device computes those in slots and the link brings
more. All experts of as many rows cost alike, and what one more row is worth is monotone: a copy
pays most for the expert of most rows, and a slot is missed least by the expert of fewest. So misses
are streamed from the most rows down, hits are left to the CPU from the fewest rows up, and every
pair of such cuts is priced. With one token that is the optimum; with more, at most the time of one
miss and one hit from it (`excess_s`). Both extremes, all by the CPU and all on the device, are
among what is priced. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

HIT, STREAMED, HOST = 0, 1, 2
_ROWS_AT_LEAST = 64  # that times are kept for

_Counts = tuple[int, int]


@dataclass(frozen=True, eq=False)
class SplitCosts:
    """Costs of one kind of layer in seconds, as measured on the machine.

    The arrays are by rows, the tokens that use the expert: `host_s[r]` for r = 0..R, at least up to
    1; from R on they go on along their last step.
    """

    host_s: NDArray[np.float64]  # the CPU's time for one expert
    device_s: NDArray[np.float64]  # the device's
    host_fixed_s: float  # once, where the CPU computes any
    device_fixed_s: float  # once, where the device computes any
    copy_s: float  # one expert's bytes through the link, while the CPU reads memory too
    host_slowdown: float = 1.0  # the CPU's times while the link copies, over those while it rests
    _of_token: dict[_Counts, _Cut] = field(default_factory=dict, init=False, repr=False)
    _by_rows: list[NDArray[np.float64]] = field(default_factory=list, init=False, repr=False)

    def by_rows_s(self, most: int) -> NDArray[np.float64]:
        """[2, at least `most` + 1]: seconds of one expert of 0, 1, ... rows, the CPU's and the
        device's. Kept, since every layer asks."""
        if not self._by_rows or self._by_rows[0].shape[1] <= most:
            rows = np.arange(max(most, _ROWS_AT_LEAST) + 1)
            both = [seconds_at(self.host_s, rows), seconds_at(self.device_s, rows)]
            self._by_rows[:] = [np.array(both)]
        return self._by_rows[0]


@dataclass(frozen=True)
class Split:
    """The side of each expert of a layer, and the time that is expected of both sides."""

    kind: NDArray[np.uint8]  # HIT, STREAMED or HOST; of experts that nobody uses it means nothing
    cpu_s: float
    device_s: float
    link_s: float = 0.0  # of the device's, in which the link copies

    @property
    def idle_s(self) -> float:
        """Seconds of the layer in which the link is expected to copy nothing."""
        return max(0.0, max(self.cpu_s, self.device_s) - self.link_s)


@dataclass(frozen=True)
class _Cut:
    n_streamed: int  # misses, those of most rows
    n_left: int  # hits left to the CPU, those of fewest rows
    cpu_s: float
    device_s: float


def split_pairs(
    ids: NDArray[np.int32],
    resident: NDArray[np.bool_],
    costs: SplitCosts,
    rows: NDArray[np.intp] | None = None,
) -> Split:
    """The split of a batch. `ids`: [n_tokens, n_used], each token's experts; `resident`:
    [n_experts], True where an expert has a slot and needs no copy; `rows`: [n_experts], how often
    `ids` name each, where that is known."""
    if len(ids) == 1:
        return _split_of_token(ids[0], resident, costs)
    if rows is None:
        rows = np.bincount(ids.ravel(), minlength=len(resident))
    used = rows.nonzero()[0]
    used = used[(-rows[used]).argsort(kind="stable")]
    there = resident[used]
    hits, misses = used[there], used[~there]
    cut = _best_cut(rows[hits], rows[misses], costs)
    return _split(hits, misses, len(resident), cut, costs)


def _split_of_token(
    ids: NDArray[np.int32], resident: NDArray[np.bool_], costs: SplitCosts
) -> Split:
    """Every expert has one row, so that only the numbers of hits and misses matter."""
    there = resident[ids]
    misses = ids[~there]
    counts = len(ids) - len(misses), len(misses)
    cut = costs._of_token.get(counts)
    if cut is None:
        cut = _best_cut(np.ones(counts[0], np.intp), np.ones(counts[1], np.intp), costs)
        costs._of_token[counts] = cut
    hits = ids[there] if cut.n_left else ids[:0]
    return _split(hits, misses, len(resident), cut, costs)


def _split(
    hits: NDArray[np.integer],
    misses: NDArray[np.integer],
    n_experts: int,
    cut: _Cut,
    costs: SplitCosts,
) -> Split:
    kind = np.zeros(n_experts, np.uint8)
    kind[misses] = HOST
    kind[misses[: cut.n_streamed]] = STREAMED
    if cut.n_left:
        kind[hits[-cut.n_left :]] = HOST
    return Split(kind, cut.cpu_s, cut.device_s, cut.n_streamed * costs.copy_s)


def _best_cut(
    hit_rows: NDArray[np.integer], miss_rows: NDArray[np.integer], costs: SplitCosts
) -> _Cut:
    """The best pair of cuts; both arrays descend. Of equal ones that which leaves most hits where
    they are and then that which copies least."""
    most = max([int(rows[0]) for rows in (hit_rows, miss_rows) if len(rows)], default=0)
    by_rows_s = costs.by_rows_s(most)
    left_host_s, left_device_s = _sums(by_rows_s, hit_rows[::-1])
    host_s, device_s = _sums(by_rows_s, miss_rows)
    work_s = left_host_s[:, None] + (host_s[-1] - host_s)  # [hits left, misses streamed]
    cpu_s, link_s = costs.host_fixed_s + work_s, costs.copy_s * np.arange(len(miss_rows) + 1)
    if costs.host_slowdown > 1.0:
        cpu_s = np.minimum(
            cpu_s * costs.host_slowdown, cpu_s + link_s * (1.0 - 1.0 / costs.host_slowdown)
        )
    compute_s = (left_device_s[-1] - left_device_s)[:, None] + device_s
    on_device_s = costs.device_fixed_s + np.maximum(compute_s, link_s)
    cpu_s[0, -1] = on_device_s[-1, 0] = 0.0  # nothing is left to that side
    n_left, n_streamed = divmod(int(np.maximum(cpu_s, on_device_s).argmin()), len(link_s))
    return _Cut(
        n_streamed,
        n_left,
        float(cpu_s[n_left, n_streamed]),
        float(on_device_s[n_left, n_streamed]),
    )


def _sums(by_rows_s: NDArray[np.float64], rows: NDArray[np.integer]) -> NDArray[np.float64]:
    """[2, n + 1]: the CPU's and the device's time of the first 0, 1, ... of the experts."""
    sums = np.zeros((2, len(rows) + 1))
    by_rows_s.take(rows, axis=1).cumsum(axis=1, out=sums[:, 1:])
    return sums


def seconds_at(by_rows_s: NDArray[np.float64], rows: NDArray[np.integer]) -> NDArray[np.float64]:
    """Seconds of experts of that many rows, beyond the last that was measured on its line."""
    last = len(by_rows_s) - 1
    seconds: NDArray[np.float64] = by_rows_s[np.minimum(rows, last)]
    beyond = rows - last
    if beyond.max(initial=0) > 0:
        step_s = max(0.0, by_rows_s[-1] - by_rows_s[-2])  # noise must not make time negative
        seconds = seconds + np.maximum(beyond, 0) * step_s
    return seconds


def excess_s(ids: NDArray[np.int32], resident: NDArray[np.bool_], costs: SplitCosts) -> float:
    """Seconds at most between the split and the best of all splits.

    It holds where `host_s` and the quotient `host_s / device_s` do not fall as rows grow. Then
    exchanging any two misses, or any two hits, towards the cuts' order lowers nobody's time, so
    that the best division of experts into fractions has at most one miss and one hit divided.
    Rounding both to one side costs that side no more than them.
    """
    rows = np.bincount(ids.ravel(), minlength=len(resident))
    host_s = device_s = 0.0
    for some in (rows[resident & (rows > 0)], rows[~resident & (rows > 0)]):
        if len(some):
            host_s += float(seconds_at(costs.host_s, some).max())
            device_s += float(seconds_at(costs.device_s, some).max())
    return min(host_s * costs.host_slowdown, max(costs.copy_s, device_s))
