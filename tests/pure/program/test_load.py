"""A busy machine is said to be one, an idle one is not."""

from __future__ import annotations

import subprocess
import sys

from specoffload.bench.load import Load, Watch, load_sentence

_SPIN = """
import time
while time.process_time() < 1.0: pass
print(flush=True)
input()
"""


def test_an_idle_machine_is_no_news() -> None:
    assert load_sentence(Load(others=0.05, n_cpus=8)) == ""


def test_a_busy_one_is_named_with_its_figures() -> None:
    assert "other programs took 63% of the 2 processors" in load_sentence(Load(0.63, 2))
    assert "took 30% of the processor in" in load_sentence(Load(0.3, 1))


def test_work_of_a_child_is_not_the_load_of_others() -> None:
    """Neither while it runs nor when it has ended. Processor times are rounded to 10 ms."""
    watch = Watch()
    spinning = subprocess.Popen(
        [sys.executable, "-c", _SPIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert spinning.stdout is not None
    spinning.stdout.readline()
    while_running = watch.spent_s()
    spinning.communicate(b"\n", timeout=30)
    ended = watch.spent_s()
    for own_s, busy_s, total_s in (while_running, ended):
        assert own_s >= 0.9
        assert own_s - 0.1 <= busy_s <= total_s + 1e-6  # rounding of floats
    load = watch.others()
    own_s, busy_s, total_s = watch.spent_s()
    assert 0 <= load.others <= (busy_s - own_s) / total_s + 0.1
