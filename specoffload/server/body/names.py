"""Names of parameters: other programs' for ours, and what happens to those that nobody here knows.

Programs that speak to several servers send every parameter that one of them has. As their servers
do, this one ignores what has no effect, and names it in the answer's header `X-Ignored-Parameters`;
with --strict-params it is a 400. What would change the kind of the answer is refused always.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from pydantic import BaseModel

from offload.errors import BadRequest

HEADER = b"x-ignored-parameters"

# Of llama-server, vLLM, text-generation-webui and KoboldCpp -> the name here.
ALIASES: Mapping[str, str] = {
    "guided_grammar": "grammar",
    "guided_json": "json_schema",
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "reasoning_budget_tokens": "thinking_budget_tokens",
    "rep_pen": "repeat_penalty",
    "repetition_penalty": "repeat_penalty",
    "repetition_penalty_range": "repeat_last_n",
    "rep_pen_range": "repeat_last_n",
    "speculative.n_max": "draft_max",
    "speculative.n_min": "draft_min",
    "speculative.p_min": "draft_p_min",
    "stopping_strings": "stop",
    "stop_sequence": "stop",
    "typ_p": "typical_p",
    "typical": "typical_p",
}

# Bookkeeping of OpenAI's platform and hints about speed: the answer is the same without them.
INERT = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

# name -> the values besides null that ask for nothing; others would change the kind of the answer.
REFUSED: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1, 0),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}

_OFF: tuple[object, ...] = (False, 0, 0.0, -1, "", [], {})  # ask for nothing, whoever's they are


def renamed(body: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """`body` under the names used here. Of two names for one thing, the one used here counts."""
    result = dict(body)
    for other, name in ALIASES.items():
        if other in known or name not in known or other not in body:
            continue
        if result.get(name) is None:
            result[name] = result.pop(other)
        elif result[other] == result[name]:
            del result[other]
    return result


def ignored_names(
    request: BaseModel, refused: Mapping[str, tuple[object, ...]] = REFUSED
) -> tuple[str, ...]:
    """The parameters that are set and have no effect.

    Raises BadRequest for one that would change the kind of the answer.
    """
    names = []
    for name, value in (request.model_extra or {}).items():
        if value is None or name in INERT:
            continue
        if name in refused:
            if not any(type(value) is type(off) and value == off for off in refused[name]):
                raise BadRequest(f"{name} is not supported by this server: leave it out")
        elif not any(type(value) is type(off) and value == off for off in _OFF):
            names.append(name)
    return tuple(names)


def refuse_ignored(kind: type[BaseModel], names: Collection[str]) -> None:
    """For --strict-params. Raises BadRequest for the first of `names`."""
    for name in names:
        close = difflib.get_close_matches(name[:80], [*kind.model_fields, *REFUSED, *INERT], n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise BadRequest(f"parameter {name} has no effect here (--strict-params){hint}")


def header_value(names: Collection[str]) -> bytes:
    """`names` as a header's value: no more of them than fit, in letters that any client reads."""
    readable = [name for name in names if _is_readable(name)]
    shown = ", ".join(readable[:50])
    n_more = len(names) - len(readable[:50])
    more = f"{n_more} more" if n_more else ""
    return ", ".join(filter(None, (shown, more))).encode()


def _is_readable(name: str) -> bool:
    """h11 sends no header with blanks at its ends, which a name of none or with some would make."""
    return name.isascii() and name.isprintable() and 0 < len(name.strip()) == len(name) < 100
