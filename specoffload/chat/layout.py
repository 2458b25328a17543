"""Tool calls written as a family writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Layout:
    """The texts around names, arguments and calls.

    With `before_key` the arguments stand one by one, strings as they are; without, they are a JSON
    object. `{i}` in `after_name` is the call's number.
    """

    before_name: str
    after_name: str
    after_arguments: str
    begin: str = ""
    between: str = ""
    end: str = ""
    before_key: str = ""
    after_key: str = ""
    after_key_of_string: str | None = None  # where it differs
    after_value: str = ""
    one_only: bool = False  # of several calls each needs an answer of its own

    def key_end(self, *, is_string: bool) -> str:
        if is_string and self.after_key_of_string is not None:
            return self.after_key_of_string
        return self.after_key


def written(layout: Layout, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """`calls`, each a name and its arguments, as the model would write them."""
    texts = [
        layout.before_name
        + name
        + layout.after_name.replace("{i}", str(at))
        + _arguments(layout, arguments)
        + layout.after_arguments
        for at, (name, arguments) in enumerate(calls)
    ]
    return layout.begin + layout.between.join(texts) + layout.end


def _arguments(layout: Layout, arguments: Mapping[str, Any]) -> str:
    if not layout.before_key:
        return json.dumps(arguments, ensure_ascii=False)
    found = ""
    for key, value in arguments.items():
        is_string = isinstance(value, str)
        text = value if is_string else json.dumps(value, ensure_ascii=False)
        found += layout.before_key + key + layout.key_end(is_string=is_string)
        found += text + layout.after_value
    return found
