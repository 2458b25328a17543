"""The flags of speculation for the command line, made from specdec's table of options."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import typer

from specdec.options import OPTIONS, Option, Value

_TYPES: dict[str, Any] = {"int": int, "float": float, "text": str, "flag": bool}
# --draft names the draft model here, as it does in most programs.
_TAKEN = frozenset({"--draft", "--draft-n"})
_MORE = {"--spec-policy": ("--policy",)}


def spec_parameters() -> list[inspect.Parameter]:
    """One parameter per option of specdec; None or False where nothing was typed."""
    return [_parameter(option) for option in OPTIONS]


def take_given(typed: dict[str, Any]) -> dict[str, Value]:
    """Remove those parameters from `typed`; what was really typed, by full flag name."""
    given: dict[str, Value] = {}
    for option in OPTIONS:
        value = typed.pop(_name(option), None)
        if value is not None and value is not False:
            given[option.flag] = value
    return given


def _parameter(option: Option) -> inspect.Parameter:
    names = [option.flag, *option.aliases, *_MORE.get(option.flag, ())]
    names = [name for name in names if name not in _TAKEN]
    words = option.help
    if option.default is not None and option.kind != "flag":
        words += f" [default: {option.default}]"
    if option.needs:
        words += f" (with {' or '.join(option.needs)})"
    kind = _TYPES[option.kind]
    flag = option.kind == "flag"
    declared = typer.Option(*names, help=words, show_default=False)
    return inspect.Parameter(
        _name(option),
        inspect.Parameter.KEYWORD_ONLY,
        default=False if flag else None,
        annotation=Annotated[kind if flag else kind | None, declared],
    )


def _name(option: Option) -> str:
    return option.flag.removeprefix("--").replace("-", "_")
