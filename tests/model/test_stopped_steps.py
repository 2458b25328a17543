"""A step that another thread stops leaves no trace: later texts are those of a run without it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_slots import model, open_slots

from lab.synth.mtp import write_mtp
from offload.ggml import backend
from offload.ggml.library import interrupt
from specoffload.generation.generation import GenerateOptions
from specoffload.session.session import Session
from specoffload.slots.request import Request

PROMPT = [(7 * i) % 250 for i in range(400)]
SHORT = [9, 8, 7]
# By name: the model's kind, and the options of the session. The ubatch is shorter than the prompt.
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "CPU": ("deepseek-v3", {"device": "cpu"}),
    "streamed": ("deepseek-v3", {"device": "sim", "min_batch": "1", "n_gpu_layers": 99}),
    "two devices": ("deepseek-v3", {"device": "sim,sim", "min_batch": "1", "n_gpu_layers": 99}),
    "windows": ("gpt-oss-20b", {"device": "cpu"}),
    "recurrent": ("qwen3next", {"device": "cpu"}),
}


@pytest.fixture(autouse=True)
def as_in_a_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stops are allowed, as in the engine process, and end with the test."""
    monkeypatch.setattr(interrupt, "_may_stop", True)
    yield
    interrupt.go_on()


@pytest.fixture(params=PLANS)
def opened(request: pytest.FixtureRequest, models: Path) -> Iterator[Session]:
    # A recurrent memory is saved before steps of 128 tokens or more.
    n_ubatch = 256 if request.param == "recurrent" else 64
    with opened_as(request.param, models, ubatch_size=n_ubatch, batch_size=256) as session:
        yield session


def opened_as(plan: str, models: Path, **more: Any) -> Session:
    kind, options = PLANS[plan]
    return open_slots(model(kind, models), {"--spec-type": "none"}, 2, **options, **more)


def begun(session: Session, tokens: list[int]) -> Request:
    request = session.new_request(tokens, GenerateOptions(n_predict=8, temperature=0))
    session.enqueue(request)
    return request


def text_of(session: Session, tokens: list[int]) -> list[int]:
    request = begun(session, tokens)
    while not request.is_over:
        session.step()
    assert request.error is None
    return request.history[len(tokens) :]


def at_the_first_node() -> None:
    interrupt.stop()


def in_another_thread() -> None:
    """Stop soon after the next decode has begun."""

    def stop() -> None:
        while not interrupt._heeded:
            pass
        interrupt.stop()

    threading.Thread(target=stop, daemon=True).start()


@pytest.mark.parametrize("when", [at_the_first_node, in_another_thread])
def test_a_stopped_prompt_goes_on_and_others_are_not_changed(
    opened: Session, when: Callable[[], None]
) -> None:
    expected, short = text_of(opened, PROMPT), text_of(opened, SHORT)
    opened.forget()
    request = begun(opened, PROMPT)
    opened.step()  # a first part, which stays
    when()
    for _ in range(3):  # until the thread has stopped one
        news = opened.step()
        if interrupt.is_stopped():
            break
    assert opened.step() == []  # stopped again, and at once
    interrupt.go_on()
    assert news == [] or when is in_another_thread
    while not request.is_over:
        opened.step()
    assert request.error is None
    assert request.history[len(PROMPT) :] == expected
    assert text_of(opened, SHORT) == short


def test_a_cancelled_prompt_ends_inside_its_step_without_a_warning(
    opened: Session, caplog: pytest.LogCaptureFixture
) -> None:
    short = text_of(opened, SHORT)
    opened.forget()
    request = begun(opened, PROMPT)
    opened.step()
    assert opened.is_worth_stopping(request)
    interrupt.stop()
    assert opened.step() == []
    interrupt.go_on()
    opened.cancel(request)
    assert not opened.is_worth_stopping(request)
    assert opened.is_idle
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert text_of(opened, SHORT) == short


def test_a_streamed_graph_ends_before_its_next_part(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executor asks before each part, and submits none after the stop."""
    asked: list[bool] = []
    requested = interrupt.requested

    def asking() -> bool:
        if len(asked) == 4:
            interrupt.stop()
        asked.append(requested())
        return asked[-1]

    with opened_as("streamed", models, ubatch_size=512) as session:
        begun(session, PROMPT)
        monkeypatch.setattr(backend, "requested", asking)
        session.step()
    assert asked == [False, False, False, False, True]


# -- what a stopped step keeps ---------------------------------------------------------------------


def counted(session: Session, monkeypatch: pytest.MonkeyPatch, stop_at: int | None) -> list[int]:
    """Count the parts of graphs from now on, and stop before part `stop_at`."""
    n = [0]
    requested = interrupt.requested

    def asking() -> bool:
        n[0] += 1
        if n[0] == stop_at:
            interrupt.stop()
        return requested()

    monkeypatch.setattr(backend, "requested", asking)
    return n


@pytest.mark.parametrize(("plan", "most"), [("streamed", 192), ("two devices", 128)])
def test_a_stopped_step_keeps_its_whole_ubatches(
    plan: str, most: int, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of two devices may not have computed the ubatch before the one that stopped."""
    kept = []
    with opened_as(plan, models, ubatch_size=64, batch_size=256) as session:
        expected = text_of(session, PROMPT)
        session.forget()
        request = begun(session, PROMPT)
        parts = counted(session, monkeypatch, None)
        session.step()  # 4 ubatches
        n_parts = parts[0]
        session.cancel(request)
        for stop_at in range(1, n_parts + 1, max(1, n_parts // 7)):
            session.forget()
            request = begun(session, PROMPT)
            counted(session, monkeypatch, stop_at)
            session.step()
            assert interrupt.is_stopped()
            assert request.slot is not None
            kept.append(request.slot.n_held)
            interrupt.go_on()
            while not request.is_over:
                session.step()
            assert request.history[len(PROMPT) :] == expected
    assert kept == sorted(kept)
    assert set(kept) <= set(range(0, most + 1, 64))
    assert kept[0] == 0
    assert kept[-1] == most


@pytest.mark.parametrize("when", [at_the_first_node, in_another_thread])
def test_a_stopped_step_leaves_the_texts_of_all_its_requests(
    opened: Session, when: Callable[[], None]
) -> None:
    """An answer that goes on in the same step loses no token, also with a recurrent memory."""
    expected, short = text_of(opened, PROMPT), text_of(opened, SHORT)
    opened.forget()
    answering = begun(opened, SHORT)
    opened.step()
    reading = begun(opened, PROMPT)
    opened.step()  # a first part, beside a round
    for _ in range(3):
        when()
        held = answering.slot.n_held if answering.slot else 0
        opened.step()
        if interrupt.is_stopped():
            assert answering.slot is not None
            assert answering.slot.n_held >= held > 0
        interrupt.go_on()
    while not (reading.is_over and answering.is_over):
        opened.step()
    assert answering.history[len(SHORT) :] == short
    assert reading.history[len(PROMPT) :] == expected


def test_a_short_request_is_answered_before_a_long_prompt_is_read(opened: Session) -> None:
    expected, short = text_of(opened, PROMPT), text_of(opened, SHORT)
    opened.forget()
    reading = begun(opened, PROMPT)
    opened.step()
    began = begun(opened, SHORT)
    for _ in range(2):
        opened.step()
    assert len(began.history) > len(SHORT)
    assert reading.reads_prompt
    while not (reading.is_over and began.is_over):
        opened.step()
    assert began.history[len(SHORT) :] == short
    assert reading.history[len(PROMPT) :] == expected


# -- texts that leave their slots ------------------------------------------------------------------

MTP = {"--spec-type": "draft-mtp", "--spec-policy": "fixed", "--spec-draft-n-max": 3}
OTHER = [(5 * i + i * i % 13) % 250 for i in range(300)]


def opened_mtp(models: Path, n_slots: int, **more: Any) -> Session:
    """A session whose own layers still have to read the last tokens of a text before it is kept."""
    path = write_mtp(models, "glm4moe")
    options = {"device": "cpu", "cache_ram_bytes": 1 << 28, "ctx_size": 1024, **more}
    return open_slots(path, MTP, n_slots, **options)


def stopped_once(session: Session) -> list[Request]:
    """Make a step that is stopped in its first decode. Returns what the step reports."""
    interrupt.stop()
    news = session.step()
    interrupt.go_on()
    return news


def ended(session: Session, request: Request) -> list[int]:
    """Let the request end. Returns its answer."""
    while not request.is_over:
        session.step()
    assert request.error is None
    return request.history[request.n_prompt :]


def test_a_stop_while_a_text_leaves_its_slot_loses_neither_text_nor_request(models: Path) -> None:
    with opened_mtp(models, 1) as session:
        first, other = text_of(session, PROMPT), text_of(session, OTHER)
        session.forget()
        assert text_of(session, PROMPT) == first
        request = begun(session, OTHER)
        assert stopped_once(session) == []
        assert request.slot is None, "the stop came before it got the slot"
        assert not session.is_idle
        assert ended(session, request) == other
        # Now its text leaves the slot for the first one, which is in RAM.
        again = begun(session, [*PROMPT, *first, 9])
        assert stopped_once(session) == []
        assert again.slot is None
        assert len(session.batcher.store) == 1
        got = ended(session, again)
        assert again.n_cached == len(PROMPT) + len(first) - 1
        session.forget()
        assert text_of(session, [*PROMPT, *first, 9]) == got


def test_a_stop_hides_no_request_that_ended_before_it_in_the_same_step(models: Path) -> None:
    with opened_mtp(models, 2) as session:
        first, other = text_of(session, PROMPT), text_of(session, OTHER)
        held = [*PROMPT, *first]
        at_once = session.new_request(held[:-1], GenerateOptions(n_predict=0, temperature=0))
        session.enqueue(at_once)
        request = begun(session, SHORT)
        assert stopped_once(session) == [at_once]
        assert at_once.is_over
        ended(session, request)
        assert ended(session, begun(session, OTHER)) == other
