"""Flags of llama.cpp and ik_llama.cpp that specoffload does not have, and its answer to each.

So specoffload can read the command lines of these programs. This module reads foreign_flags.txt,
which lists the flags and explains its own format.
"""

from __future__ import annotations

import operator
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources

from offload.errors import BadRequest
from offload.sampling.options import sampler_letters
from specoffload.config.flag import FALSE, TRUE, negated
from specoffload.config.values import ALL_LAYERS


@dataclass(frozen=True)
class NoEffect:
    """A flag that is accepted without effect. The reason is reported at start."""

    reason: str


@dataclass(frozen=True)
class Becomes:
    """A flag that is replaced by the arguments `words`. The change is reported at start."""

    words: tuple[str, ...]


@dataclass(frozen=True)
class Refused:
    """A flag that is an error, because ignoring it would change the result.

    `reason` says why, and then what to do.
    """

    reason: str


FlagEffect = NoEffect | Becomes | Refused | None  # None: accepted without a report


@dataclass(frozen=True)
class Foreign:
    """A flag of another program.

    `off` are its negating names, which take no value. If `optional` is not empty, the flag may also
    have no value, and `optional` lists its values. `words` is the answer in foreign_flags.txt.
    """

    names: tuple[str, ...]
    off: tuple[str, ...]
    variables: tuple[str, ...]
    n_values: int
    optional: tuple[str, ...]
    words: str
    off_answer: FlagEffect

    @property
    def off_variables(self) -> tuple[str, ...]:
        """Variables that mean what the negating names mean, whatever their value."""
        return negated(self.variables) if self.off else ()

    def answered(self, value: str) -> FlagEffect:
        """The answer to the flag with this value. Raises ValueError for an invalid value."""
        return _answer(self.words, value)


def _read_table() -> tuple[Foreign, ...]:
    text = resources.files("specoffload.config").joinpath("foreign_flags.txt").read_text("utf-8")
    rows: list[Foreign] = []
    words, off_words, flags = "", "", ""
    for line in [*text.splitlines(), "end"]:
        if line.startswith("#") or not line:
            continue
        if line.startswith(" "):
            flags += line
            continue
        if line.startswith("off "):
            off_words = line.removeprefix("off ")
            continue
        rows += [_foreign(flag, words, off_words) for flag in flags.split(",") if flag.strip()]
        words, off_words, flags = line, "", ""
    return tuple(rows)


def _foreign(flag: str, words: str, off_words: str) -> Foreign:
    parts = flag.split()
    values = next((part[1:] for part in parts if part.startswith("=")), "0")
    if not off_words:
        constant = words.startswith(("no effect:", "refused:"))
        off_words = words if constant else "already"
    return Foreign(
        names=tuple(part for part in parts if part.startswith("-")),
        off=tuple(part[1:] for part in parts if part.startswith("!")),
        variables=tuple(part for part in parts if part[0].isalpha()),
        n_values=1 if values == "BOOL" else int(values),
        optional=(*TRUE, *FALSE, "auto") if values == "BOOL" else (),
        words=words,
        off_answer=_answer(off_words, ""),
    )


_COMPARISONS = {"<": operator.lt, "<=": operator.le, "=": operator.eq, ">=": operator.ge,
                ">": operator.gt}  # fmt: skip


def _answer(words: str, value: str) -> FlagEffect:
    """The answer to a flag with this value. `words` is the flag's answer in foreign_flags.txt."""
    if words == "already":
        return None
    kind, _, rest = words.partition(": ")
    if kind == "by value":
        return _BY_VALUE[rest](value)
    if kind == "read as":
        return Becomes(tuple(value if word == "VALUE" else word for word in rest.split()))
    kind, _, condition = re.sub(r" (if|unless) ", r"|\1 ", kind).partition("|")
    if condition and not _holds(condition, value):
        return None
    return Refused(rest) if kind == "refused" else NoEffect(rest)


def _holds(condition: str, value: str) -> bool:
    match condition.split():
        case ["if", "false"]:
            return value in FALSE
        case ["if", "true"]:
            return value not in FALSE
        case ["unless", comparison, limit]:
            try:
                number = float(value)
            except ValueError:
                raise ValueError("must be a number") from None
            compare = _COMPARISONS[comparison]
            return not compare(number, float(limit))
    raise AssertionError(condition)


# -- answers that depend on more than a comparison

_MOST_LAYERS = 512  # number of layers on which an override's patterns are tried
_EXPERTS = (
    ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
    ("ffn_gate_up_exps", "ffn_down_exps"),
)
# Classes of POSIX regular expressions, which std::regex knows and Python does not.
_POSIX_CLASSES = {
    "alpha": "a-zA-Z", "digit": "0-9", "alnum": "a-zA-Z0-9", "upper": "A-Z", "lower": "a-z",
    "space": r"\s", "blank": r" \t", "punct": r"!-/:-@\[-`{-~", "xdigit": "0-9A-Fa-f",
    "word": r"\w", "d": r"\d", "w": r"\w", "s": r"\s",
}  # fmt: skip
_POSIX_CLASS = re.compile(r"\[:(\w+):\]")


def _python_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a pattern of llama.cpp's std::regex. Raises ValueError."""
    try:
        read = _POSIX_CLASS.sub(lambda match: _POSIX_CLASSES[match[1]], pattern)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # "[[" is a plain bracket in both
            return re.compile(read)
    except KeyError as e:
        raise ValueError(f"{pattern!r}: there is no character class [:{e.args[0]}:]") from None
    except re.error as e:
        raise ValueError(f"{pattern!r} is no regular expression: {e}") from None


def _override_tensor(value: str) -> FlagEffect:
    """The answer to `-ot REGEX=BUFFER,...`. The first pattern that matches a weight decides.

    Overrides that put the experts of all layers on the CPU, except those of layers that are named,
    have a counterpart here. The named layers' experts are resident.
    """
    patterns = []
    for part in filter(None, value.split(",")):
        pattern, equals, buffer = part.rpartition("=")
        if not equals:
            raise ValueError(f"{part!r} is not PATTERN=BUFFER")
        patterns.append((_python_pattern(pattern), buffer.upper()))
    places = [_places(patterns, layer) for layer in range(_MOST_LAYERS)]
    if places[-1] == "CPU":  # patterns that name layers leave the last one to those for all
        resident = [layer for layer, place in enumerate(places) if place in ("GPU", "")]
        kept = ",".join(map(str, resident))
        return Becomes(("--n-cpu-moe", f"not:{kept}" if kept else str(ALL_LAYERS)))
    if set(places) == {""}:
        return NoEffect(
            "it names no experts, and --n-gpu-layers decides which layers' dense weights stay on "
            "the GPU"
        )
    return NoEffect("the layers whose experts stay on the GPU are chosen to fit, or by --n-cpu-moe")


def _places(patterns: list[tuple[re.Pattern[str], str]], layer: int) -> str:
    """Return the place of a layer's experts: "CPU", "GPU", "" if no pattern names them, or "other".

    A file has one of two sets of matrices: gate and up apart, or fused.
    """
    by_kind = []
    for matrices in _EXPERTS:
        names = [f"blk.{layer}.{matrix}.weight" for matrix in matrices]
        by_kind.append({next((b for p, b in patterns if p.search(n)), "") for n in names})
    if {"CPU"} in by_kind:
        return "CPU"
    if any(len(places) == 1 and not places & {"", "CPU"} for places in by_kind):
        return "GPU"
    return "" if all(places == {""} for places in by_kind) else "other"


def _load_mode(value: str) -> FlagEffect:
    modes: dict[str, FlagEffect] = {
        "auto": None,
        "none": Becomes(("--no-mmap",)),
        "dio": Becomes(("--no-mmap",)),
        "mmap": Becomes(("--mmap",)),
        "mmap+mlock": Becomes(("--mmap",)),
        "mlock": Becomes(("--no-mmap",)),
    }
    if value not in modes:
        raise ValueError(f"must be one of {', '.join(modes)}")
    return modes[value]


def _draft_layers(value: str) -> FlagEffect:
    if value == "0":
        return Becomes(("--device-draft", "cpu"))
    return NoEffect("the whole draft model stays on its device")


def _sampler_letters(value: str) -> FlagEffect:
    try:
        return Becomes(("--samplers", ";".join(sampler_letters(value))))
    except BadRequest as e:
        raise ValueError(str(e)) from None


_BY_VALUE: dict[str, Callable[[str], FlagEffect]] = {
    "override_tensor": _override_tensor,
    "load_mode": _load_mode,
    "draft_layers": _draft_layers,
    "sampler_letters": _sampler_letters,
}

# Words of the answer to a flag whose values add up, separated by commas.
ADDS_UP = "by value: override_tensor"

FOREIGN = _read_table()
