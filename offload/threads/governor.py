"""Decides how many threads compute while other programs use the processors. Pure.

ggml's threads meet at a barrier after each operation and spin there. If another program takes one
of the processors, all threads wait for the thread that has lost its processor. Decodes then take
many times as long, and fewer threads are faster. If decodes take much longer than expected, the
governor tries fewer threads. From time to time it then tries more threads again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

_NOTICE_S = 1.0  # seconds of decodes judged together; shorter disturbances are ignored
_ROUNDING_S = 1e-9  # rounding error of sums of seconds
_MOST_WEIGHT_S = _NOTICE_S / 4  # cap on a decode's weight, so that one slow decode is not enough
_SLOW_SHARE = 0.3  # share of the time in slow decodes from which fewer threads are tried
_SLOW = 1.7  # multiple of the expected seconds from which a decode is slow
_TRIAL_DECODES = 3
_TRIAL_S = 0.3  # seconds after which a trial ends early
# A trial takes at least this long. The first decode wakes sleeping threads, which may take as long
# as a small model's decode, and must not decide alone.
_LEAST_TRIAL_S = 0.02
_HEALTHY = 1.25  # tolerated multiple of the slowdown that fewer threads cause by themselves
_GAIN = 0.9  # largest share of the slowdown at which fewer threads are kept
_NOT_WORSE = 1.05  # largest multiple of the slowdown at which more threads are kept
_PROBE_AFTER_S = 2.0  # seconds of decodes before more threads are tried
_PROBE_SHARE = 0.08  # largest share of the time for trying more threads without success
_HOLD_S, _MOST_HOLD_S = 10.0, 320.0  # seconds of decodes between a failed search and the next one
_MOST_SAID = 20  # largest slowdown reported exactly; one decode may cause most of a larger one
_N_KEPT = 31  # kept decodes of one size, whose median is the expected time
_LEAST_KEPT = 5
_N_CALM = 16  # undisturbed decodes after which the expected seconds are looked up again


@dataclass(frozen=True)
class WantedThreads:
    """The number of threads to compute with.

    `polls` is False while idle threads should sleep instead of spin. `sentence` tells the user
    about a change, or is "". The object is a new one after each change.
    """

    n_threads: int
    polls: bool
    sentence: str = ""


@dataclass
class _ThreadTally:
    """Sums over decodes with one number of threads. `expected_s` is expected with all threads."""

    n_decodes: int = 0
    seconds: float = 0.0
    expected_s: float = 0.0

    def add(self, seconds: float, expected_s: float) -> None:
        self.n_decodes += 1
        self.seconds += seconds
        self.expected_s += expected_s

    @property
    def is_done(self) -> bool:
        return self.seconds >= _TRIAL_S or (self.n_decodes >= _TRIAL_DECODES and self.is_meaningful)

    @property
    def is_meaningful(self) -> bool:
        return self.seconds >= _LEAST_TRIAL_S

    @property
    def slowdown(self) -> float:
        return self.seconds / self.expected_s


@dataclass
class _FewerThreads:
    """A search for fewer threads, which halves the range between two numbers of threads.

    Other programs slowed down `disturbed` threads, but not `healthy` threads. `slowdowns` are by
    number of threads.
    """

    slowdowns: dict[int, float]
    disturbed: int
    healthy: int = 0
    tally: _ThreadTally = field(default_factory=_ThreadTally)


class ThreadGovernor:
    """Decides the number of threads by the durations of decodes.

    All waiting times count only seconds spent in decodes.
    """

    def __init__(self, n_most: int) -> None:
        """`n_most`: threads to compute with while no other program disturbs."""
        self._n_most = n_most
        self.wanted = WantedThreads(n_most, polls=True)
        self._usual: dict[int, deque[float]] = {}  # undisturbed seconds by number of tokens
        self._recent: deque[tuple[float, float]] = deque()  # (seconds, expected seconds)
        self._weight_s, self._slow_s, self._n_slow = 0.0, 0.0, 0
        self._search: _FewerThreads | None = None
        self._probe: _ThreadTally | None = None
        self._probe_step = 1
        self._settled_slowdown = 1.0  # with the reduced number of threads
        self._settled_n = n_most
        self._slow = _slow(n_most, 1.0)
        # By number of tokens, while no program disturbs: the seconds above which a decode is slow,
        # and the list to which times of undisturbed decodes are added.
        self._calm: dict[int, tuple[float, deque[float]]] = {}
        self._n_calm = 0
        self._quiet_s = 0.0  # seconds of decodes until the next search or probe may start
        self._hold_s = _HOLD_S
        self._trusts_others = True  # False after a failed search: `expected_s` is then ignored

    def observe(
        self, n_tokens: int, seconds: float, expected_s: float | None = None
    ) -> WantedThreads:
        """Learn from a decode of `n_tokens`, and return the threads for the next decode.

        The expected time with all threads is the median of undisturbed decodes of this size.
        Before there are enough such decodes, `expected_s` replaces the median, unless an earlier
        search has failed.
        """
        if self._n_most == 1:
            return self.wanted
        self._quiet_s -= seconds
        calm = self._calm.get(n_tokens)
        if calm is not None and seconds <= calm[0]:  # nearly all decodes end here
            calm[1].append(seconds)
            self._n_calm += 1
            if self._n_calm >= _N_CALM:
                self._calm.clear()
                self._n_calm = 0
            return self.wanted
        expected_s = self._median(n_tokens) or (expected_s if self._trusts_others else None)
        if expected_s is None:
            self._learn(n_tokens, seconds)
        elif self._search is not None:
            self._search_on(self._search, seconds, expected_s)
        elif self._probe is not None:
            self._probe_on(self._probe, seconds, expected_s)
        else:
            self._watch(n_tokens, seconds, expected_s)
        return self.wanted

    # -- expected seconds -------------------------------------------------------------------------

    def _median(self, n_tokens: int) -> float | None:
        known = self._usual.get(n_tokens, ())
        return sorted(known)[len(known) // 2] if len(known) >= _LEAST_KEPT else None

    def _learn(self, n_tokens: int, seconds: float) -> None:
        if self.wanted.n_threads == self._n_most:
            self._usual.setdefault(n_tokens, deque(maxlen=_N_KEPT)).append(seconds)

    # -- noticing ---------------------------------------------------------------------------------

    def _watch(self, n_tokens: int, seconds: float, expected_s: float) -> None:
        n, recent = self._settled_n, self._recent
        is_slow = seconds > self._slow * expected_s
        if is_slow:
            self._calm.clear()
        else:
            self._learn(n_tokens, seconds)
        recent.append((seconds, expected_s if is_slow else 0.0))
        weight_s = min(seconds, _MOST_WEIGHT_S)
        self._weight_s += weight_s
        self._slow_s += weight_s * is_slow
        self._n_slow += is_slow
        while len(recent) > _TRIAL_DECODES:
            oldest_s, slow = recent[0]
            weight_s = min(oldest_s, _MOST_WEIGHT_S)
            if self._weight_s - weight_s < _NOTICE_S:
                break
            recent.popleft()
            self._weight_s -= weight_s
            self._slow_s -= weight_s * (slow > 0)
            self._n_slow -= slow > 0
        if self._quiet_s > 0:
            return
        is_disturbed = self._n_slow > 1 and self._slow_s >= _SLOW_SHARE * self._weight_s
        if n > 1 and is_disturbed and self._is_enough():
            judged = [(s, e) for s, e in recent if e]
            trouble = sum(s for s, _ in judged) / sum(e for _, e in judged)
            self._search = _FewerThreads({n: trouble}, disturbed=n)
            self._want(n - 1)
        elif n == self._n_most:
            if not self._n_slow and len(recent) >= _TRIAL_DECODES and self._median(n_tokens):
                self._calm[n_tokens] = (self._slow * expected_s, self._usual[n_tokens])
        else:
            self._probe = _ThreadTally()
            self._want(min(n + self._probe_step, self._n_most))

    def _is_enough(self) -> bool:
        """True if the recent decodes are enough to judge by."""
        are_long = all(s >= _NOTICE_S for s, _ in self._recent)
        n_least = 2 if are_long else _TRIAL_DECODES
        return len(self._recent) >= n_least and self._weight_s >= _NOTICE_S - _ROUNDING_S

    # -- fewer threads ----------------------------------------------------------------------------

    def _search_on(self, search: _FewerThreads, seconds: float, expected_s: float) -> None:
        search.tally.add(seconds, expected_s)
        if not search.tally.is_done:
            return
        n, slowdown = self.wanted.n_threads, search.tally.slowdown
        if not self._helps(search, slowdown) and search.tally.seconds < _TRIAL_S:
            return  # the kernel may not have moved a thread from a busy processor yet
        search.slowdowns[n], search.tally = slowdown, _ThreadTally()
        # Fewer threads are slower by themselves. Decodes that are no slower than that count as
        # undisturbed.
        if slowdown <= _HEALTHY * self._n_most / n:
            search.healthy = n
        else:
            search.disturbed = n
        if search.disturbed - search.healthy > 1 and search.disturbed > 1:
            self._want((search.healthy + search.disturbed) // 2)
            return
        self._search = None
        started = self._settled_n
        trouble = search.slowdowns[started]
        best = min(search.slowdowns, key=lambda n: (search.slowdowns[n], -n))
        if not self._helps(search, search.slowdowns[best]):
            # Other programs are not the cause. Decodes may have become slower for another reason,
            # so their usual times are learnt anew.
            self._usual.clear()
            self._trusts_others = False
            self._settle(started, max(1.0, self._settled_slowdown), self._hold_s)
            self._hold_s = min(2 * self._hold_s, _MOST_HOLD_S)
            return
        times = f"{trouble:.1f}" if trouble < _MOST_SAID else f"more than {_MOST_SAID}"
        words = (
            f"decodes take {times} times as long as expected, other programs use the "
            f"processors: computing with {best} of {self._n_most} threads"
        )
        self._settle(best, search.slowdowns[best], _PROBE_AFTER_S, words)

    def _helps(self, search: _FewerThreads, slowdown: float) -> bool:
        """True if this slowdown is better than the one that started the search."""
        return slowdown <= _GAIN * search.slowdowns[self._settled_n]

    # -- more threads again -----------------------------------------------------------------------

    def _probe_on(self, tally: _ThreadTally, seconds: float, expected_s: float) -> None:
        tally.add(seconds, expected_s)
        n = self.wanted.n_threads
        if tally.is_meaningful and tally.slowdown > _HEALTHY * self._settled_slowdown:
            self._probe, self._probe_step = None, 1
            wait_s = max(_PROBE_AFTER_S, tally.seconds / _PROBE_SHARE)
            self._settle(self._settled_n, self._settled_slowdown, wait_s)
        elif tally.is_done:
            self._probe = None
            if tally.slowdown > _NOT_WORSE * self._settled_slowdown:
                self._probe_step = 1
                self._settle(self._settled_n, self._settled_slowdown, _PROBE_AFTER_S)
            elif n == self._n_most:
                self._hold_s, self._probe_step = _HOLD_S, 1
                self._settle(n, 1.0, 0.0, f"computing with {n} threads again")
            else:
                self._probe_step *= 2
                self._settle(n, tally.slowdown, 0.0)

    # -- steps ------------------------------------------------------------------------------------

    def _settle(self, n: int, slowdown: float, quiet_s: float, sentence: str = "") -> None:
        self._settled_n, self._settled_slowdown, self._quiet_s = n, slowdown, quiet_s
        self._slow = _slow(n, slowdown)
        self._recent.clear()
        self._weight_s, self._slow_s, self._n_slow = 0.0, 0.0, 0
        self._want(n, sentence)

    def _want(self, n: int, sentence: str = "") -> None:
        self.wanted = WantedThreads(n, polls=n == self._n_most, sentence=sentence)


def _slow(n_threads: int, slowdown: float) -> float:
    """Return the multiple of the expected seconds from which a decode with `n_threads` is slow.

    `slowdown` is the usual multiple.
    """
    fewer = _HEALTHY * n_threads / (n_threads - 1) if n_threads > 1 else 0.0
    return max(_SLOW, fewer) * slowdown
