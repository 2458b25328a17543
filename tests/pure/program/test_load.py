"""A busy machine is said to be one, an idle one is not."""

from __future__ import annotations

from specoffload.bench.load import Load, load_sentence, look_at_load


def test_an_idle_machine_is_no_news() -> None:
    assert load_sentence(Load(busy=0.05, average=0.4, n_cpus=8, n_all=8)) == ""
    assert load_sentence(Load(busy=0.0, average=8.0, n_cpus=1, n_all=8)) == ""


def test_a_busy_one_is_named_with_its_figures() -> None:
    now = load_sentence(Load(busy=0.63, average=1.26, n_cpus=2, n_all=2))
    assert "63% of the 2 processors now, load average 1.3" in now
    assert load_sentence(Load(busy=0.0, average=2.5, n_cpus=2, n_all=2)), "many wait"
    assert "of the processor now" in load_sentence(Load(0.3, 0.0, 1, 2))


def test_this_machine_is_looked_at() -> None:
    load = look_at_load()
    assert 0 <= load.busy <= 1
    assert 1 <= load.n_cpus <= load.n_all
