"""The player plays programs or stops at wrong ones. It touches no memory that is not its own."""

from __future__ import annotations

import ctypes as C
import time
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from player_memory import (
    AHEAD,
    DIVIDE,
    END,
    HOST,
    OVERLAP,
    READ,
    ROWS,
    SUBMIT,
    Change,
    Machine,
    Sizes,
    some_sizes,
)
from test_split import any_costs
from wide import examples

from offload.ggml import player as api
from offload.ggml.library import log
from offload.ggml.player import native
from offload.schedule.division import SplitCosts
from offload.stream import doorbell
from offload.stream.bell_use import BELLS

seeds = st.integers(0, 2**32)
numbers = st.one_of(st.integers(-2, 20), st.sampled_from([-(2**62), 63, 64, 65, 200, 2**31, 2**62]))
# Numbers that tell the player nothing about the sizes of its arrays.
changes = st.lists(
    st.tuples(
        st.sampled_from(
            [
                *(
                    "words",
                    "words",
                    "words",
                    "parts",
                    "ids",
                    "kinds",
                    "forget",
                    "view.axis",
                    "token_rows",
                ),
                *("seconds", "costs.n_ends", "costs.n_lines"),
                *("host.row_bytes", "host.header_bytes", "host.out_bytes", "host.rows_per_token"),
                *("layer.at", "layer.last", "layer.may_repeat", "layer.n_ahead", "layer.n_readers"),
                *(
                    "layer.ids_stride",
                    "layer.issues",
                    "layer.home",
                    "layer.n_reads",
                    "player.whole",
                    "player.splitter",
                    "player.recording",
                ),
                *("player.clocked", "player.python_open", "player.clock_ns"),
                *("table.slot_of", "table.state", "table.last_use", "table.reason"),
                *("late", "n_late", "n_arrived"),
                *("segments", "segments", "ahead.ids_at", "ahead.table_at", "ahead.resume"),
                "table.recorded",
                *("ringing", "ringing", "player.first_part", "player.is_careful"),
                *("bell.n_ahead", "bell.n_told"),
            ]
        ),
        st.integers(0, 200),
        numbers,
    ),
    max_size=6,
)
sizes = st.lists(
    st.tuples(
        st.sampled_from(["n_experts", "n_used", "n_tokens", "n_slots", "n_record"]),
        st.integers(0, 2),
        st.sampled_from([-1, 0, 1, 2, 3, 64, 65, 300]),
    ),
    max_size=2,
)


def machine(
    seed: int,
    wrong: list[Change] | None = None,
    wrong_sizes: list[Change] | None = None,
    costs: SplitCosts | None = None,
) -> Machine:
    rng = Random(seed)
    layers = [some_sizes(rng) for _ in range(rng.randint(1, 3))]
    for name, which, value in wrong_sizes or []:
        setattr(layers[which % len(layers)], name, value)
    per_wait = rng.choice((1, 2, 3, 3))
    rings = rng.random() < 0.5
    for layer in layers if rings else ():
        layer.is_split = True
    return Machine(
        layers, rng, wrong or [], costs, whole=seed % 2 == 0, layers_per_wait=per_wait, rings=rings
    )  # fmt: skip


@settings(deadline=None, max_examples=examples(300))
@given(seeds, st.none() | any_costs())
def test_a_program_is_played_to_its_end(seed: int, costs: SplitCosts | None) -> None:
    made = machine(seed, costs=costs)
    assert native().check(made.address) == 0
    for _ in range(3):
        assert made.play() == api.DONE
        assert made.player.done == made.n_nodes


@settings(deadline=None, max_examples=examples(300))
@given(seeds, changes, sizes, st.none() | any_costs())
def test_a_wrong_program_is_refused_or_stops_inside_its_memory(
    seed: int, wrong: list[Change], wrong_sizes: list[Change], costs: SplitCosts | None
) -> None:
    """Machine.play looks at the bytes around all arrays, and counts returns to Python."""
    made = machine(seed, wrong, wrong_sizes, costs)
    refused = native().check(made.address)
    made.memory.assert_guarded()
    assert 0 <= refused <= len(made.words)
    for _ in range(2 if not refused else 0):
        if made.play() == api.DONE:
            assert made.player.done == made.words[-1][1]


@settings(deadline=None, max_examples=examples(300))
@given(seeds, st.lists(st.sampled_from([0, 0, 0, 1, -1]), max_size=8))
def test_a_failed_computation_ends_the_decode_with_its_status(
    seed: int, statuses: list[int]
) -> None:
    made = machine(seed)
    made.statuses = [*statuses]
    code = made.play()
    failed = [api.FAILED, api.FAILED_ON_CPU, api.FAILED_TO_PLACE]
    assert code in (failed if made.player.status else [api.DONE])
    assert made.player.status == next((s for s in reversed(statuses) if s), 0) or not any(
        statuses[len(made.statuses) :]
    )


def word(op: int, column: int, made: Machine) -> int:
    """Return the position of a number of the first instruction `op`."""
    return 4 * [row[0] for row in made.words.tolist()].index(op) + column


@pytest.mark.parametrize(
    ("op", "column", "value"),
    [
        (READ, 0, AHEAD),
        (READ, 0, 10), (READ, 0, -1), (READ, 1, 3), (READ, 1, -1), (SUBMIT, 1, 99),
        (SUBMIT, 2, 99), (SUBMIT, 3, 2**62), (OVERLAP, 3, -1), (HOST, 1, -(2**62)), (END, 0, READ),
        (READ, 0, END),
    ],
)  # fmt: skip
def test_an_instruction_that_names_what_is_not_there_is_refused(
    op: int, column: int, value: int
) -> None:
    at = word(op, column, machine(1))
    assert native().check(machine(1, [("words", at, value)]).address) == 1 + at // 4


@pytest.mark.parametrize(
    "wrong",
    [
        ("layer.ids_stride", 0, 0), ("layer.ids_stride", 0, 2**62), ("layer.n_readers", 0, 0),
        ("host.row_bytes", 0, 200), ("host.row_bytes", 0, -1), ("host.out_bytes", 0, 2**62),
        ("view.axis", 0, 4), ("view.axis", 1, -1),
    ],
)  # fmt: skip
def test_a_layer_whose_numbers_do_not_fit_is_refused_where_it_is_read(wrong: Change) -> None:
    made = machine(1, [wrong])
    assert native().check(made.address) == 1 + word(READ, 0, made) // 4


@pytest.mark.parametrize(
    "wrong",
    [
        ("n_tokens", 0, 65), ("n_tokens", 0, 0), ("n_used", 0, 0), ("n_used", 0, 300),
        ("n_slots", 0, 0), ("n_record", 0, 0), ("n_experts", 0, 0),
    ],
)  # fmt: skip
def test_a_layer_with_too_much_or_too_little_is_refused(wrong: Change) -> None:
    made = machine(1, wrong_sizes=[wrong])
    assert native().check(made.address) == 1 + word(READ, 0, made) // 4


def test_a_batch_with_more_pairs_than_the_scratch_has_room_for_is_refused() -> None:
    names = "n_experts", "n_used", "n_slots", "n_tokens"
    made = machine(1, wrong_sizes=[(name, 0, 60) for name in names])
    assert native().check(made.address) == 1 + word(READ, 0, made) // 4


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (("table.recorded", 0, -1), api.DONE), (("table.recorded", 0, 200), api.DONE),
        (("token_rows", 0, -1), api.WRONG_PROGRAM), (("token_rows", 0, 20), api.WRONG_PROGRAM),
        (("costs.n_ends", 0, 1), api.WRONG_PROGRAM), (("costs.n_lines", 0, 200), api.WRONG_PROGRAM),
        (("costs.n_rows", 0, 64), api.WRONG_PROGRAM), (("costs.n_copies", 0, 1), api.WRONG_PROGRAM),
        (("table.slot_of", 0, 2**30), api.WRONG_PROGRAM), (("ids", 0, 200), api.WRONG_ID),
        (("forget", 0, 0), api.WRONG_PROGRAM),
    ],
)  # fmt: skip
def test_a_wrong_table_stops_the_program_or_does_no_harm(wrong: Change, code: int) -> None:
    seconds = np.array([0.0, 1e-6])
    costs = SplitCosts(seconds, seconds, 0.0, 0.0, copy_s=0.0)
    codes = {machine(seed, [wrong], costs=costs).play() for seed in range(40)}
    assert code in codes
    assert codes <= {code, api.DONE}


def test_instructions_in_a_wrong_order_stop_where_they_are() -> None:
    made = machine(1)
    at = word(DIVIDE, 0, made) // 4
    made.words[[at, at - 2]] = made.words[[at - 2, at]]  # DIVIDE and READ
    assert native().check(made.address) == 0
    assert made.play() == api.WRONG_PROGRAM
    assert made.player.at == at - 2


@pytest.mark.parametrize(
    "wrong", [("late", 0, -1), ("late", 0, 10**6), ("n_late", 0, 10**6), ("n_late", 0, -1),
              ("n_arrived", 0, 10**6)]
)  # fmt: skip
def test_late_experts_that_are_not_the_layers_stop_the_program(wrong: Change) -> None:
    changes = [wrong, ("player.from_disk", 0, 1)]
    codes = {machine(seed, changes).play() for seed in range(60)}
    assert codes == {api.DONE, api.WRONG_PROGRAM}


@pytest.mark.parametrize("slot", [1000, 2**31 - 1])
def test_a_slot_that_is_not_there_stops_the_program(slot: int) -> None:
    made = machine(1)
    made.tables[0]["slot_of"][0] = slot
    assert made.play() == api.WRONG_PROGRAM
    assert made.words[made.player.at][0] == DIVIDE


def test_an_expert_without_a_slot_stops_the_program() -> None:
    made = machine(1, [("forget", 0, 0), ("player.splitter", 0, api.ALL_ON_DEVICE)])
    made.tables[0]["slot_of"][...] = -1
    assert made.play() == api.WRONG_PROGRAM
    assert made.words[made.player.at][0] == DIVIDE


@pytest.mark.parametrize("expert", [-1, 10**6])
def test_a_routers_wrong_expert_is_told(expert: int) -> None:
    made = machine(1)
    next(iter(made.ids.values()))[0] = expert
    assert made.play() == api.WRONG_ID
    assert made.player.status == expert


def test_an_expert_that_a_token_chose_twice_is_told() -> None:
    made = Machine([Sizes(6, 2, 1, 4, 1)], Random(1))
    (ids,) = made.ids.values()
    ids[:2] = 5
    assert made.play() == api.WRONG_ID
    assert made.player.status == 5


def ahead(n_slots: int, wrong: list[Change] | None = None, layers_per_wait: int = 3) -> Machine:
    """Return three layers of four experts, of which each token uses one."""
    layers = [Sizes(4, 1, 1, n_slots, 1, is_split=False) for _ in range(3)]
    made = Machine(layers, Random(1), wrong or [], layers_per_wait=layers_per_wait)
    made.player.clocked = 0
    for table, ids in zip(made.tables, made.ids.values(), strict=True):
        table["slot_of"][...] = [*range(n_slots), *[-1] * (4 - n_slots)]
        table["state"][...] = api.STAY + 2  # READY
        ids[:] = 1
    return made


def test_layers_whose_experts_are_in_slots_wait_once() -> None:
    made = ahead(3)
    assert made.play() == api.DONE
    counts = made.player.counts
    assert (counts.router_reads, counts.layers_ahead, counts.n_repairs) == (1, 3, 0)
    assert (counts.hits, counts.n_recorded) == (3, 3)


def test_the_last_layer_of_a_segment_is_read_with_the_others() -> None:
    made = ahead(3, layers_per_wait=2)
    assert made.play() == api.DONE
    counts = made.player.counts
    assert (counts.router_reads, counts.layers_ahead, counts.layers_missed) == (2, 1, 0)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_missing_expert_is_computed_again_from_its_layer_on(layer: int) -> None:
    made = ahead(3)
    [*made.ids.values()][layer][:] = 3
    assert made.play() == api.DONE
    counts = made.player.counts
    assert (counts.n_repairs, counts.layers_ahead) == (1, layer)
    assert counts.layers_repeated == 3 - layer
    assert counts.router_reads == 1 + 3 - layer
    assert counts.layers_missed == 1
    assert made.tables[layer]["slot_of"][3] >= 0


def test_results_are_moved_and_put_back() -> None:
    made = ahead(3)
    where = C.c_uint64.from_address(made.moved[0].source)
    native().move(made.address, 1)
    assert where.value == 16
    native().move(made.address, 0)
    assert where.value == 8


@pytest.mark.parametrize(
    "wrong",
    [
        ("segments", 0, 99), ("segments", 1, 99), ("segments", 2, -1), ("segments", 3, 4),
        ("segments", 4, 0), ("segments", 4, 2**40), ("ahead.ids_at", 0, 2), ("ahead.ids_at", 2, 12),
        ("ahead.table_at", 1, 9), ("ahead.table_at", 1, -1), ("ahead.resume", 1, 0),
        ("ahead.resume", 1, 5),
    ],
)  # fmt: skip
def test_a_segment_whose_numbers_do_not_fit_is_refused(wrong: Change) -> None:
    made = ahead(3, [wrong])
    assert native().check(made.address) == 1 + word(AHEAD, 0, made) // 4


def ringing_machine(seed: int) -> Machine:
    """A machine whose layers run without a wait, if a table can map their experts to slots."""
    rng = Random(seed)
    layers = [some_sizes(rng) for _ in range(rng.randint(1, 3))]
    for layer in layers:
        layer.is_split, layer.n_slots, layer.may_repeat = True, layer.n_experts, 1
    made = Machine(layers, rng, rings=True)
    for tables in made.tables:
        tables["slot_of"][0], tables["state"][:] = 0, 2
        tables["slot_of"][1:][tables["slot_of"][1:] == 0] = -1
    for name in ("clocked", "from_disk", "whole"):
        setattr(made.player, name, 0)
    return made


@settings(deadline=None, max_examples=examples(100))
@given(seeds)
def test_layers_without_a_wait_are_played_and_answered(seed: int) -> None:
    made = ringing_machine(seed)
    n_layers = len(made.sizes)
    for nth in range(1, 4):
        assert made.play() == api.DONE
        assert made.player.done == made.n_nodes
        counts = made.player.counts
        assert counts.layers_rung == counts.split_layers == n_layers
        assert counts.router_reads == 0
        assert made.answered == made.bell.n_told == nth * n_layers
        n_pairs = [sizes.n_tokens * sizes.n_used for sizes in made.sizes]
        assert counts.n_pairs_hit + counts.n_pairs_host == sum(n_pairs)
        assert counts.rows_by_kernels <= counts.n_pairs_host + sum(n_pairs[1::2])
        assert counts.rows_by_kernels >= sum(n_pairs[1::2]), "there, all rows are set"


@settings(deadline=None, max_examples=examples(100))
@given(seeds)
def test_the_device_is_told_where_the_cpus_rows_are(seed: int) -> None:
    made = ringing_machine(seed)
    assert made.play() == api.DONE
    for n, layer in enumerate(made.layers):
        host, n_pairs = api.PlayerHost.from_address(layer.host), layer.n_tokens * layer.n_used
        places = (C.c_int32 * n_pairs).from_address(host.places)[:]
        ids = np.zeros((layer.n_tokens, layer.ids_stride), np.int32)
        C.memmove(ids.ctypes.data, layer.ids_at, layer.ids_bytes)
        slot_of, state = (made.tables[n][name] for name in ("slot_of", "state"))
        there = [slot_of[e] >= 0 and state[slot_of[e]] != 1 for e in ids[:, : layer.n_used].flat]
        missing = [pair for pair, is_there in enumerate(there) if not is_there]
        device_row, host_row = ROWS[n % 2]
        if host_row < 0:
            assert places == [*missing, *[n_pairs] * (n_pairs - len(missing))]
            continue
        assert [places[pair] for pair in missing] == [host_row + i for i in range(len(missing))]
        others = {pair: place for pair, place in enumerate(places) if there[pair]}
        assert others == {pair: device_row + pair for pair in others}


@pytest.mark.parametrize("is_careful", [0, 1])
def test_a_careful_decode_calls_no_backend_while_a_stream_waits(is_careful: int) -> None:
    """Other decodes enqueue the next nodes behind the wait, so that the device never stands."""
    made = next(made for seed in range(20) if len((made := ringing_machine(seed)).sizes) == 3)
    made.player.is_careful = is_careful
    assert made.play() == api.DONE
    assert made.waited_for == made.answered == len(made.sizes)
    assert made.n_computed_while_waiting == (0 if is_careful else len(made.sizes))


@settings(deadline=None, max_examples=examples(200))
@given(
    seeds,
    st.lists(st.sampled_from([0, 0, 0, 1, -1]), max_size=8),
    st.lists(st.sampled_from([0, 0, 0, 0, 700]), max_size=30),
)
def test_a_failure_without_a_wait_releases_the_device(
    seed: int, statuses: list[int], errors: list[int]
) -> None:
    """All layers are answered, and no place of a row lies outside of the output."""
    made = ringing_machine(seed)
    made.statuses, made.errors = [*statuses], [*errors]
    code = made.play()
    if code == api.DONE:
        assert not made.player.status
        return
    assert code in (api.FAILED, api.FAILED_ON_CPU, api.DRIVER_FAILED)
    assert made.player.status == (700 if code == api.DRIVER_FAILED else made.player.status)
    for layer in made.layers:
        host = api.PlayerHost.from_address(layer.host)
        n_pairs = layer.n_tokens * layer.n_used
        places = np.ctypeslib.as_array((C.c_int32 * n_pairs).from_address(host.places))
        assert ((places >= 0) & (places <= n_pairs + max(map(max, ROWS)))).all()
    before = made.answered
    made.statuses, made.errors = [], []
    assert made.play() == api.DONE
    assert made.answered == made.bell.n_told > before


def refusals(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The reasons for which doorbells are not used any more in this test."""
    told = list[str]()
    monkeypatch.setattr(BELLS, "why_not", "")
    monkeypatch.setattr(BELLS, "listeners", [told.append])
    return told


def test_a_silent_device_is_released_by_the_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorbell, "MOST_SECONDS", 5)
    told = refusals(monkeypatch)
    made = ringing_machine(3)
    made.is_silent = True
    watchdog = doorbell.BellWatchdog(made.bell, "a device", second_s=0.02)
    watchdog.begin()
    assert made.play() == api.DRIVER_FAILED
    assert made.player.status == api.BROKEN
    assert made.answered == made.bell.n_told == len(made.sizes)
    watchdog.close()
    assert told == ["a device and the host waited for each other"]


def test_a_decode_that_never_ends_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorbell, "MOST_SECONDS", 5)
    told = refusals(monkeypatch)
    said = list[str]()
    monkeypatch.setattr(log, "end", said.append)
    made = ringing_machine(3)
    made.bell.n_layers = 2
    watchdog = doorbell.BellWatchdog(made.bell, "a device", second_s=0.01)
    watchdog.begin()
    while not said:
        assert made.bell.n_layers == 2
    made.bell.n_layers = 0
    watchdog.close()
    assert made.bell.is_broken
    assert "a device or a thread of the CPU stopped within a layer" in said[0]
    assert len(told) == 1, "it is told before the process ends"


def test_a_decode_that_goes_on_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorbell, "MOST_SECONDS", 5)
    made = ringing_machine(3)
    made.bell.n_layers = 2
    watchdog = doorbell.BellWatchdog(made.bell, "a device", second_s=0.02)
    watchdog.begin()
    for _ in range(40):
        made.bell.n_steps += 1
        time.sleep(0.01)
    made.bell.n_layers = 0
    watchdog.close()
    assert not made.bell.is_broken


def test_a_stopped_decode_without_a_wait_is_released() -> None:
    made = ringing_machine(5)
    made.is_silent = True
    byte = C.c_char(1)
    made.player.interrupt = C.addressof(byte)
    assert made.play() == api.FAILED
    byte.value = 0
    made.is_silent = False
    assert made.play() == api.DONE
