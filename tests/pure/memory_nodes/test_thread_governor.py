"""Fewer threads while other programs take processors, on a simulated machine."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from wide import examples

from offload.threads.governor import ThreadGovernor


class Machine:
    """`n_cores` processors, of which spinning processes take `n_taken`.

    A decode with more threads than free processors takes `penalty` times as long.
    """

    def __init__(self, n_cores: int, decode_s: float, penalty: float, seed: int = 0) -> None:
        self.n_cores, self.decode_s, self.penalty = n_cores, decode_s, penalty
        self.n_taken, self.noise = 0, 0.1
        self.random = random.Random(seed)
        self.governor = ThreadGovernor(n_cores)
        self.sentences: list[str] = []

    def seconds(self, n_threads: int) -> float:
        alone = self.decode_s * self.n_cores / n_threads
        return alone * (self.penalty if n_threads > self.n_cores - self.n_taken else 1.0)

    def run(self, seconds: float) -> float:
        """Decodes per second under the governor."""
        passed, n_decodes = 0.0, 0
        while passed < seconds:
            before = self.governor.wanted
            taken = self.seconds(before.n_threads) * self.random.uniform(
                1 - self.noise, 1 + self.noise
            )
            wanted = self.governor.observe(1, taken)
            if wanted is not before and wanted.sentence:
                self.sentences.append(wanted.sentence)
            passed += taken
            n_decodes += 1
        return n_decodes / passed

    @property
    def best(self) -> float:
        """Decodes per second with the best fixed number of threads."""
        return 1 / min(self.seconds(n) for n in range(1, self.n_cores + 1))


@settings(max_examples=examples(60), deadline=None)
@given(
    n_cores=st.sampled_from([2, 3, 4, 8, 16]),
    share_taken=st.floats(0.01, 0.6),
    decode_s=st.floats(0.002, 0.015),
    penalty=st.floats(3.5, 30),
    seed=st.integers(0, 99),
)
def test_most_of_the_best_fixed_throughput_is_back_within_ten_seconds(
    n_cores: int, share_taken: float, decode_s: float, penalty: float, seed: int
) -> None:
    machine = Machine(n_cores, decode_s, penalty, seed)
    assert machine.run(3) > 0.9 * machine.best
    machine.n_taken = min(max(1, round(share_taken * n_cores)), n_cores - 1)
    machine.run(10)
    assert machine.run(10) >= 0.8 * machine.best
    machine.n_taken = 0
    machine.run(20)
    assert machine.run(5) >= 0.9 * machine.best
    assert machine.governor.wanted.n_threads == n_cores
    assert machine.governor.wanted.polls


def test_each_change_is_told_in_one_line() -> None:
    machine = Machine(2, 0.005, 30)
    machine.run(2)
    machine.n_taken = 1
    machine.run(20)
    assert not machine.governor.wanted.polls
    machine.n_taken = 0
    machine.run(20)
    fewer, again = machine.sentences
    assert "other programs use the processors: computing with 1 of 2 threads" in fewer
    assert again == "computing with 2 threads again"


def test_an_undisturbed_machine_keeps_all_threads() -> None:
    machine = Machine(4, 0.01, 1)
    machine.noise = 0.5
    machine.run(60)
    assert (machine.sentences, machine.governor.wanted.n_threads) == ([], 4)


def test_decodes_that_became_slower_by_themselves_keep_all_threads() -> None:
    """A longer context or more misses slow decodes. Fewer threads do not help, so the new time
    is learnt."""
    machine = Machine(4, 0.01, 1)
    machine.run(2)
    machine.decode_s = 0.03
    machine.run(5)
    assert machine.run(60) > 0.97 * machine.best
    assert machine.sentences == []


def test_expected_seconds_may_come_from_elsewhere() -> None:
    """A cost table may know a decode's seconds, even if the engine opened on a busy machine."""
    governor = ThreadGovernor(2)
    for _ in range(20):
        slow = 0.1 if governor.wanted.n_threads == 2 else 0.01
        governor.observe(1, slow, expected_s=0.005)
    assert governor.wanted.n_threads == 1


def test_a_table_that_is_too_fast_misleads_once() -> None:
    governor = ThreadGovernor(4)
    wanted = [governor.observe(1, 0.04 * 4 / governor.wanted.n_threads, 0.01) for _ in range(2000)]
    assert sum(w.n_threads < 4 for w in wanted) < 20
    assert {w.n_threads for w in wanted[100:]} == {4}


def test_a_thread_that_the_kernel_moves_late_does_not_decide_alone() -> None:
    """With one thread, decodes are slow until the kernel moves it from the busy processor."""
    governor, alone_s, numbers = ThreadGovernor(2), 0.0, []
    for _ in range(20):
        governor.observe(1, 0.0005)
    for _ in range(4_000):
        numbers.append(governor.wanted.n_threads)
        alone_s = alone_s + 0.008 if numbers[-1] == 1 else 0.0
        governor.observe(1, 0.008 if alone_s < 0.06 else 0.0006)
    assert numbers[-1_000:].count(1) > 900


def test_one_thread_stays_one() -> None:
    governor = ThreadGovernor(1)
    assert {governor.observe(1, s, 0.001).n_threads for s in (0.001, 1.0, 9.0)} == {1}


def test_one_long_decode_among_short_ones_is_no_disturbance() -> None:
    governor = ThreadGovernor(2)
    for _ in range(20):
        governor.observe(1, 0.0002)
    for seconds in (0.8, 0.0006, 0.0006, *[0.0002] * 20):  # after a long decode caches are cold
        governor.observe(1, seconds)
    assert governor.wanted.n_threads == 2


def test_a_large_slowdown_is_not_told_exactly() -> None:
    governor = ThreadGovernor(2)
    for _ in range(20):
        governor.observe(1, 0.0002)
    wanted = governor.wanted
    for _ in range(80):
        wanted = governor.observe(1, 0.3 if wanted.n_threads == 2 else 0.0004)
        if wanted.sentence:
            break
    assert wanted.sentence.startswith("decodes take more than 20 times as long as expected")


def test_the_first_decode_after_threads_have_slept_does_not_decide_alone() -> None:
    """Decodes of 0.4 ms, of which the first with all threads again takes 2 ms to wake them."""
    governor, wake_s, sentences = ThreadGovernor(2), 0.0, []
    for i in range(40_000):
        before = governor.wanted
        is_disturbed = i < 4_000
        seconds = (0.02 if is_disturbed and i > 2_000 else 0.0004) + wake_s
        if before.n_threads == 1:
            seconds = 0.0006
        after = governor.observe(1, seconds)
        wake_s = 0.002 if after.n_threads > before.n_threads else 0.0
        if after is not before and after.sentence:
            sentences.append(after.sentence)
    assert [sentence.rsplit("computing with ", 1)[1] for sentence in sentences] == [
        "1 of 2 threads", "2 threads again",
    ]  # fmt: skip
    assert governor.wanted.n_threads == 2
