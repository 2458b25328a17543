"""`--cpu-mask`, `--cpu-range` and `--cpu-strict`, for one token, for batches and for drafts."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_performance_cores import intel, machine

from numa.machine import read_topology
from numa.place import Candidate, Strategy
from numa.threads import Processors, one_each
from numa.topology import Core, MemoryNode, Topology
from numa.tune import Trial, TuneResult
from specoffload.config.command_line import read_command_line
from specoffload.config.environment import Environment, Host
from specoffload.config.numa_choice import Threads, choose_draft_threads, choose_threads
from specoffload.config.options import CpuRange, Options
from specoffload.config.values import cpu_mask, cpu_range
from specoffload.errors import UsageError
from specoffload.kept_machine import Tuned

UNTUNED = Tuned(None)


def options_of(words: str) -> Options:
    return read_command_line("run", ["-m", "m.gguf", *words.split()]).options


def host_of(topology: Topology, tuned: Tuned = UNTUNED) -> Host:
    n = len(topology.usable_cores)
    return Host(Environment(), topology, tuned, n, len(topology.allowed_cpus))


def chosen(words: str, topology: Topology, tuned: Tuned = UNTUNED) -> tuple[Threads, str]:
    reasons: list[str] = []
    threads = choose_threads(options_of(words), host_of(topology, tuned), reasons)
    return threads, "\n".join(reasons)


def of_draft(words: str, topology: Topology) -> tuple[Threads, Threads | None, str]:
    options, host, reasons = options_of(words), host_of(topology), []  # type: ignore[var-annotated]
    target = choose_threads(options, host, [])
    target, draft = choose_draft_threads(options, options.of_draft, host, target, reasons)
    return target, draft, "\n".join(reasons)


@pytest.fixture
def eight(tmp_path: Path) -> Topology:
    """Eight cores with one hardware thread each."""
    return read_topology(machine(tmp_path, [(cpu,) for cpu in range(8)]))


@pytest.fixture
def siblings(tmp_path: Path) -> Topology:
    """Four cores with two hardware threads each: 0 and 1, 2 and 3, and so on."""
    return read_topology(machine(tmp_path, [(cpu, cpu + 1) for cpu in range(0, 8, 2)]))


def two_nodes() -> Topology:
    gib = 1 << 30
    return Topology(
        nodes=tuple(
            MemoryNode(
                n, tuple(range(4 * n, 4 * n + 4)), 64 * gib, 60 * gib, (10, 20)[:: 1 - 2 * n]
            )
            for n in range(2)
        ),
        cores=tuple(Core((cpu,), cpu // 4) for cpu in range(8)),
        gpus=(),
        allowed_cpus=tuple(range(8)),
        allowed_nodes=(0, 1),
    )


@settings(deadline=None)
@given(st.sets(st.integers(0, 511), min_size=1))
def test_a_mask_is_read_as_it_is_written(cpus: set[int]) -> None:
    ordered = tuple(sorted(cpus))
    assert cpu_mask(Processors(ordered).mask) == ordered
    assert cpu_mask(Processors(ordered).mask.removeprefix("0x").upper()) == ordered


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "hexadecimal"),
        ("0x", "hexadecimal"),
        ("0xfg", "hexadecimal"),
        ("-1", "hexadecimal"),
        ("1" + 128 * "0", "at most 512 bits"),
    ],
)
def test_a_text_that_is_no_mask_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        cpu_mask(text)


@pytest.mark.parametrize(
    ("text", "found"),
    [("0-7", CpuRange(0, 7)), ("-3", CpuRange(0, 3)), ("4-", CpuRange(4, None)),
     ("5-5", CpuRange(5, 5)), ("-", CpuRange(0, None))],
)  # fmt: skip
def test_a_range_may_be_open_as_in_llama_cpp(text: str, found: CpuRange) -> None:
    assert cpu_range(text) == found


@pytest.mark.parametrize(
    ("text", "why"),
    [("4", "such as 0-7"), ("a-b", "such as"), ("7-3", "3 is below 7"), ("0-512", "below 512"),
     ("", "such as"), ("1-2-3", "such as"), ("99999999999-", "such as")],
)  # fmt: skip
def test_a_text_that_is_no_range_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        cpu_range(text)


@pytest.mark.parametrize(
    "words",
    ["-C 0xzz", "-Cr 9", "--cpu-strict 2", "-Cb 0x", "-Crb 7-3", "--cpu-strict-batch x",
     "-md d.gguf -Cd 0xzz", "-md d.gguf -Crbd 1"],
)  # fmt: skip
def test_a_bad_value_is_one_sentence_that_names_the_flag(words: str) -> None:
    with pytest.raises(UsageError) as refused:
        options_of(words)
    said = str(refused.value)
    assert words.split()[-2] in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("words", "cpus"),
    [
        ("-C 0xf0", (4, 5, 6, 7)),
        ("--cpu-range 2-3", (2, 3)),
        ("-C 1 -Cr 6-7", (0, 6, 7)),
        ("-C 1 -C 2", (0, 1)),
        ("-Cr 5-", (5, 6, 7)),
        ("--cpu-range=-1", (0, 1)),
        ("-Cr -1", (0, 1)),
    ],
)
def test_threads_run_on_the_named_processors_one_per_core(
    eight: Topology, words: str, cpus: tuple[int, ...]
) -> None:
    threads, said = chosen(words, eight)
    on = Processors(cpus)
    assert threads == Threads(len(cpus), len(cpus), None, on, on)
    assert f"{len(cpus)} thread" in said


def test_an_empty_mask_is_no_mask_as_in_llama_cpp(eight: Topology) -> None:
    assert chosen("-C 0x0", eight)[0] == chosen("", eight)[0] == Threads(8, 8)


def test_more_threads_than_processors_are_capped(eight: Topology) -> None:
    threads, said = chosen("-C 0x3 -t 6", eight)
    assert (threads.n_decode, threads.n_batch) == (2, 2)
    assert "-t 6: -C names 2 processors, so 2 threads run" in said


def test_processors_beyond_the_machine_are_left_out_by_name(eight: Topology) -> None:
    threads, said = chosen("-C 0xfff0", eight)
    assert threads.decode_on.cpus == (4, 5, 6, 7)
    assert "-C: this process may use processors 0-7, so 8-15 are left out" in said
    with pytest.raises(UsageError, match=r"^-Cr: this process may use processors 0-7, and"):
        chosen("-Cr 9-12", eight)
    with pytest.raises(UsageError, match="of these none is named"):
        chosen("-Cr 30-", eight)


def test_a_cpuset_leaves_out_named_processors_too(eight: Topology) -> None:
    within = replace(eight, allowed_cpus=(2, 3))
    threads, said = chosen("-Cr 0-7", within)
    assert threads.decode_on == Processors((2, 3))
    assert "0-1,4-7 are left out" in said


def test_strict_gives_each_core_a_thread_before_any_gets_two(siblings: Topology) -> None:
    assert chosen("--cpu-strict 1 -Cr 0-7", siblings)[0].decode_on == Processors((0, 2, 4, 6), True)
    assert chosen("--cpu-strict 1 -t 2", siblings)[0].decode_on == Processors((0, 2), True)
    assert chosen("--cpu-strict 1 -C f -t 3", siblings)[0].decode_on == Processors((0, 1, 2), True)
    threads, said = chosen("--cpu-strict 1 -t 99", siblings)
    assert threads.decode_on == Processors(tuple(range(8)), True)
    assert "8 threads run" in said


@settings(deadline=None)
@given(st.integers(1, 40))
def test_each_strict_thread_has_a_processor_of_its_own(n: int) -> None:
    cores = [Core((2 * i, 2 * i + 1), 0, i < 3) for i in range(6)]
    topology = replace(two_nodes(), cores=tuple(cores), allowed_cpus=tuple(range(12)))
    found = one_each(topology, n)
    assert len(set(found)) == len(found) == min(n, 12)
    assert n > 3 or set(found) <= {0, 2, 4}, "fast cores first"


def test_batches_have_processors_of_their_own(eight: Topology) -> None:
    threads, _ = chosen("-C 0x3 -Cb 0xf0", eight)
    assert threads == Threads(2, 4, None, Processors((0, 1)), Processors((4, 5, 6, 7)))
    threads, _ = chosen("-C 0x3 --cpu-strict-batch 1", eight)
    assert threads.decode_on == Processors((0, 1))
    assert threads.batch_on == Processors((0, 1), strict=True)
    # Threads of OpenMP keep a graph's processors, so the other pool names all of them.
    threads, _ = chosen("-Crb 0-1", eight)
    assert threads == Threads(8, 2, None, Processors(tuple(range(8))), Processors((0, 1)))


def test_flags_decide_before_the_kinds_of_cores_do(tmp_path: Path) -> None:
    topology = read_topology(intel(tmp_path, 4, 8))
    threads, said = chosen("-Cr 0-15", topology)
    assert threads.n_decode == 12
    assert threads.decode_on == Processors(tuple(range(16)))
    assert "those on 8-15 are much slower" in said
    threads, said = chosen("--cpu-strict 1", topology)
    assert threads.decode_on == Processors((0, 2, 4, 6), strict=True)
    assert "much slower" not in said
    only_slow, said = chosen("-Cr 8-15", topology)
    assert only_slow.n_decode == 8
    assert "much slower" not in said


def test_without_numa_unnamed_processors_are_left_to_the_kernel(tmp_path: Path) -> None:
    topology = read_topology(intel(tmp_path, 4, 8))
    threads, said = chosen("--numa none -Crb 0-15", topology)
    assert threads.decode_on == threads.batch_on == Processors(tuple(range(16)))
    assert "threads run on processors 0-15: those on 8-15 are much slower" in said
    threads, _ = chosen("-Crb 0-15", topology)
    assert threads.decode_on == Processors((0, 2, 4, 6))
    threads, said = chosen("-t 12 -Crb 0-7", topology)
    assert threads.decode_on == Processors(tuple(range(16)))
    assert "threads run on processors 0-15: those on 8-15 are much slower" in said


def test_a_tuned_number_of_threads_is_for_all_processors(eight: Topology) -> None:
    best = Candidate(Strategy.SINGLE, 3)
    tuned = Tuned(TuneResult(best, (Trial(best, {1: 0.1, 8: 0.2}),), (), "here"))
    assert chosen("", eight, tuned)[0].n_decode == 3
    threads, said = chosen("-C f", eight, tuned)
    assert threads.n_decode == 4
    assert "-C: the tuned number of threads is not used" in said


def test_on_several_nodes_the_teams_keep_to_the_mask() -> None:
    topology = two_nodes()
    threads, _ = chosen("-Cr 2-5", topology)
    assert threads.plan is not None
    assert set(threads.plan.decode.cpus) == set(threads.plan.batch.cpus) == {2, 3, 4, 5}
    assert threads.plan.draft.cpus in ((2, 3), (4, 5))
    assert {cpu // 4 for cpu in threads.plan.draft.cpus} in ({0}, {1})
    threads, _ = chosen("-Cr 0-3 -Crb 0-7", topology)
    assert threads.plan is not None
    assert (threads.n_decode, threads.n_batch) == (4, 8)
    assert set(threads.plan.batch.cpus) == set(range(8))
    _, said = chosen("-Cr 0-3 --cpu-strict 0", topology)
    assert "--cpu-strict 0 ignored: on several memory nodes" in said
    loose, said = chosen("--numa none -Cr 0-3", topology)
    assert loose == Threads(4, 4, None, Processors((0, 1, 2, 3)), Processors((0, 1, 2, 3)))


def test_a_draft_has_the_targets_processors_or_its_own(eight: Topology) -> None:
    target, draft, _ = of_draft("-md d.gguf -C 0xf", eight)
    assert draft is None
    assert target.decode_on == Processors((0, 1, 2, 3))
    target, draft, _ = of_draft("-md d.gguf -C 0xf -td 2", eight)
    assert draft == Threads(2, 4, None, Processors((0, 1, 2, 3)), Processors((0, 1, 2, 3)))
    target, draft, _ = of_draft("-md d.gguf -Cd 0xc0 --cpu-strict-draft 1", eight)
    assert draft == Threads(
        2, 2, None, Processors((6, 7), strict=True), Processors((6, 7), strict=True)
    )
    assert target.decode_on == Processors(tuple(range(8))), "not where the draft's threads stay"
    _, draft, said = of_draft("-md d.gguf -td 64", eight)
    assert draft is not None
    assert draft.n_decode == 8
    assert "-td 64: this process may use 8 processors, so 8 threads run" in said
    _, draft, _ = of_draft("-md d.gguf -C 3 -Crbd 4-7 -tbd 3", eight)
    assert draft == Threads(2, 3, None, Processors((0, 1)), Processors((4, 5, 6, 7)))


def test_a_drafts_own_threads_stay_on_performance_cores(tmp_path: Path) -> None:
    topology = read_topology(intel(tmp_path, 4, 8))
    _, draft, _ = of_draft("-md d.gguf -td 2", topology)
    assert draft is not None
    assert draft.decode_on == Processors((0, 2, 4, 6))


def test_the_numbers_of_a_kept_file_name_the_processors() -> None:
    from specoffload.kept import thread_words

    every, some = Processors(), Processors((0, 1))
    assert thread_words(4, 8, every, every) == "4/8"
    assert thread_words(2, 2, some, some) == "2/2 on processors 0-1"
    assert thread_words(2, 2, some, some) != thread_words(2, 2, Processors((2, 3)), some)
