"""The fair queue: which client's request is next, and who gets a place. No clock is used."""

from __future__ import annotations

import heapq
from collections import Counter
from typing import Any, TypeVar

from hypothesis import given
from hypothesis import strategies as st

from specoffload.server.access import client_name
from specoffload.server.engine.turns import (
    MOST_RETRY_AFTER_S,
    FairQueue,
)

CLIENTS = st.sampled_from("abcd")
T = TypeVar("T")


def add(queue: FairQueue[T], client: str, item: T) -> None:
    assert queue.enter(client, item, n_slots=1, n_idle=0, place_s=1.0, now_s=0.0) is None


@given(st.lists(st.tuples(st.sampled_from(["add", "next", "end", "remove"]), CLIENTS)))
def test_nothing_is_lost_or_comes_twice_and_each_clients_own_come_in_order(
    steps: list[tuple[str, str]],
) -> None:
    turns: FairQueue[tuple[str, int]] = FairQueue(1000)
    waiting: dict[str, list[tuple[str, int]]] = {}
    running: Counter[str] = Counter()
    for number, (step, client) in enumerate(steps):
        if step == "add":
            add(turns, client, (client, number))
            waiting.setdefault(client, []).append((client, number))
        elif step == "next" and len(turns):
            least = min(running[name] for name, mine in waiting.items() if mine)
            item = turns.next()
            assert item == waiting[item[0]].pop(0)
            assert running[item[0]] == least
            running[item[0]] += 1
        elif step == "end" and running[client]:
            turns.ended(client)
            running[client] -= 1
        elif step == "remove" and waiting.get(client):
            turns.remove(client, waiting[client].pop())
            turns.remove(client, (client, -1))  # no such request waits: no effect
        assert len(turns) == sum(map(len, waiting.values()))
    assert sorted(turns.clear()) == sorted(item for mine in waiting.values() for item in mine)


@given(st.dictionaries(CLIENTS, st.integers(5, 40), min_size=1), st.integers(1, 3))
def test_clients_that_wait_have_equally_many_turns(waiting: dict[str, int], n_slots: int) -> None:
    """The number of requests that a client has waiting does not matter."""
    turns: FairQueue[str] = FairQueue(1000)
    for client, n in waiting.items():
        for _ in range(n):
            add(turns, client, client)
    at_work = [turns.next() for _ in range(n_slots) if len(turns)]
    counts = Counter(at_work)
    for _ in range(4 * len(waiting)):
        turns.ended(at_work.pop(0))
        at_work.append(turns.next())
        counts[at_work[-1]] += 1
        n_turns = [counts[client] for client in waiting]
        assert max(n_turns) - min(n_turns) <= 1
        if max(n_turns) == 5:
            break


def test_a_refusal_counts_the_places_that_are_kept() -> None:
    queue: FairQueue[str] = FairQueue(4)
    times: dict[str, Any] = {"n_slots": 1, "n_idle": 0, "place_s": 1.0, "now_s": 0.0}
    for client in "abcd":
        assert queue.enter(client, client, **times) is None
    assert queue.enter("late", "late", **times) is not None
    assert queue.full_words(0.0) == (
        "the queue has no place for this request: 4 requests wait; the limit is 4 (--max-queue)"
    )
    queue.next()
    assert queue.enter("later", "later", **times) is not None
    assert queue.full_words(0.0) == (
        "the queue has no place for this request: 3 requests wait, and a place is kept for a "
        "client that was refused before; the limit is 4 (--max-queue)"
    )


def test_a_place_is_kept_for_whoever_was_refused_first() -> None:
    queue: FairQueue[str] = FairQueue(4)

    def ask(client: str, now_s: float = 0.0, n_idle: int = 0) -> float | None:
        return queue.enter(client, client, n_slots=1, n_idle=n_idle, place_s=2.0, now_s=now_s)

    assert [ask(c) for c in "abcd"] == [None] * 4
    assert (ask("e"), ask("f"), ask("e")) == (2.0, 4.0, 4.0), "one place after the other"
    assert queue.next() == "a"
    assert ask("a", 1.0) == 6.0, "who was served comes after those who were refused"
    assert ask("f", 1.0) == 6.0, "and so does the second of them"
    assert ask("e", 2.0) is None
    assert queue.next() == "b"
    assert ask("f", 3.0) is None
    queue.next()
    assert ask("g", 100.0) is None, "a promise does not last for ever"


@given(
    st.integers(0, 5),
    st.integers(1, 3),
    st.lists(st.tuples(st.sampled_from(["ask", "end"]), st.integers(0, 9), st.floats(0, 9))),
)
def test_the_queue_is_bounded_and_no_slot_waits_for_anybody(
    limit: int, n_slots: int, steps: list[tuple[str, int, float]]
) -> None:
    queue: FairQueue[int] = FairQueue(limit)
    at_work: list[int] = []
    now_s = 0.0
    for what, client, after_s in steps:
        now_s += after_s
        if what == "end" and at_work:
            queue.ended(str(at_work.pop(0)))
        elif what == "ask":
            n_idle = n_slots - len(at_work)
            wait_s = queue.enter(
                str(client), client, n_slots=n_slots, n_idle=n_idle, place_s=3.0, now_s=now_s
            )
            assert wait_s is None or 3.0 <= wait_s <= MOST_RETRY_AFTER_S
            assert wait_s is None or not n_idle
        while len(at_work) < n_slots and len(queue):
            at_work.append(queue.next())
        assert len(queue) <= limit


def test_64_clients_have_about_equally_many_answers() -> None:
    """A client asks again at once after an answer, and at the given time after a refusal."""
    queue: FairQueue[str] = FairQueue(16)
    answers: Counter[str] = Counter()
    events = [(0.001 * n, "ask", str(n)) for n in range(64)]
    n_idle, n_refused = 4, 0
    while answers.total() < 3 * 64:
        now_s, what, client = heapq.heappop(events)
        if what == "end":
            n_idle += 1
            answers[client] += 1
            queue.ended(client)
        wait_s = queue.enter(client, client, n_slots=4, n_idle=n_idle, place_s=0.01, now_s=now_s)
        if wait_s is not None:
            n_refused += 1
            heapq.heappush(events, (now_s + wait_s, "ask", client))
        while n_idle and len(queue):
            n_idle -= 1
            heapq.heappush(events, (now_s + 0.04, "end", queue.next()))
    assert n_refused > 0
    assert set(answers.values()) <= {2, 3, 4}
    assert len(answers) == 64


def test_a_client_is_its_key_or_its_address() -> None:
    assert client_name(1, "10.0.0.1") == "key 1"
    assert client_name(None, "10.0.0.1") == "10.0.0.1"
    assert client_name(None, "::ffff:10.0.0.1") == "10.0.0.1"
    one, other = "2001:db8:1:2::5", "2001:db8:1:2:aaaa:bbbb:cccc:dddd"
    assert client_name(None, one) == client_name(None, other) == "2001:db8:1:2::/64"
    assert client_name(None, "2001:db8:1:3::5") != client_name(None, one)
    assert client_name(None, None) == ""
    assert len(client_name(None, "x" * 9000)) == 64
