"""Asks whether a command says which of its flags cost speed, by plans with and without them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping

from combinations.cases import Case

# Commands that name slow flags, and the axes whose values restrict where weights are computed.
# Limits of memory restrict it too, but they are the user's.
_SAY_SO = (
    *("run", "chat", "serve", "bench", "tune", "profile"),
    *("plan", "plan as JSON", "plan elsewhere"),
)
_RESTRICTING = {
    "experts": ("split", "streamed", "in RAM"),
    "cache": ("RAM", "whole windows"),
    "measures": ("at length",),
}
_SPEEDS = ("prefill_tps", "decode_tps", "full_context_decode_tps")
# The program names flags that cost over 5 % of a speed, if another speed loses less without them.
# These limits are further apart.
_GAINS, _LOSES = 1.1, 0.98
# A server's line begins with the time.
_SAID = re.compile(r"^(?:[\dT:.-]+ )?\W*without (-[\w-]+)", re.MULTILINE)

Plan = Callable[[tuple[str, ...]], Mapping[str, float]]


def slow_flags_unsaid(case: Case, plan: Plan, output: str) -> Iterator[str]:
    """A fault if the case's flags cost speed by the plan, and the output does not say so.

    `plan` returns the expected speeds of the case without the flags of some axes.
    """
    axes = tuple(axis for axis, names in _RESTRICTING.items() if case[axis] in names)
    if case["command"] not in _SAY_SO or not axes:
        return
    if case["device"] == "cpu" and case["command"] != "plan elsewhere":
        return  # the CPU alone ignores them, and says so
    now, without = plan(()), plan(axes)
    ratios = {name: without[name] / now[name] for name in _SPEEDS}
    most, least = max(ratios.values()), min(ratios.values())
    if most < _GAINS or most * least < _GAINS * _LOSES:
        return
    if case["command"] == "plan as JSON":
        said = bool(json.loads(output)["slow_flags"])
    else:
        said = bool(_SAID.search(output))
    if not said:
        name = max(ratios, key=lambda name: ratios[name])
        flags = ", ".join(case.value(axis).words[0] for axis in axes)
        yield f"unsaid: without {flags} {name} is {ratios[name]:.2f} times as high by the plan"
