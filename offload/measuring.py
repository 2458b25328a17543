"""Times an engine's decodes in every way that it can compute them, in one pass over a text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from time import perf_counter

from offload.decode import SMALL_BATCH
from offload.engine import Engine
from offload.model import is_experts, layer_of
from offload.schedule.division import MeasuredCosts
from offload.schedule.splitter import ByCosts, all_on_device
from offload.sequences.sequences import Sequences
from offload.stream.layer_clock import BrokenOff, LayerClock
from offload.stream.split_measuring import (
    LinkTimes,
    SecondsByRows,
    SplitSides,
    costs_of,
    on_device,
    on_host,
    on_link,
)
from offload.times.min_batch import NEVER, MinBatch
from offload.times.search import TimingRequest, budget_s, fill, one_timing
from offload.times.table import CostTable, Way

LEAD_TOKENS = 16  # tokens decoded before a timed decode if weights stream through slots
_SEQUENCE = 0
_SPAN, _LONG_SPAN = 320, 1024  # tokens of context after which the KV cache is rewound
_DEPTH, _DEEP_BELOW_S = 16, 0.02  # tokens of context of the first decode, if T(1) is below 0.02 s
# Seconds of T(1) below which building a graph matters: 1 to 3 ms, and more for the first time.
_LEAD_BELOW_S = 0.05
_IN_PART_FROM_S = 0.4  # seconds of a decode from which it is stopped after some layers
_LEAST_LAYERS = 2  # fewest layers timed in a decode that is stopped
_MOST_SPLIT_S = 10.0  # seconds of a pass over split layers up to which it may be repeated
_LEAST_ROOM = 8  # tokens of context up to which measuring is impossible

Progress = Callable[[float], None]
Clock = Callable[[], float]


def streamed_kinds(target: Engine) -> tuple[str, ...]:
    """Return the kinds of weights that stream: "experts", "dense"."""
    streamed = () if target.opened.plan is None else target.opened.plan.streamed
    kinds = {"experts" if is_experts(entry) else "dense" for entry in streamed}
    return tuple(sorted(kinds, reverse=True))


def n_most_at_once(target: Engine) -> int:
    """Return the tokens of the largest batch that is computed at once."""
    return min(target.layout.context.n_ubatch, target.n_ctx)


def ways_of(target: Engine, *, fixed: bool, splits: bool) -> tuple[Way, ...]:
    """Return the ways to time, the usual one first.

    `fixed`: the user's threshold decides between the CPU and streaming. `splits`: layers may be
    split.
    """
    kinds = streamed_kinds(target)
    ways = [Way.FIXED] if fixed and kinds else [Way.IN_PLACE]
    if not fixed:
        ways += [way for way, kind in _KINDS.items() if kind in kinds]
    if (
        splits
        and target.opened.weights.hybrid is not None
        and not target.opened.weights.ways.now.declined
    ):
        ways.append(Way.SPLIT)
    return tuple(ways)


_KINDS = {Way.STREAMED: "experts", Way.DENSE: "dense"}
_SETTINGS = {
    Way.IN_PLACE: MinBatch(NEVER, NEVER),
    Way.STREAMED: MinBatch(1, NEVER),
    Way.DENSE: MinBatch(NEVER, 1),
    Way.SPLIT: MinBatch(NEVER, NEVER),
}


def measure_split(
    target: Engine, *, is_busy: Callable[[], bool] = lambda: False, clock: Clock = perf_counter
) -> dict[str, MeasuredCosts]:
    """Return the times of a split layer's sides and of the link, by the name of the device.

    Devices with an unknown time are left out. If times contradict each other, all are measured once
    more, because other programs have probably disturbed them. That is left to later timings if the
    first pass took over 10 s, or if `is_busy` says that other programs still run. Decodes tokens in
    sequence 0, which must be empty, and leaves it empty. Raises DeviceFailed.
    """
    if target.opened.weights.hybrid is None:
        return {}
    start_s = clock()
    by_device = _measured_split(target)
    is_doubtful = any(costs.is_doubtful for costs in by_device.values())
    if is_doubtful and clock() - start_s <= _MOST_SPLIT_S and not is_busy():
        by_device = _measured_split(target)
    return by_device


def _measured_split(target: Engine) -> dict[str, MeasuredCosts]:
    measured: dict[str, SecondsByRows] = {
        part.choice.name: {} for part in target.opened.weights.parts
    }
    links: dict[str, LinkTimes | None] = dict.fromkeys(measured)
    kinds: dict[str, tuple[float, ...]] = {}
    host: SecondsByRows = {}
    ways, sequences = target.opened.weights.ways, target.sequences
    with target.opened.routing.paused(), ways.trying(ways.now.splitting_by(all_on_device)):
        target.build_anew()  # otherwise a graph that was built without splits would be used again
        for n in (1, min(8, target.n_ctx - 1)):
            take_splits(target)  # forgets split layers of earlier graphs
            for i in range(3):  # fills the slots with the experts that these tokens use
                sequences.extend(0, [(7 * k + i) % target.n_vocab for k in range(n)])
                sequences.rewind(0, 0)
            for name, sides in take_splits(target):
                on_device(sides, measured[name])
                host = host or on_host(sides)
                links[name], kinds[name] = links[name] or on_link(sides), sides.kinds
    if not (any(measured.values()) or ways.now.declined):
        ways.decline("no layer is split: the device takes no layer's experts")
    target.build_anew()
    by_device = {}
    for name, device in measured.items():
        link = links[name]
        if device and host and link:
            by_device[name] = costs_of(device, host, link, kinds[name])
    return by_device


def take_splits(target: Engine) -> list[tuple[str, SplitSides]]:
    """Return a split layer of each executor that has one, with the name of its device."""
    return [
        (part.choice.name, sides)
        for part in target.opened.weights.parts
        for executor in part.device.executors.values()
        if (sides := executor.take_split()) is not None
    ]


def last_splits(target: Engine) -> list[tuple[str, SplitSides]]:
    """Return a split layer of the target's last decode on each device that has one.

    Streams of draft contexts are left out: their graphs may have been freed since.
    """
    firsts = (
        (part, next(iter(part.device.executors.values()), None))
        for part in target.opened.weights.parts
    )
    return [
        (part.choice.name, sides)
        for part, executor in firsts
        if executor is not None and (sides := executor.take_split()) is not None
    ]


def measure(
    target: Engine,
    text: Sequence[int],
    table: CostTable,
    request: TimingRequest,
    date: str,
    *,
    most_s: float | None = None,
    on_progress: Progress = lambda share: None,
    on_entry: Callable[[], object] = lambda: None,
) -> float:
    """Time decodes of `target` on running text, and add their entries to `table`.

    Takes about `most_s` seconds, or a first start's budget if that is None. Takes half as long if
    `request.again` is set. Returns the seconds spent, and empties sequence 0.

    Each timed decode gets the next tokens of the text, because a batch that was just decoded would
    find all of its experts in the slots. Routing is recorded during the measurement if the options
    ask for it.
    """
    is_on = target.opened.routing.is_on
    try:
        with target.opened.weights.ways.trying(target.opened.weights.ways.now):
            target.opened.routing.is_on = target.start.options.streaming.record_routing
            measuring = _Measuring(target, text, table, request, most_s)

            shown = 0.0  # sizes that turn out to be needed would move the bar back

            def entered() -> None:
                nonlocal shown
                shown = max(shown, min(1.0, 1.0 - measuring.left_s() / measuring.most_s))
                on_progress(shown)
                on_entry()

            fill(table, measuring.request, measuring.times, measuring.left_s, date, entered)
            on_progress(1.0)  # also if all was timed before the budget was spent
            return measuring.most_s - measuring.left_s()
    finally:
        target.opened.routing.is_on = is_on
        target.sequences.rewind(_SEQUENCE, 0)
        target.build_anew()


def n_repeats_of(n_least: int) -> int:
    """Return the most timings of a size in a measurement that times each size `n_least` times."""
    return max(12, 2 * n_least)


class _Measuring:
    """The state of one measurement: its position in the text, and its budget in seconds."""

    def __init__(
        self,
        target: Engine,
        text: Sequence[int],
        table: CostTable,
        request: TimingRequest,
        most_s: float | None,
    ) -> None:
        self._target, self._table = target, table
        plan = target.opened.plan
        self._layers = sorted({layer_of(e.name) for e in plan.streamed}) if plan else []
        self._held_layers = 0.0
        if plan is not None and plan.streamed_bytes:
            self._held_layers = plan.slot_bytes * len(self._layers) / plan.streamed_bytes
        self._began = perf_counter()
        self._way: Way | None = None
        self._fixed = target.min_batch
        self._last = (Way.FIXED, 0)  # the way and size of the last timed decode
        # Prefill is timed up to the ubatch if there are ways to compare, otherwise not at all.
        n_most = n_most_at_once(target) if len(request.ways) > 1 else request.n_verify
        n_most = min(n_most, target.n_ctx - 1, len(text))
        self.request = replace(
            request,
            n_verify=min(request.n_verify, n_most, target.layout.context.n_outputs),
            n_most=n_most,
            n_split=min(SMALL_BATCH, n_most_at_once(target)),
            n_repeats=n_repeats_of(request.n_least),
            part=self._part,
        )
        span = max(_LONG_SPAN if request.n_least > 1 else _SPAN, n_most)
        self._walk = TextWalk(target.sequences, _SEQUENCE, text, 0, span)
        self._go(request.ways[0])
        self._walk.time_s(1)
        self._one_s = self._walk.time_s(1)
        if self._one_s < _DEEP_BELOW_S and min(len(text), target.n_ctx) >= _DEPTH + span:
            self._walk = TextWalk(target.sequences, _SEQUENCE, text, _DEPTH, span)
        self.most_s = most_s or budget_s(self._one_s, len(request.ways))
        self.most_s *= 0.5 if request.again else 1.0

    def left_s(self) -> float:
        return self.most_s - (perf_counter() - self._began)

    def _go(self, way: Way) -> None:
        if way is self._way:
            return
        self._way = way
        ways, min_batch = self._target.opened.weights.ways, _SETTINGS.get(way, self._fixed)
        changed = replace(ways.now, min_batch=min_batch, min_batches=())
        ways.use(replace(changed, may_split=way is Way.SPLIT, unsplit=frozenset()))
        # This decode computes no logits, so the next, timed decode builds its graph anew.
        self._walk.time_s(1, n_logits=0)

    def times(self, way: Way, n: int) -> list[float]:
        """Return one time in seconds: the mean of decodes of `n` tokens.

        One token is what decodes without drafts repeat, so these decodes follow each other. Drafts
        change the size in most rounds, so a decode of several tokens follows one of one token.
        """
        self._go(way)
        rows = None if n <= SMALL_BATCH else 1  # rows of logits; None: one for each token
        table = self._table
        expected_s = table.seconds(way, n) if table.measured(way) else 0.0
        if expected_s >= _IN_PART_FROM_S and self._part(way, n) < 1.0:
            return [self._in_part_s(n, rows, self._n_timed(way, n))]
        n_leads = 0
        if way in (Way.STREAMED, Way.DENSE, Way.SPLIT, Way.FIXED):
            n_leads = -(-LEAD_TOKENS // n)
        if expected_s >= _IN_PART_FROM_S:
            n_leads = 0
        elif self._one_s < _LEAD_BELOW_S and self._last != (way, n):
            n_leads = max(1, n_leads)
        self._last = way, n
        found_s = one_timing(
            lambda: self._walk.time_s(n, n_logits=rows),
            lambda m: self._walk.lead(m, 1, rows if m == n else None),
            n,
            n_leads=n_leads,
            left_s=self.left_s(),
            # Drafts change the size, and a changed graph is built anew.
            leads_with_one=1 < n <= SMALL_BATCH and self._one_s < _LEAD_BELOW_S,
        )
        return [found_s]

    def _n_timed(self, way: Way, n: int) -> int:
        """Return the number of layers to time: more than fit the slots, so that some are copied."""
        facts = self._target.facts
        share = 1.0
        if way is Way.STREAMED and facts.n_experts:
            share = 1.0 - (1.0 - facts.n_experts_used / facts.n_experts) ** n
        held = self._held_layers / share if way is Way.STREAMED else 0.0
        return max(_LEAST_LAYERS, round(held) + 1)

    def _part(self, way: Way, n: int) -> float:
        """Return the share of a decode's layers that are computed before the decode is stopped.

        These are the timed layers, and one more to warm up. The share is 1 if the decode is not
        stopped.
        """
        table, n_layers = self._table, self._n_timed(way, n) + 1
        if way in (Way.SPLIT, Way.FIXED) or n_layers >= len(self._layers):
            return 1.0
        if not table.has(way) or table.seconds(way, n) < _IN_PART_FROM_S:
            return 1.0
        return n_layers / len(self._layers)

    def _in_part_s(self, n: int, rows: int | None, n_layers: int) -> float:
        """Return the seconds of a decode of the next `n` tokens, extrapolated from some layers.

        The decode is stopped after one layer to warm up and `n_layers` timed ones. All other layers
        are assumed to take as long as these.
        """
        clock = LayerClock(self._layers[1], self._layers[1 + n_layers])
        with ExitStack() as timing:
            for device in self._target.opened.devices:
                timing.enter_context(device.timing_layers(clock))
            try:
                return self._walk.time_s(n, n_logits=rows)
            except BrokenOff:
                return clock.seconds_of(self._layers)


def too_short(target: Engine, text: Sequence[int]) -> bool:
    """True if the context or the text is too short to measure in."""
    return min(len(text), target.n_ctx) <= _LEAST_ROOM


def use_split_costs(target: Engine, costs: Mapping[str, MeasuredCosts]) -> None:
    """Divide each device's split layers by its costs from now on. `costs`: by the device's name.

    A device without costs of its own uses those of the first device that has some.
    """
    weights = target.opened.weights
    if weights.hybrid is None or not costs:
        return
    by_name = {name: ByCosts(measured.costs()) for name, measured in costs.items()}
    splitter = next(iter(by_name.values()))
    own = {i: by_name.get(part.choice.name) for i, part in enumerate(weights.parts)}
    others = {i: s for i, s in own.items() if s and s is not splitter}
    weights.ways.change(splitter=splitter, splitters=others)


# -- one decode's time -----------------------------------------------------------------------------


def decode_s(
    sequences: Sequences,
    sequence: int,
    tokens: Sequence[int],
    n_logits: int | None = None,
    clock: Clock = perf_counter,
) -> float:
    start_s = clock()
    sequences.extend(sequence, tokens, n_logits)
    return clock() - start_s


class TextWalk:
    """Decodes a text batch by batch, at about `depth` tokens of context.

    Before the sequence would exceed `depth` + `span` tokens, it is rewound to `depth`. The text is
    started again only after its end.
    """

    def __init__(
        self, target: Sequences, sequence: int, text: Sequence[int], depth: int, span: int
    ) -> None:
        self._target, self._sequence, self._text = target, sequence, text
        self._depth, self._end = depth, min(depth + span, target.n_ctx)
        target.rewind(sequence, 0)
        if depth:
            target.extend(sequence, text[:depth], 0)
        # Snapshots of the last decode cannot rewind this far, and sliding windows forget.
        needs_state = depth and target.goes_back_by_checkpoints
        self._checkpoint = target.checkpoint(sequence) if needs_state else None
        self._at = depth if depth + span <= len(text) else 0

    def time_s(self, n: int, clock: Clock = perf_counter, n_logits: int | None = None) -> float:
        """Decode the next `n` tokens, and return the decode's seconds."""
        if self._target.length(self._sequence) + n > self._end:
            self._cut_back()
        return decode_s(self._target, self._sequence, self._next(n), n_logits, clock)

    def lead(self, n: int, n_decodes: int, n_logits: int | None = None) -> float:
        """Decode the next tokens in `n_decodes` batches of `n`, and return the seconds."""
        return sum(self.time_s(n, n_logits=n_logits) for _ in range(n_decodes))

    def _next(self, n: int) -> list[int]:
        taken = list(self._text[self._at : self._at + n])
        while len(taken) < n:
            taken += self._text[: n - len(taken)]
        self._at = (self._at + n) % len(self._text)
        return taken

    def _cut_back(self) -> None:
        if self._checkpoint is None:
            self._target.rewind(self._sequence, self._depth)
        else:
            self._target.restore(self._sequence, self._checkpoint)
