"""Brings messages into an order, number and adjacency that a chat template takes. Pure.

Clients send conversations that many templates refuse: a system message in the middle (llama.cpp
#27367), several calls in a message (#26359), or a user's message after a tool's result.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

MessageFields = dict[str, Any]
TurnKind = Literal["start", "user", "answer", "call", "result", "system", "end"]
"""A message's kind, or an end of the conversation. A call is an answer that calls tools."""

NO_RESULT = "(no result)"  # result of a call to which the conversation has none


@dataclass(frozen=True)
class TurnLimits:
    """A template's limits on the order, number and adjacency of messages.

    `refused` has the pairs of neighbours that the template refuses or whose text it drops.
    """

    refused: frozenset[tuple[TurnKind, TurnKind]] = frozenset()
    system: Literal["anywhere", "first", "never"] = "anywhere"
    several_calls: bool = True  # in one message
    content_with_calls: bool = True
    reasoning_with_both: bool = True  # beside content and calls
    empty_answer: bool = True
    reasoning_alone: bool = True  # an answer that only reasons
    needs_user: bool = False  # at least one message of the user
    filler: str = ""  # content of an answer that is put between two messages


def arranged(messages: Iterable[Mapping[str, Any]], limits: TurnLimits) -> list[MessageFields]:
    """Return the messages in a form within `limits`. Every text and every call is kept.

    The results have to follow their calls, as `paired` returns them. System messages that the
    template does not take become the user's, at their place, so that the text before them stays
    the same and its KV cache can be reused.
    """
    turns = _with_systems([dict(message) for message in messages], limits)
    turns = [part for message in turns for part in _parted(message, limits)]
    if not limits.several_calls:
        turns = list(_one_call_each(turns))
    if limits.needs_user and all(message["role"] != "user" for message in turns):
        turns.insert(1 if turns and turns[0]["role"] == "system" else 0, _user(""))
    out: list[MessageFields] = []
    for message in _with_runs_merged(turns, limits):
        _append(out, message, limits)
    if out and _place(out[-1]) == "call" and ("call", "end") in limits.refused:
        out += [_no_result(call) for call in out[-1]["tool_calls"]]
    return out


# ---- results


def paired(messages: Sequence[Mapping[str, Any]]) -> list[MessageFields]:
    """Return the messages with each call's result behind the call, in the order of the calls.

    Templates tell results apart by their order alone. A result belongs to the call with its id. If
    no call has this id, it belongs to a call without a result before it. A call without a result
    gets NO_RESULT, unless it ends the conversation. A result without a call becomes the user's.
    """
    places = _CallPlaces(messages)
    used: set[int] = set()
    turns: list[MessageFields] = []
    for at, message in enumerate(messages):
        if at in used:
            continue
        if message["role"] == "tool":
            turns.append(as_users(message))
            continue
        turns.append(dict(message))
        calls = message.get("tool_calls") or ()
        if not calls:
            continue
        taken = _results_of(at, calls, messages, places, used)
        is_last = all(later in used for later in range(at + 1, len(messages)))
        if is_last and all(place is None for place in taken):
            continue  # the results are still to come
        for call, place in zip(calls, taken, strict=True):
            if place is None:
                turns.append(_no_result(call))
            else:
                turns.append({**messages[place], "tool_call_id": call.get("id")})
    return turns


class _CallPlaces:
    """The places of results and of messages that call, by the id of the call.

    Messages are asked about in their order, and a place that was passed is dropped. So each place
    is looked at once, also if thousands of calls share an id.
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]]) -> None:
        self._results: dict[str, deque[int]] = defaultdict(deque)
        self._callers: dict[str, deque[int]] = defaultdict(deque)
        self._end = len(messages)
        for at, message in enumerate(messages):
            if message["role"] == "tool":
                self._results[message.get("tool_call_id") or ""].append(at)
            for call in message.get("tool_calls") or ():
                self._callers[call.get("id") or ""].append(at)

    def result(self, at: int, name: str, used: set[int]) -> int | None:
        """Return the first result of call `name` behind message `at` that is not in `used`.

        The next message that calls under this id ends the search.
        """
        results, callers = self._results[name], self._callers[name]
        while callers and callers[0] <= at:
            callers.popleft()
        while results and (results[0] <= at or results[0] in used):
            results.popleft()
        end = callers[0] if callers else self._end
        return results.popleft() if results and results[0] < end else None


def _results_of(
    at: int,
    calls: Sequence[Mapping[str, Any]],
    messages: Sequence[Mapping[str, Any]],
    places: _CallPlaces,
    used: set[int],
) -> list[int | None]:
    """Return the place of the result of each of the calls of message `at`; None if it has none.

    The places are added to `used`.
    """
    taken: list[int | None] = []
    for call in calls:
        name = call.get("id") or ""
        place = places.result(at, name, used) if name else None
        taken.append(place)
        if place is not None:
            used.add(place)
    missing = deque(index for index, place in enumerate(taken) if place is None)
    later = at + 1
    while missing and later < len(messages) and messages[later]["role"] == "tool":
        if later not in used:
            taken[missing.popleft()] = later
            used.add(later)
        later += 1
    return taken


def as_users(message: Mapping[str, Any]) -> MessageFields:
    """Return a tool's result as the user's text, in JSON."""
    result = {"tool_call_id": message.get("tool_call_id"), "content": message["content"]}
    given = {key: value for key, value in result.items() if value is not None}
    return _user(json.dumps({"tool_result": given}, ensure_ascii=False))


def _no_result(call: Mapping[str, Any]) -> MessageFields:
    return {"role": "tool", "tool_call_id": call.get("id"), "content": NO_RESULT}


# ---- system messages


def _with_systems(messages: list[MessageFields], limits: TurnLimits) -> list[MessageFields]:
    """Join the system messages at the beginning, and make those users' that may not stay.

    The text of such a message joins the user's message after it, or else the one before it.
    """
    n_first = 0
    while n_first < len(messages) and messages[n_first]["role"] == "system":
        n_first += 1
    turns = messages[n_first:]
    if n_first:
        text = joined(*(message["content"] for message in messages[:n_first]))
        turns.insert(0, {**messages[0], "content": text})
    if limits.system == "anywhere":
        return turns
    out: list[MessageFields] = []
    waiting: list[str] = []
    for at, message in enumerate(turns):
        if message["role"] == "system" and (at > 0 or limits.system == "never"):
            waiting.append(message["content"])
        elif message["role"] == "user" and any(waiting):
            out.append({**message, "content": joined(*waiting, message["content"])})
            waiting = []
        else:
            _flush(out, joined(*waiting))
            waiting = []
            out.append(message)
    _flush(out, joined(*waiting))
    return out


def _flush(out: list[MessageFields], text: str) -> None:
    """Add `text` to the last message if it is the user's, or else append a message of the user."""
    if text and out and out[-1]["role"] == "user":
        out[-1] = {**out[-1], "content": joined(out[-1]["content"], text)}
    elif text:
        out.append(_user(text))


# ---- an answer's parts


def _parted(message: MessageFields, limits: TurnLimits) -> Iterator[MessageFields]:
    """Yield an answer in as many messages as the template needs for its parts."""
    if message["role"] != "assistant":
        yield message
        return
    calls, content = message.get("tool_calls"), message["content"]
    reasoning = message.get("reasoning_content")
    if not calls:
        alone = limits.reasoning_alone if reasoning else limits.empty_answer
        if content or alone:
            yield message
        return
    if content and not limits.content_with_calls:
        yield {"role": "assistant", "content": content}
        content = ""
    elif content and reasoning and not limits.reasoning_with_both:
        content, reasoning = "", joined(reasoning, content)
    kept = {**message, "content": content}
    if reasoning:
        kept["reasoning_content"] = reasoning
    yield kept


def _one_call_each(messages: Sequence[MessageFields]) -> Iterator[MessageFields]:
    """Yield a message for each call, with the call's result behind it."""
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            yield message
            continue
        results: list[MessageFields] = []
        while at < len(messages) and messages[at]["role"] == "tool" and len(results) < len(calls):
            results.append(messages[at])
            at += 1
        for i, call in enumerate(calls):
            if i == 0:
                yield {**message, "tool_calls": [call]}
            else:
                yield {"role": "assistant", "content": "", "tool_calls": [call]}
            if i < len(results):
                yield results[i]
            elif i < len(calls) - 1:
                yield _no_result(call)


# ---- neighbours


def _append(out: list[MessageFields], message: MessageFields, limits: TurnLimits) -> None:
    """Append a message. Merges it, or puts an empty message before it, if it may not follow."""
    before: TurnKind = _place(out[-1]) if out else "start"
    if len(out) == 1 and before == "system":
        before = "start"
    place = _place(message)
    if (before, place) not in limits.refused:
        out.append(message)
    elif before == place or (place == "call" and before == "answer" and limits.content_with_calls):
        for part in _parted(_merged([out.pop(), message]), limits):
            _append(out, part, limits)
    elif place in ("answer", "call"):
        out += [_user(""), message]
    else:
        out += [{"role": "assistant", "content": limits.filler}, message]


def _with_runs_merged(
    messages: Iterable[MessageFields], limits: TurnLimits
) -> Iterator[MessageFields]:
    """Yield the messages, with one in place of a run of them that may not follow each other.

    A run is merged at once: one by one, each merge would copy the text of all before it.
    """
    for place, run in groupby(messages, _place):
        if (place, place) in limits.refused:
            merged = _merged(list(run))
            yield from _parted(merged, limits)
        else:
            yield from run


def _merged(messages: Sequence[MessageFields]) -> MessageFields:
    merged = {key: value for message in messages for key, value in message.items()}
    merged["content"] = joined(*(message["content"] for message in messages))
    if thoughts := joined(*(message.get("reasoning_content") for message in messages)):
        merged["reasoning_content"] = thoughts
    if calls := [call for message in messages for call in message.get("tool_calls", ())]:
        merged["tool_calls"] = calls
    return merged


def _place(message: Mapping[str, Any]) -> TurnKind:
    role = message["role"]
    if role == "assistant":
        return "call" if message.get("tool_calls") else "answer"
    places: dict[str, TurnKind] = {"user": "user", "tool": "result"}
    return places.get(role, "system")


def _user(text: str) -> MessageFields:
    return {"role": "user", "content": text}


def joined(*texts: str | None) -> str:
    """Return the texts that are not empty, with a blank line between them."""
    return "\n\n".join(filter(None, texts))
