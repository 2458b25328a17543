"""Layers of remote devices: every layer once and in order, and no device over its memory."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from offload.errors import DeviceUnavailable, DoesNotFit
from offload.model import Header, ModelFacts, TensorEntry, WeightPlace
from offload.plan.placement import MARGIN_BYTES
from offload.plan.ranges import by_memory
from offload.plan.weights import device_bytes
from offload.remote import watch
from offload.remote.address import Address, RemoteOptions, parse_address, parse_addresses
from offload.remote.watch import ConnectionState, Owing, owing
from offload.times.context_memory import ContextOptions, context_memory

N_LAYERS, LAYER_BYTES = 9, 1 << 28
CONTEXT = ContextOptions(n_ctx=512)


def facts() -> ModelFacts:
    names = ["token_embd.weight", "output.weight"]
    names += [f"blk.{i}.attn_output.weight" for i in range(N_LAYERS)]
    entries = [TensorEntry(name, "f16", (1 << 12, 1 << 15), 0, LAYER_BYTES) for name in names]
    metadata = {"llama.block_count": N_LAYERS, "llama.embedding_length": 1 << 12}
    weights = {e.name: WeightPlace(Path("m.gguf"), e) for e in entries}
    return ModelFacts(Path("m.gguf"), "llama", "m", Header(dict(metadata), tuple(entries)), weights)


FACTS = facts()


def needed_bytes(part: ModelFacts) -> int:
    return device_bytes(part) + context_memory(part, CONTEXT).total_bytes


FREE = st.integers(0, 6 << 30)


@settings(deadline=None)
@given(
    st.lists(FREE, max_size=2), st.lists(FREE, min_size=1, max_size=3), st.booleans(), st.booleans()
)
@example([], [9 << 28], True, False)  # room for a part of the layers, those at the end
@example([1 << 28], [9 << 28], False, False)  # and those at the start
def test_every_layer_is_on_one_device_that_has_room(
    local: list[int], rooms: list[int], is_last: bool, has_head: bool
) -> None:
    local_first = is_last or not local
    has_head = has_head and local_first
    if not sum([*local, *rooms]):
        return
    try:
        ours, theirs = by_memory(
            FACTS, CONTEXT, local, rooms, local_first=local_first, has_head=has_head
        )
    except DoesNotFit:
        part = FACTS.part(N_LAYERS - 1, N_LAYERS + has_head)
        assert max(rooms) - MARGIN_BYTES < 2 * (needed_bytes(part) + LAYER_BYTES) or sum(local)
        return
    both = (ours, theirs) if local_first else (theirs, ours)
    layers = [i for its in chain(*both) for i in range(its.first, its.end)]
    end = N_LAYERS + (has_head or not local_first)
    assert layers == list(range(end))
    for its, room in zip(theirs, rooms, strict=True):
        part = FACTS.part(its.first, its.end)
        assert not len(its) or needed_bytes(part) <= room - MARGIN_BYTES
    if has_head:
        assert sum(its.end > N_LAYERS and len(its) > 1 for its in theirs) == 1


def test_shares_are_kept_or_refused() -> None:
    def divided(*shares: float, room: int = 64 << 30) -> tuple[int, int]:
        ours, theirs = by_memory(
            FACTS, CONTEXT, [1 << 30], [room], local_first=False, has_head=False, shares=shares
        )
        return len(theirs[0]), len(ours[0])

    assert divided(1, 1) == (5, 5)  # the output counts as a layer
    assert divided(1, 4) == (2, 8)
    with pytest.raises(DeviceUnavailable, match="--tensor-split 0,0: shares are numbers from 0 up"):
        divided(0, 0)
    with pytest.raises(DoesNotFit, match="gives remote device 0 5 layers, but only [0-4] fit"):
        divided(1, 1, room=2 << 30)


def test_addresses_are_read_with_their_mistakes() -> None:
    assert parse_addresses("10.0.0.2:50052,gpu-box:1") == (
        Address("10.0.0.2", 50052),
        Address("gpu-box", 1),
    )
    for text in ("host", ":1", "host:", "host:x", "[::1]:5", "host:-1"):
        with pytest.raises(ValueError, match="is not HOST:PORT"):
            parse_address(text)
    with pytest.raises(ValueError, match="not between 1 and 65535"):
        parse_address("host:65536")
    for host in ("a..b", "x" * 70):  # names that sockets cannot look up
        with pytest.raises(ValueError, match="is no host name"):
            parse_address(f"{host}:5000")
    with pytest.raises(ValueError, match="is given twice"):
        parse_addresses("h:1,h:1")
    loopback = [Address(host, 1).is_loopback for host in ("127.0.0.1", "localhost", "10.0.0.1")]
    assert loopback == [True, True, False]


@pytest.mark.parametrize(
    ("device", "local", "devices", "order"),
    [
        ("auto", "auto", (), "auto"),
        ("CUDA0", "CUDA0", (), "none"),
        ("rpc1", "cpu", ("RPC1",), "only"),
        ("CUDA0,RPC0,RPC1", "CUDA0", ("RPC0", "RPC1"), "last"),
        ("RPC0, sim:vram=1GiB,bw=1GB/s", "sim:vram=1GiB,bw=1GB/s", ("RPC0",), "first"),
    ],
)
def test_a_list_of_devices_is_split_into_local_and_remote(
    device: str, local: str, devices: tuple[str, ...], order: str
) -> None:
    found, remote = RemoteOptions((Address("h", 1),)).of(device)
    assert (found, remote.devices, remote.order) == (local, devices, order)


WORKER = Address("h", 1)


@pytest.mark.parametrize(
    ("sent_s", "received_s", "has_unsent", "busy_s", "owes"),
    [
        (21, 30, False, 25, True),  # asked in this call, and no answer since
        (21, 21, False, 25, True),  # at once after an answer
        (30, 21, False, 40, False),  # it has answered; this machine computes
        (21, 30, False, 20.5, False),  # asked before this call: that needed no answer
        (21, 30, False, None, False),  # nothing is called
        (21, 90, True, 25, True),  # the worker does not read
    ],
)
def test_what_is_owed_where_the_kernel_shows_no_threads(
    sent_s: float, received_s: float, has_unsent: bool, busy_s: float | None, owes: bool
) -> None:
    assert ConnectionState(WORKER, True, sent_s, received_s, has_unsent).owes(busy_s) is owes


@pytest.mark.parametrize("is_awaited", [True, False])
@pytest.mark.parametrize("busy_s", [None, 1.0, 40.0])
def test_a_thread_that_waits_for_the_rest_of_an_answer_is_owed_it(
    is_awaited: bool, busy_s: float | None
) -> None:
    """Whatever has arrived: part of an answer is none."""
    for sent_s, received_s in ((30.0, 21.0), (21.0, 30.0)):
        link = ConnectionState(
            WORKER, True, sent_s, received_s, has_unsent=False, is_awaited=is_awaited
        )
        assert link.owes(busy_s) is is_awaited


@pytest.mark.parametrize("is_hidden", [False, True])
def test_a_system_that_hides_what_threads_wait_for_is_told_once(
    is_hidden: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError("Operation not permitted")

    watch._warn_if_hidden.cache_clear()
    if is_hidden:
        monkeypatch.setattr(watch, "_opened", refuse)
    for _ in range(2):
        watch.ConnectionWatch((), 1.0).close()
    watch._warn_if_hidden.cache_clear()
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    sentence = (
        "this system does not show what threads wait for (/proc/PID/task/*/syscall), so a worker "
        "that hangs in the middle of an answer is not noticed"
    )
    assert said == [sentence] * is_hidden


def test_progress_is_a_next_question_or_enough_of_an_answer() -> None:
    def link(acked: int, received: int, *, has_unsent: bool = False) -> ConnectionState:
        return ConnectionState(WORKER, True, 1, 1, has_unsent, acked, received, is_awaited=True)

    first = owing(None, link(100, 0), 10.0, 1000)
    assert first == Owing(10.0, 100, 0)
    assert owing(first, link(100, 0), 11.0, 1000) is first
    assert owing(first, link(100, 999), 12.0, 1000) is first, "dripped"
    assert owing(first, link(100, 1000), 13.0, 1000) == Owing(13.0, 100, 1000)
    assert owing(first, link(109, 8), 14.0, 1000) == Owing(14.0, 109, 8), "asked again"
    assert owing(first, link(109, 0, has_unsent=True), 15.0, 1000) is first, "read drop by drop"
    assert owing(first, link(1100, 0, has_unsent=True), 16.0, 1000).since_s == 16.0
