"""Describes flags as plain data, and reads the text of their values.

A flag sets one field of one class of `specoffload.config.options`. The field's default is the
flag's default.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from dataclasses import MISSING, dataclass, fields
from enum import Enum, StrEnum
from typing import Any

from specdec.options import DrafterName, PolicyName
from specdec.user_path import user_path

# The commands that open a model, and `plan`, which shows how a model would be opened.
OPENS = frozenset(
    (
        "run",
        "chat",
        "serve",
        "bench",
        "profile",
        "report",
        "plan",
        "tune all",
        "draft judge",
        "draft distil",
    )
)


class Panel(StrEnum):
    """The heading of a flag in --help and in docs/flags.md, in this order."""

    MODEL = "model"
    OFFLOAD = "offload"
    SPECULATION = "speculation"
    SAMPLING = "sampling"
    SERVER = "server"
    COMMAND = "this command"
    DEBUGGING = "debugging"


TITLES = {
    Panel.MODEL: "Model and context",
    Panel.OFFLOAD: "Device, memory and threads",
    Panel.SPECULATION: "Speculation",
    Panel.SAMPLING: "Sampling",
    Panel.SERVER: "Server",
    Panel.COMMAND: "Single commands",
    Panel.DEBUGGING: "Debugging",
}


@dataclass(frozen=True)
class ValueKind:
    """A kind of value. `read` parses a text. Its ValueError says what the value must be.

    Values of an open kind are numbers, sizes and names that the program knows. They may be shown to
    users of the server. Others may be keys, addresses, files or texts.
    """

    metavar: str
    read: Callable[[str], object]
    values: tuple[str, ...] = ()  # values that a shell completes
    is_open: bool = False
    is_secret: bool = False  # True: values are keys, which are not even shown to who typed them


def whole(text: str) -> int:
    """Read a whole number. Raises ValueError for other text."""
    try:
        return int(text)
    except ValueError:
        raise ValueError("must be a whole number") from None


def _float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("must be a number") from None
    if not math.isfinite(value):
        raise ValueError("must be a number")
    return value


def utf8_text(text: str) -> str:
    """Return an argument as the text that its bytes are in UTF-8.

    In an ASCII locale, Python keeps its bytes as surrogates. Raises ValueError if the
    bytes are not UTF-8.
    """
    if not any("\ud800" <= character <= "\udfff" for character in text):
        return text
    try:
        return text.encode("utf-8", "surrogateescape").decode()
    except UnicodeError:
        raise ValueError("must be UTF-8 text") from None


INT = ValueKind("N", whole, is_open=True)
FLOAT = ValueKind("X", _float, is_open=True)
TEXT = ValueKind("TEXT", str)
MODEL_TEXT = ValueKind("TEXT", utf8_text)  # text that the model reads or writes
SECRET = ValueKind("TEXT", str, is_secret=True)
PATH = ValueKind("FILE", user_path)
SWITCH = ValueKind("", str, is_open=True)  # takes no value
HIDDEN = "(hidden)"  # shown in place of a value that is not open

TRUE = ("1", "true", "on", "enabled")  # llama.cpp's words for "on"
FALSE = ("0", "false", "off", "disabled")


def choice(values: Collection[object], aliases: dict[str, object] | None = None) -> ValueKind:
    """A kind whose value is one of `values`, by its text. `aliases` maps other texts to values."""
    known = {str(value): value for value in values}
    metavar = "|".join(known) if len(known) <= 4 else "NAME"

    def read(text: str) -> object:
        chosen = known.get(text, (aliases or {}).get(text))
        if chosen is None:
            raise ValueError(f"must be one of {', '.join(known)}")
        return chosen

    return ValueKind(metavar, read, tuple(known), is_open=True)


@dataclass(frozen=True)
class Positional:
    """A word without a flag that some commands accept. One that repeats is the command's last."""

    section: type
    field: str
    kind: ValueKind
    metavar: str
    help: str
    commands: frozenset[str]
    repeats: bool = False  # True: each further word is added to those before


class Need(Enum):
    """A condition for a flag to take effect, besides drafters and policies."""

    DRAFT_MODEL = "a draft model"
    DRAFTS = "drafts"


def need_words(need: Enum) -> str:
    """The words for what to add to a flag that needs it."""
    match need:
        case PolicyName():
            return f"--spec-policy {need}"
        case DrafterName():
            return f"--spec-type {need}"
        case _:
            return str(need.value)


@dataclass(frozen=True)
class Flag:
    """One flag: its names, the option that it sets, the values that it takes, and its help."""

    section: type  # class of `options` with the field
    field: str
    names: tuple[str, ...]  # the first is the one that documents use
    kind: ValueKind
    help: str  # one line for --help
    panel: Panel
    more: str = ""  # text after `help` in docs/flags.md
    off: tuple[str, ...] = ()  # names that set `off_value`
    off_value: object = False
    variables: tuple[str, ...] = ()
    least: float | None = None
    above: float | None = None
    most: float | None = None
    default_words: str = ""
    needs: tuple[Enum, ...] = ()  # conditions, one of which must hold for an effect; (): none
    commands: frozenset[str] = OPENS
    request: str = ""  # field of an HTTP request with the same meaning
    bare: str | None = None  # value of the flag without a value; None: it needs one
    reads_as: tuple[tuple[str, str], ...] = ()  # (llama.cpp's name of a value, our name)
    digits_mean: str = ""  # name of the flag that is set instead by a value of digits alone
    repeats: bool = False  # True: each value is added to those before
    joins: bool = False  # True: each value is a tuple, and its parts are added to those before
    capped: bool = False  # True: a number above `most` is lowered to it, with a note
    first: bool = False  # True: shown in the first group of the help
    rare: bool = False  # True: left out of the short help
    swept: bool = False  # True: `bench` takes lists and ranges, kept in SweepOptions under `field`
    elsewhere: str = ""  # why other commands that open a model ignore it; "": they refuse it

    @property
    def default(self) -> Any:
        """The default of the field that the flag sets."""
        field = next(f for f in fields(self.section) if f.name == self.field)
        assert field.default is not MISSING, (self.section, self.field)
        return field.default

    @property
    def is_switch(self) -> bool:
        return self.kind is SWITCH

    @property
    def off_variables(self) -> tuple[str, ...]:
        """llama.cpp's variables that turn the flag off by being set, whatever their value."""
        return negated(self.variables) if self.off else ()

    @property
    def is_rare(self) -> bool:
        """True if the short help leaves the flag out.

        Such flags are marked `rare`, need a draft model, or need a drafter other than `draft`.
        """
        drafters = [need for need in self.needs if isinstance(need, DrafterName)]
        return (
            self.rare
            or self.needs == (Need.DRAFT_MODEL,)
            or (bool(drafters) and DrafterName.DRAFT not in drafters)
        )

    @property
    def shown_default(self) -> str:
        """The default as shown to people; "" if none is shown."""
        value = self.default
        if self.default_words or value is None or isinstance(value, bool) or value == ():
            return self.default_words
        return f"{value:g}" if isinstance(value, float) else str(value)

    @property
    def range_words(self) -> str:
        """A clause on the limits of a number; "" if it has none."""
        low = f"over {_number(self.above)}" if self.above is not None else None
        if self.least is not None:
            low = f"at least {_number(self.least)}"
        if self.most is None:
            return low or ""
        if low is None:
            return f"at most {_number(self.most)}"
        if self.least is not None:
            return f"between {_number(self.least)} and {_number(self.most)}"
        return f"{low} and at most {_number(self.most)}"

    def shown(self, text: str) -> str:
        """`text`, a value of this flag, as users of the server may see it."""
        return text if self.kind.is_open else HIDDEN

    def said(self, text: str) -> str:
        """The value `text` as messages show it to who typed it."""
        return HIDDEN if self.kind.is_secret and text else text

    def read(self, text: str) -> object:
        """The value that `text` means. Its ValueError says what the value must be."""
        if self.kind.is_secret and text == HIDDEN:
            raise ValueError("must be the key itself, which is not shown")
        value = self.kind.read(text)
        if isinstance(value, int | float):
            low = self.least is None or value >= self.least
            above = self.above is None or value > self.above
            high = self.most is None or value <= self.most
            if not (low and above and high):
                raise ValueError(f"must be {self.range_words}")
        return value


_VARIABLE, _NEGATED = "LLAMA_ARG_", "LLAMA_ARG_NO_"


def negated(variables: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the variables that negate `variables`, as `LLAMA_ARG_NO_MMAP` does."""
    return tuple(
        name.replace(_VARIABLE, _NEGATED, 1) for name in variables if name.startswith(_VARIABLE)
    )


_RANGE = re.compile(r"(\d+)-(\d+)(?:([+*])(\d+))?")  # FIRST-LAST, FIRST-LAST+STEP, FIRST-LAST*STEP
_MOST_SWEPT = 1000  # values of one range


def swept_values(flag: Flag, text: str) -> tuple[object, ...]:
    """The values in a list such as `0,1` or `64-512*2`, as llama-bench reads them.

    Its ValueError says what the values must be.
    """
    if text.startswith("not:"):  # the commas of -ncmoe's set of layers
        return (flag.read(text),)
    parts: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        parts += [part.strip()] if match is None else map(str, _numbers_of(match))
    return tuple(flag.read(part) for part in parts)


def _numbers_of(match: re.Match[str]) -> list[int]:
    """The numbers of a range. Each is the one before it plus the step, or times the step."""
    first, last, step = int(match[1]), int(match[2]), int(match[4] or 1)
    numbers: list[int] = []
    n = first
    while n <= last and len(numbers) <= _MOST_SWEPT:
        numbers.append(n)
        n = n * step if match[3] == "*" else n + step
        if n <= numbers[-1]:
            raise ValueError(f"{match[0]} never reaches {last}; a step must make numbers larger")
    if not numbers or len(numbers) > _MOST_SWEPT:
        raise ValueError(f"{match[0]} must be a range of 1 to {_MOST_SWEPT} numbers")
    return numbers


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"


def meaning(flag: Flag) -> str:
    """The help of a flag, with its range and its needs.

    The commands follow, unless they are those that open a model.
    """
    words = [flag.help, flag.more]
    if flag.range_words:
        words.append(f"{flag.range_words[0].upper()}{flag.range_words[1:]}.")
    if flag.needs:
        words.append(f"Needs {' or '.join(map(need_words, flag.needs))}.")
    if flag.commands != OPENS:
        words.append(f"[{', '.join(sorted(flag.commands))}]")
    return " ".join(filter(None, words))


def full_meaning(flag: Flag) -> str:
    """`meaning`, with the default and the variables."""
    words = [meaning(flag)]
    if flag.shown_default:
        words.append(f"Default: {flag.shown_default}.")
    if flag.variables:
        words.append(f"Variable: {', '.join(flag.variables)}.")
    return " ".join(words)


def flag(
    section: type, field: str, spelling: str, kind: ValueKind, about: str, panel: Panel, **more: Any
) -> Flag:
    """A flag from its names, blank-separated: `--name -n !--off-name LLAMA_VARIABLE`."""
    words = spelling.split()
    return Flag(
        section,
        field,
        tuple(word for word in words if word.startswith("-")),
        kind,
        about,
        panel,
        off=tuple(word[1:] for word in words if word.startswith("!")),
        variables=tuple(word for word in words if word[0].isalpha()),
        **more,
    )
