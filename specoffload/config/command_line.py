"""Reads a command's arguments and environment variables by the table of flags.

llama.cpp's short flags have several letters (`-np`, `-ctk`). click would read them as clusters of
one-letter flags, so this module reads the arguments in place of click.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TypeVar

from specdec.options import SpecOptions
from specdec.user_path import user_path
from specoffload.config.command_flags import POSITIONALS
from specoffload.config.environment import Environment
from specoffload.config.flag import FALSE, OPENS, TRUE, Flag, Positional, swept_values
from specoffload.config.foreign import (
    ADDS_UP,
    FOREIGN,
    Becomes,
    FlagEffect,
    Foreign,
    NoEffect,
    Refused,
)
from specoffload.config.llama_bench_words import read_llama_bench
from specoffload.config.options import (
    DraftOptions,
    Options,
    PlanOptions,
    ServeOptions,
    SweepOptions,
    of_draft,
)
from specoffload.config.speculation import ignored
from specoffload.config.table import TABLE
from specoffload.config.values import RAM_SIZE
from specoffload.errors import UsageError

_SIMILAR = 0.8  # least difflib ratio between a misspelt name and a suggested flag
HELP = ("-h", "--help", "--usage")
_T = TypeVar("_T")
OptionField = tuple[type, str]  # a section and its field


@dataclass(frozen=True)
class Given:
    """A value, and the flag or variable that set it."""

    value: object
    name: str


@dataclass(frozen=True)
class CommandLine:
    """The values that a command's flags and variables set, by section and field.

    A section is a class of `specoffload.config.options`. Typed flags take precedence over
    variables.
    """

    command: str
    given: Mapping[OptionField, Given]
    notes: tuple[str, ...] = ()
    ignored: tuple[tuple[str, str], ...] = ()  # (flag without effect, reason)
    environment: Environment = field(default_factory=Environment)
    words: tuple[str, ...] = ()  # the arguments as typed

    def of(self, section: type[_T]) -> _T:
        """An instance of `section` with the given values, and defaults for all other fields."""
        given = {name: g.value for (owner, name), g in self.given.items() if owner is section}
        return section(**given)

    def _names(self, section: type) -> dict[str, str]:
        return {name: g.name for (owner, name), g in self.given.items() if owner is section}

    def names(self, section: type, *names: str) -> list[str]:
        """The flags or variables that set the fields `names` of `section`, if any."""
        return [used for name, used in self._names(section).items() if name in names]

    def words_for(self, command: str) -> list[str]:
        """The typed arguments that `command` has too, without flags that only describe or show.

        `--verbose` and those of the class `PlanOptions` are left out, with their values. Keys are
        not shown, and no command takes what stands in their place.
        """
        own, kept = names_of(flags_of(self.command)), list[str]()
        other = names_of([f for f in flags_of(command) if f.field != "verbose"])
        rest = list(self.words)
        while rest:
            word = rest.pop(0)
            name, equals, text = word.partition("=")
            flag = own.get(name) or other.get(name)
            taken = [word]
            if flag is not None and equals:
                taken = [f"{name}={flag.said(text)}"]
            elif flag is not None and not flag.is_switch and rest:
                taken.append(flag.said(rest.pop(0)))
            if flag is None or (name in other and flag.section is not PlanOptions):
                kept += taken
        return kept

    @property
    def options(self) -> Options:
        """The options of opening a model, including those of speculation and the draft model."""
        return replace(
            self.of(Options),
            spec=replace(self.of(SpecOptions), given=self._names(SpecOptions)),
            of_draft=self.of(DraftOptions),
            given=self._names(Options)
            | {of_draft(name): used for name, used in self._names(DraftOptions).items()},
            notes=(*self.notes, *(ignored(name, reason) for name, reason in self.ignored)),
        )


def read_command_line(
    command: str, words: Sequence[str], environment: Environment | None = None
) -> CommandLine:
    """Read a command's arguments, `words`, and the variables in `environment`.

    Raises UsageError, which names the flag or variable as the user wrote it.
    """
    environment = environment or Environment()
    reader = _ValueReader(command)
    if command == "bench":
        arguments = read_llama_bench(words)
        reader.notes += arguments.notes
        reader.ignored += arguments.ignored
        reader.read(arguments.words)
    else:
        reader.read(words)
    reader.place_words()
    reader.read_variables(environment.variables)
    if (Options, "draft_params") in reader.given:
        reader.read_draft_params(reader.given[Options, "draft_params"])
    return CommandLine(
        command,
        reader.given,
        tuple(reader.notes),
        tuple(reader.ignored),
        environment,
        tuple(words),
    )


def flags_of(command: str) -> list[Flag]:
    """All flags that `command` accepts."""
    return [flag for flag in TABLE if command in flag.commands]


def names_of(flags: Sequence[Flag]) -> dict[str, Flag]:
    """`flags` by name, with an entry for each name of a flag."""
    return {name: flag for flag in flags for name in (*flag.names, *flag.off)}


_SOURCES = frozenset({(Options, "model"), (Options, "hf_repo")})
_SEVERAL = frozenset((ServeOptions, name) for name in ("models", "models_dir", "models_preset"))


def _options(*names: str) -> frozenset[OptionField]:
    return frozenset((Options, name) for name in names)


# Pairs of sets: options of one set decide the same as options of the other.
_RIVALS: tuple[tuple[frozenset[OptionField], frozenset[OptionField]], ...] = (
    (_options("model"), _options("hf_repo")),
    (_SOURCES, _SEVERAL),
    (_options("draft"), _options("hf_repo_draft")),
    (_options("mmproj"), _options("mmproj_url")),
    (_options("mmproj", "mmproj_url"), _options("mmproj_auto")),
    (_options("rope_scale"), _options("rope_freq_scale")),
)


def _of_serve() -> list[Flag]:
    """The flags that only `serve` has for one model. `plan` reads them in a pasted command."""
    return [
        flag for flag in TABLE
        if flag.section is ServeOptions
        and "plan" not in flag.commands
        and (flag.section, flag.field) not in _SEVERAL
    ]  # fmt: skip


class _ValueReader:
    """Reads the arguments once, then the variables."""

    def __init__(self, command: str) -> None:
        self.given: dict[OptionField, Given] = {}
        self.words: list[str] = []
        self.notes: list[str] = []
        self._overrides: list[str] = []  # values of -ot so far
        # What `notes` and `ignored` say about them.
        self._about_overrides: tuple[list[str], list[tuple[str, str]]] = [], []
        self.ignored: list[tuple[str, str]] = []
        self._command = command
        self._flags = flags_of(command) + (_of_serve() if command == "plan" else [])
        self._by_name = names_of(self._flags)
        self._foreign = _FOREIGN_NAMES if command in OPENS else {}
        others = [f for f in TABLE if f.elsewhere and command in OPENS - f.commands]
        self._elsewhere = names_of(others)
        self._weak = False  # True while reading variables, which never replace a value

    def read(self, words: Sequence[str], used: str = "") -> None:
        """Read flags and positional arguments.

        `used` is the foreign flag or variable that `words` replace. It is "" for the arguments that
        the user wrote.
        """
        rest = list(words)
        while rest:
            word = rest.pop(0)
            if word == "--":
                self.words += rest
                return
            if not word.startswith("-") or word == "-":
                self.words.append(word)
            else:
                self._read_flag(word, rest, used)

    def _read_flag(self, word: str, rest: list[str], used: str) -> None:
        name, inline = word, None
        if word.startswith("--"):
            name, equals, text = word.partition("=")
            name, inline = name.replace("_", "-"), text if equals else None
        flag = self._by_name.get(name)
        if flag is None and name in self._elsewhere:
            other = self._elsewhere[name]
            takes_next = not other.is_switch and inline is None
            value = self._next(name, rest, other.help) if takes_next else inline or ""
            self.ignored.append((f"{name} {other.said(value)}".strip(), other.elsewhere))
        elif flag is None:
            self._read_foreign(name, inline, rest)
        elif name in flag.off or flag.is_switch:
            if inline is not None:
                raise UsageError(f"{name} takes no value")
            self._set(flag, flag.off_value if name in flag.off else True, used or name)
        else:
            text = self._value_of(flag, name, rest) if inline is None else inline
            self._read_value(flag, used or name, text)

    def _value_of(self, flag: Flag, name: str, rest: list[str]) -> str:
        """Take the value of a flag from `rest`, or return `flag.bare` if the next word is no value.

        Raises UsageError if neither exists.
        """
        if flag.bare is not None and not (rest and self._is_read(flag, rest[0])):
            return flag.bare
        return self._next(name, rest, flag.help)

    def _next(self, name: str, rest: list[str], about: str = "") -> str:
        if not rest or rest[0] in self._by_name or rest[0] in self._foreign:
            raise UsageError(f"{name} needs a value{about and f': {about}'}")
        return rest.pop(0)

    def _read_value(self, flag: Flag, name: str, text: str, joint: str = " ") -> None:
        """Set the option of `flag` from `text`. Raises UsageError if the value is not allowed.

        `name` is the flag or variable. Messages put `joint` between `name` and `text`.
        """
        said = f"{name}{joint}{flag.said(text)}"
        if flag.digits_mean and text.isdecimal():
            self.notes.append(f"{said} is read as {flag.digits_mean} {text}")
            flag = self._by_name[flag.digits_mean]
        read_as = dict(flag.reads_as).get(text)
        if read_as is not None:
            self.notes.append(f"{said} is read as {name}{joint}{read_as}")
            text = read_as
        if flag.capped and text.isdecimal() and int(text) > (flag.most or 0):
            text = f"{flag.most:g}"
            self.notes.append(f"{said} is read as {text}, the largest possible")
        if flag.kind is RAM_SIZE and "," in text:
            rate = next((part for part in text.split(",") if "/" in part), "")
            self.ignored.append((f"{name} {rate}", "only plan reads the speed of RAM"))
        try:
            values = self._values(flag, text)
        except ValueError as e:
            raise UsageError(f"{name}{joint}{flag.said(text)}: {e}") from None
        if flag.section is not SweepOptions or not flag.swept:
            self._set(flag, values[0], name)
        if flag.swept and self._command == "bench":
            self._sweep(flag, values, name)

    def _values(self, flag: Flag, text: str) -> tuple[object, ...]:
        """The values in `text`: several for a flag that `bench` sweeps, else one."""
        if flag.swept and self._command == "bench":
            return swept_values(flag, text)
        return (flag.read(text),)

    def _is_read(self, flag: Flag, text: str) -> bool:
        try:
            self._values(flag, text)
        except ValueError:
            return False
        return True

    def _sweep(self, flag: Flag, values: tuple[object, ...], name: str) -> None:
        """Add `values` to those that this flag has so far."""
        place = (SweepOptions, flag.field)
        before = self.given.get(place)
        kept = before.value if before is not None else ()
        assert isinstance(kept, tuple)
        self.given[place] = Given((*kept, *values), name)

    def _set(self, flag: Flag, value: object, name: str) -> None:
        place = (flag.section, flag.field)
        before = self.given.get(place)
        if before is not None and self._weak:
            return
        if flag.repeats or flag.joins:
            kept, added = before.value if before is not None else (), value
            assert isinstance(kept, tuple)
            value = (*kept, *(added if isinstance(added, tuple) and flag.joins else (added,)))
        self.given[place] = Given(value, name)

    # -- flags of other programs

    def _read_foreign(self, name: str, inline: str | None, rest: list[str]) -> None:
        foreign = self._foreign.get(name)
        if foreign is None:
            raise UsageError(self._unknown(name))
        if name in foreign.off:
            self._take(foreign.off_answer, name, "")
            return
        values = [inline] if inline is not None else []
        if foreign.optional:
            if not values and rest and rest[0] in foreign.optional:
                values.append(rest.pop(0))
        else:
            while len(values) < foreign.n_values:
                values.append(self._next(name, rest))
        value = " ".join(values)
        adds_up = foreign.words == ADDS_UP
        if adds_up:  # given twice, it is as one list, whose first match decides
            value = self._with_earlier(value)
        try:
            answer = foreign.answered(value)
        except ValueError as e:
            raise UsageError(f"{name} {value}: {e}") from None
        n_notes, n_ignored = len(self.notes), len(self.ignored)
        self._take(answer, name, value)
        if adds_up:
            self._about_overrides = self.notes[n_notes:], self.ignored[n_ignored:]

    def _with_earlier(self, value: str) -> str:
        """Return all values of a flag that adds up, and forget what was said about earlier ones."""
        notes, ignored = self._about_overrides
        self.notes = [line for line in self.notes if line not in notes]
        self.ignored = [about for about in self.ignored if about not in ignored]
        self._overrides.append(value)
        return ",".join(self._overrides)

    def _take(self, answer: FlagEffect, name: str, value: str) -> None:
        said = f"{name} {value}".strip()
        match answer:
            case NoEffect(reason):
                self.ignored.append((said, reason))
            case Refused(reason):
                raise UsageError(f"{said}: {reason}")
            case Becomes(words):
                self.notes.append(f"{said} is read as {' '.join(words)}")
                self.read(words, name)

    # -- positional arguments

    def place_words(self) -> None:
        """Set the option that the positional argument stands for.

        Raises UsageError if the command takes fewer arguments, or a flag has set the option.
        """
        if not self.words:
            return
        positionals = [p for p in POSITIONALS if self._command in p.commands]
        taken = positionals[0] if positionals else None
        if self._command == "serve" and len(self.words) > 1:
            self._place_models()
            return
        if positionals and positionals[-1].repeats:
            self._place_each(positionals)
            return
        if taken is None or len(self.words) > 1:
            word = self.words[0 if taken is None else 1]
            hint = f"specoffload {self._command} --help lists the flags"
            if self._command == "run":
                hint = "with a model the prompt needs -p"
            raise UsageError(f"Unexpected {word!r}; {hint}")
        place = (taken.section, taken.field)
        if place in self.given:
            other = self.given[place]
            raise UsageError(
                f"{self.words[0]!r} and {other.name} {other.value} name two models: give one"
            )
        self.given[place] = Given(taken.kind.read(self.words[0]), self.words[0])

    def _place_each(self, positionals: Sequence[Positional]) -> None:
        """Set the options of several words, in order. The last one takes all that are left.

        A model that a flag names is no longer among the words.
        """
        named = any((Options, name) in self.given for name in ("model", "hf_repo"))
        left = [p for p in positionals if not (named and p.field == "model")]
        for word in self.words:
            taken = left[0] if left[0].repeats else left.pop(0)
            place = (taken.section, taken.field)
            value = taken.kind.read(word)
            if taken.repeats:
                before = self.given.get(place)
                kept = before.value if before is not None else ()
                assert isinstance(kept, tuple)
                value = (*kept, value)
            self.given[place] = Given(value, word)

    def _place_models(self) -> None:
        """Set the models of `serve` that requests choose from. Raises UsageError."""
        for name in ("model", "hf_repo"):
            if other := self.given.get((Options, name)):
                raise UsageError(
                    f"{' '.join(self.words)} and {other.name} {other.value}: name each model "
                    "without a flag"
                )
        place = (ServeOptions, "models")
        self.given[place] = Given(tuple(map(user_path, self.words)), self.words[0])

    # -- variables

    def read_variables(self, variables: Mapping[str, str]) -> None:
        """Set options from the variables that stand for flags, unless a flag decides the same.

        If several variables set the same option, the first in the table takes precedence.
        """
        self._weak = True
        decided = self._decided_by_flags(variables)
        filled = {name: text for name, text in variables.items() if text}
        for flag in self._flags:
            place = (flag.section, flag.field)
            if place in decided:
                continue
            for name in flag.off_variables:
                if name in variables and place not in self.given:
                    self._set(flag, flag.off_value, name)
                    self._say_negated(name, variables[name], flag.names)
            for name in flag.variables:
                if name not in filled or place in self.given:
                    continue
                if flag.is_switch:
                    self._set(flag, _truth(name, filled[name]), name)
                else:
                    self._read_value(flag, name, filled[name], "=")
        if self._command in OPENS:
            for name in sorted(set(_FOREIGN_VARIABLES) & set(filled)):
                foreign = _FOREIGN_VARIABLES[name]
                if not variables.keys() & set(foreign.off_variables):
                    self._read_foreign_variable(foreign, name, filled[name])
            for name in sorted(set(_FOREIGN_OFF_VARIABLES) & set(variables)):
                foreign = _FOREIGN_OFF_VARIABLES[name]
                self._say_negated(name, variables[name], foreign.names)
                self._take_of_variable(foreign.off_answer, name, variables[name])
        self._weak = False
        unread = [n for n in sorted(filled) if n.startswith("LLAMA_ARG_") and n not in _VARIABLES]
        if unread:
            self.notes.append(f"environment variables ignored: {', '.join(unread)}")

    def _decided_by_flags(self, variables: Mapping[str, str]) -> set[OptionField]:
        """Return the options whose variables are not read, because flags decide the same thing."""
        typed = set(self.given)
        decided = set(typed)
        for some, others in _RIVALS:
            decided |= others if some & typed else set()
            decided |= some if others & typed else set()
        names_another = "LLAMA_ARG_HF_REPO" in variables or (Options, "hf_repo") not in typed
        if typed & (_SOURCES | _SEVERAL) and names_another:
            decided.add((Options, "hf_file"))  # it belongs to the variable's repository
        return decided

    def _say_negated(self, name: str, text: str, names: Sequence[str]) -> None:
        """Say that a variable turns the flag `names` off, if its value looks as if it did not."""
        long = next((name for name in names if name.startswith("--")), names[0])
        if text not in TRUE:
            self.notes.append(
                f"{name}={text} turns {long} off, whatever its value, as in llama.cpp"
            )

    def _read_foreign_variable(self, foreign: Foreign, name: str, text: str) -> None:
        """Apply specoffload's answer to a variable of llama.cpp or ik_llama.cpp.

        A refused variable is only reported as ignored, because it may be meant for that program.
        """
        answer = foreign.off_answer
        if foreign.n_values or foreign.optional or _truth(name, text):
            try:
                answer = foreign.answered(text)
            except ValueError as e:
                raise UsageError(f"{name}={text}: {e}") from None
        self._take_of_variable(answer, name, text)

    def _take_of_variable(self, answer: FlagEffect, name: str, text: str) -> None:
        if isinstance(answer, NoEffect | Refused):
            self.ignored.append((name, answer.reason))
        elif isinstance(answer, Becomes):
            self.read(answer.words, name)
            self.notes.append(f"{name}={text} is read as {' '.join(answer.words)}")

    # -- the draft's own command line

    def read_draft_params(self, given: Given) -> None:
        """Read `--draft-params "..."`, the draft model's command line.

        Draft flags outside of it take precedence. Raises UsageError.
        """
        inner = _ValueReader(self._command)
        own = names_of(_draft_flags(self._flags))
        inner._by_name = {name: own.get(name, flag) for name, flag in self._by_name.items()}
        try:
            inner.read(given.value)  # type: ignore[arg-type]
        except UsageError as e:
            raise UsageError(f"{given.name}: {e}") from None
        if inner.words:
            raise UsageError(f"{given.name}: {inner.words[0]!r} is not a flag")
        for place, inside in inner.given.items():
            name = f"{given.name}: {inside.name}"
            if place == (Options, "n_gpu_layers") and inside.value == 0:
                # A device that is named, in these words or outside, takes precedence.
                if (DraftOptions, "device") not in inner.given:
                    self.given.setdefault((DraftOptions, "device"), Given("cpu", name))
            elif place[0] is DraftOptions:
                self.given.setdefault(place, Given(inside.value, name))
            else:
                whole = place == (Options, "n_gpu_layers")
                reason = "the whole draft model stays on its device" if whole else "not for drafts"
                self.ignored.append((name, reason))
        self.ignored += [(f"{given.name}: {name}", reason) for name, reason in inner.ignored]

    def _unknown(self, name: str) -> str:
        elsewhere = sorted(
            {c for flag in TABLE if name in (*flag.names, *flag.off) for c in flag.commands}
        )
        if elsewhere:
            return f"{name} is not a flag of {self._command}, only of {', '.join(elsewhere)}"
        known = [*self._by_name, *self._foreign, *HELP]
        near = difflib.get_close_matches(name, known, 1, cutoff=_SIMILAR)
        hint = f"; did you mean {near[0]}?" if near else f"; specoffload {self._command} --help"
        return f"there is no flag {name}{hint}"


_FOREIGN_VARIABLES = {name: foreign for foreign in FOREIGN for name in foreign.variables}
_FOREIGN_OFF_VARIABLES = {name: foreign for foreign in FOREIGN for name in foreign.off_variables}
_VARIABLES = frozenset(
    (
        *(name for flag in TABLE for name in (*flag.variables, *flag.off_variables)),
        *_FOREIGN_VARIABLES,
        *_FOREIGN_OFF_VARIABLES,
    )
)
_FOREIGN_NAMES = {name: foreign for foreign in FOREIGN for name in (*foreign.names, *foreign.off)}


def _truth(name: str, text: str) -> bool:
    if text not in TRUE and text not in FALSE:
        raise UsageError(f"{name}={text}: must be one of {', '.join((*TRUE, *FALSE))}")
    return text in TRUE


def _draft_flags(flags: Sequence[Flag]) -> list[Flag]:
    """Copies of the target's flags that also exist for a draft model. They set its options."""
    own = {f.name for f in fields(DraftOptions)}
    return [
        replace(flag, section=DraftOptions, swept=False)
        for flag in flags
        if flag.section is Options and flag.field in own
    ]
