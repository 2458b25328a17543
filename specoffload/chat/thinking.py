"""Decides whether and how much a model thinks, from all forms in which clients say it. Pure.

Each API and program has a form of its own: Alibaba's `enable_thinking`, Ollama's `think`, the
`thinking` of Anthropic, DeepSeek, GLM and Kimi, OpenRouter's `reasoning`, OpenAI's
`reasoning_effort`, and variables of templates (llama.cpp #13160, litellm #37423).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from offload.errors import BadRequest

TEMPLATE_SWITCHES = ("enable_thinking", "thinking", "reasoning_effort")
"""Variables of templates that are set by the decision, and not as a client writes them."""

_ON = frozenset({"true", "1", "on", "yes", "enable", "enabled"})
_OFF = frozenset({"false", "0", "off", "no", "none", "disable", "disabled"})
_NO_WISH = frozenset({"", "auto", "default", "null"})
_TYPES = ("enabled", "disabled", "adaptive", "auto")
_BUDGETS = ("budget_tokens", "max_tokens")
# The reasoning itself is returned, so a summary of it is not needed.
_NEEDLESS = ("summary", "generate_summary")
_MOST_CHARS = 80


@dataclass(frozen=True)
class ThinkingWish:
    """What a request says about thinking. None: it does not say.

    `switches` and `efforts` are the forms that say `enabled` and `effort`. `ignored` are forms that
    have no effect here. `is_hidden`: the answer shall not have the reasoning.
    """

    enabled: bool | None = None
    effort: str | None = None
    budget_tokens: int | None = None
    switches: tuple[str, ...] = ()
    efforts: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    is_hidden: bool = False


class _Statement(NamedTuple):
    """One statement of a form. `weak` ones count only if no other form says the same."""

    topic: Literal["enabled", "effort", "budget", "hidden", "ignored"]
    place: str
    value: Any = None
    weak: bool = False


def thinking_wish(forms: Mapping[str, Any]) -> ThinkingWish:
    """Return the one wish of all `forms`: values by the places that have them in a request.

    Raises BadRequest for a value that cannot be read, and for forms that contradict each other.
    """
    said = [one for place, value in forms.items() for one in _read(place, value)]
    strong = [one for one in said if one.topic == "enabled" and not one.weak]
    on = next((one.place for one in strong if one.value), None)
    off = next((one.place for one in strong if not one.value), None)
    if on is not None and off is not None:
        raise BadRequest(f"{on} turns thinking on, and {off} turns it off: send one of them")
    enabled = None if on is off else on is not None
    if enabled is None and any(one.topic == "enabled" for one in said):
        enabled = True  # forms that leave it to the model
    effort, efforts = _agreed([one for one in said if one.topic == "effort"], "effort")
    budget, _ = _agreed([one for one in said if one.topic == "budget"], "number of tokens")
    return ThinkingWish(
        enabled,
        effort,
        None if enabled is False else budget,
        tuple(one.place for one in strong),
        efforts,
        tuple(one.place for one in said if one.topic == "ignored"),
        any(one.topic == "hidden" for one in said),
    )


def _agreed(said: list[_Statement], what: str) -> tuple[Any, tuple[str, ...]]:
    """Return the value of all statements, and their places. Raises BadRequest if values differ."""
    for one in said[1:]:
        if one.value != said[0].value:
            raise BadRequest(
                f"{said[0].place} is {said[0].value!r}, and {one.place} is {one.value!r}: send one "
                f"{what} of thinking"
            )
    return (said[0].value if said else None), tuple(one.place for one in said)


def _read(place: str, value: Any) -> Iterator[_Statement]:
    if value is None:
        return
    name = place.rpartition(".")[2]
    if isinstance(value, dict) and name in ("thinking", "reasoning", "reasoning_effort"):
        yield from _read_object(place, value)
    elif name == "include_reasoning":
        if _switch(place, value) is False:
            yield _Statement("hidden", place)
    elif name in ("effort", "reasoning_effort"):
        yield from _read_effort(place, value)
    elif isinstance(value, str) and _word(value) not in _ON | _OFF:
        if _word(value) in _NO_WISH:
            return
        if _word(value) == "adaptive":
            yield _Statement("enabled", place, value=True, weak=True)
        elif name == "enable_thinking":
            raise BadRequest(f"{place}: {value[:_MOST_CHARS]!r} is not true or false")
        else:  # Ollama's levels
            yield _Statement("enabled", place, value=True)
            yield _Statement("effort", place, _word(value))
    else:
        yield _Statement("enabled", place, _switch(place, value))


def _read_effort(place: str, value: Any) -> Iterator[_Statement]:
    """Read an effort. "none" turns thinking off. No other turns it on: agents always send one."""
    if value is False or (isinstance(value, str) and _word(value) in _OFF):
        yield _Statement("enabled", place, value=False)
    elif not isinstance(value, str):
        raise BadRequest(f"{place}: {str(value)[:_MOST_CHARS]!r} is not the name of an effort")
    elif _word(value) not in _NO_WISH:
        yield _Statement("effort", place, _word(value)[:_MOST_CHARS])


def _read_object(place: str, given: dict[str, Any]) -> Iterator[_Statement]:
    for key, value in given.items():
        here = f"{place}.{key}"
        if value is None or key in _NEEDLESS:
            continue
        if key == "type":
            word = _word(value) if isinstance(value, str) else value
            if word not in _TYPES and word not in _ON | _OFF and not isinstance(value, bool):
                raise BadRequest(
                    f"{here}: {str(value)[:_MOST_CHARS]!r} is not one of {', '.join(_TYPES)}"
                )
            yield from _read(here, value)
        elif key == "enabled":
            yield _Statement("enabled", here, _switch(here, value))
        elif key == "exclude":
            if _switch(here, value):
                yield _Statement("hidden", here)
        elif key == "effort":
            yield from _read_effort(here, value)
        elif key in _BUDGETS:
            yield from _read_budget(here, value)
        elif value is not False and value not in ("", [], {}):
            yield _Statement("ignored", here)


def _read_budget(place: str, value: Any) -> Iterator[_Statement]:
    is_whole = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_whole or value != int(value) or value < -1:
        raise BadRequest(f"{place}: {str(value)[:_MOST_CHARS]} is not a number of tokens")
    if value >= 0:
        yield _Statement("budget", place, int(value))


def _word(value: str) -> str:
    return value.strip().lower()


def _switch(place: str, value: Any) -> bool:
    """Return a switch as true or false, also from JSON text and from 0 and 1."""
    if isinstance(value, bool):
        return value
    word = _word(value) if isinstance(value, str) else str(value)
    if word in _ON:
        return True
    if word in _OFF:
        return False
    raise BadRequest(f"{place}: {str(value)[:_MOST_CHARS]!r} is not true or false")
