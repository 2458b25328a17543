"""Reads presets of several models, as llama-server's `--models-preset` does.

The files and the rules are those of common/preset.cpp in llama.cpp: sections in brackets, lines
`key = value`, comments after `;` or `#`. A key is a flag without its dashes, or a variable. A flag
may have underscores in place of hyphens. Values of the section `[*]` hold for all models, a model's
own section takes precedence, and the command line before both.

llama-server cuts a value at its first `;` or `#`. Here a comment behind a value needs a blank
before it, and a value in quotes is whole, so that paths and lists of samplers can have these signs.
"""

from __future__ import annotations

import configparser
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from specdec.whole_file import read_text
from specoffload.config.command_line import flags_of
from specoffload.config.flag import FALSE, HIDDEN, TRUE, Flag
from specoffload.config.foreign import FOREIGN, Foreign
from specoffload.config.values import SAMPLER_NAMES
from specoffload.errors import UsageError

EVERY = "*"  # the section whose values hold for all models
UNNAMED = "default"  # llama.cpp's name of the lines before the first section
_BEFORE_SECTIONS = "\0"  # stands for the same lines while the file is read
_MOST_KEY_CHARS = 200  # the parser's time grows with the square of a key's length
_LINE_ENDS = re.compile(r"\r\n|\n|\r")
# A stretch in quotes, or the first sign of a comment. Apostrophes are quotes only at the beginning.
_QUOTED_OR_COMMENT = re.compile(r"\"[^\"]*\"|^'[^']*'|(?:^|(?<=[ \t]))(?P<comment>[;#])")
_TAG = re.compile(r"[-.]([A-Za-z0-9_]+)$")
# Keys that belong to the server as a whole. llama-server overwrites or removes them.
_OF_SERVER = frozenset(
    {"--host", "--port", "--api-key", "--api-key-file", "--ssl-key-file", "--ssl-cert-file",
     "--models-dir", "--models-max", "--models-preset", "--models-autoload",
     "--sleep-idle-seconds", "--api-prefix", "--cors-origins", "--metrics", "--ui", "--max-queue",
     "--strict-model", "--media-path", "--allow-media-urls", "--media-marker",
     "--shutdown-timeout", "--log-file", "--log-timestamps", "--log-prefix"}
)  # fmt: skip
_OWN_KEYS = frozenset({"version", "load-on-startup", "stop-timeout"})
# Keys of llama-server without effect here, and the reason.
_IDLE = {
    "dedup-cache-models": "models of the download cache are not listed, so there are none to hide"
}
# Keys whose values are lists, and the flag that each stands for.
_LISTS = {"tags": "tags", "LLAMA_ARG_TAGS": "tags", "a": "alias", "alias": "alias",
          "LLAMA_ARG_ALIAS": "alias"}  # fmt: skip


@dataclass(frozen=True)
class Preset:
    """The settings of one section.

    `words` are arguments of `serve`, and `shown_words` are the same ones as users of the server may
    see them. `left_out` has keys that belong to the server as a whole, and `idle` keys without
    effect.
    `stop_timeout_s` are the seconds that requests have to end when the model is to be unloaded.
    """

    words: tuple[str, ...] = ()
    loads_on_startup: bool | None = None
    stop_timeout_s: float | None = None
    left_out: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    shown_words: tuple[str, ...] = ()
    shown: Mapping[str, str] = field(default_factory=dict)  # values that users may see, by key
    idle: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # sentences on values that are not read as they are written

    def over(self, other: Preset) -> Preset:
        """Return `other` with the settings of this preset, which take precedence."""
        loads = self.loads_on_startup
        stop = self.stop_timeout_s
        return Preset(
            (*other.words, *self.words),
            other.loads_on_startup if loads is None else loads,
            other.stop_timeout_s if stop is None else stop,
            (*other.left_out, *self.left_out),
            self.aliases,  # several models cannot share one
            self.tags or other.tags,
            (*other.shown_words, *self.shown_words),
            {**other.shown, **self.shown},
            (*other.idle, *self.idle),
            (*other.notes, *self.notes),
        )


def read_preset_file(file: Path) -> dict[str, Preset]:
    """Return the presets in a file, as `read_presets` does. Raises UsageError."""
    try:
        text = read_text(file)
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8"
        raise UsageError(f"--models-preset {file}: {reason}") from e
    return read_presets(text, f"--models-preset {file}")


def read_presets(text: str, source: str) -> dict[str, Preset]:
    """Return the presets in `text`, by the names of their sections; EVERY is one.

    Raises UsageError, which names the line or the key, and `source`.
    """
    parser = _Parser(
        delimiters=("=",),
        comment_prefixes=(";", "#"),
        default_section=_UNUSED,
        empty_lines_in_values=False,
        interpolation=None,
    )
    lines = [f"[{_BEFORE_SECTIONS}]", *_checked_lines(text, source)]
    try:
        parser.read_file(lines)
    except configparser.DuplicateOptionError as e:
        raise UsageError(
            f"{source}, line {(e.lineno or 1) - 1}: {e.option!r} is in this section twice: leave "
            "one of them out"
        ) from None
    except configparser.DuplicateSectionError as e:
        raise UsageError(
            f"{source}, line {(e.lineno or 1) - 1}: there are two sections [{e.section}]"
        ) from None
    presets: dict[str, Preset] = {}
    for section in parser.sections():
        values = dict(parser.items(section))
        name = canonical(section.strip(" \t"))
        if section == _BEFORE_SECTIONS:
            if not values.keys() - {"version"}:
                continue
            name = UNNAMED
        if name in presets:
            raise UsageError(f"{source}: two sections have the name [{name}]")
        presets[name] = _preset(name, values, source)
        if name.lower() != section.strip(" \t").lower() and section != _BEFORE_SECTIONS:
            # The short name has only the last word of the tag, and users ask for the written one.
            aliases = (*presets[name].aliases, section.strip(" \t"))
            presets[name] = replace(presets[name], aliases=aliases)
    return presets


_UNUSED = "\0\0"  # no section whose values all others inherit: [*] is ours


class _Parser(configparser.RawConfigParser):
    SECTCRE = re.compile(r"\[(?P<header>[^\]]+)\]\s*(?:[;#].*)?$")

    def optionxform(self, optionstr: str) -> str:
        """Keep the case of keys."""
        return optionstr


def _checked_lines(text: str, source: str) -> Iterator[str]:
    """Yield the lines of `text`, without blanks around keys. Takes time linear in the text.

    Raises UsageError for a line that is neither a section, a pair, a comment nor blank. An indented
    line would continue the value of the line before, which llama-server does not read either.
    """
    for number, line in enumerate(_LINE_ENDS.split(text), 1):
        stripped = line.strip(" \t")
        key, equals, value = line.partition("=")
        key = key.rstrip(" \t")
        if key != key.upper():  # a flag: on command lines, too, underscores are hyphens
            key = key.replace("_", "-")
        is_pair = bool(key) and bool(equals) and len(key) <= _MOST_KEY_CHARS
        if not stripped or stripped.startswith((";", "#")):
            yield ""
        elif line[0] not in " \t" and _Parser.SECTCRE.match(stripped):
            yield stripped
        elif line[0] not in " \t" and is_pair and not key.startswith("["):
            yield f"{key} = {value}"
        else:
            raise UsageError(
                f"{source}, line {number}: neither [SECTION], KEY = VALUE nor a comment, each from "
                f"the line's beginning: {stripped[:80]!r}"
            )


def _read_value(written: str, signs: str = ";#") -> tuple[str, str, str]:
    """Return a value without its comment and without quotes around it, the comment, the quotes.

    `signs`: those with which a comment may begin.
    """
    comment = ""
    for match in _QUOTED_OR_COMMENT.finditer(written):
        if match["comment"] and match["comment"] in signs:
            written, comment = written[: match.start()].rstrip(" \t"), written[match.start() :]
            break
    quote = written[:1]
    is_quoted = quote in ("'", '"') and len(written) > 1 and written.endswith(quote)
    if is_quoted and written.count(quote) == 2:
        return written[1:-1], comment, quote
    return written, comment, ""


def notes_on(presets: Mapping[str, Preset]) -> list[str]:
    """Return a sentence for each key of `presets` without effect, and for each changed value."""
    keys = sorted({key for preset in presets.values() for key in preset.idle})
    idle = [f"{key}: no effect, because {_IDLE[key]}" for key in keys]
    return idle + [words for preset in presets.values() for words in preset.notes]


def canonical(name: str) -> str:
    """Return a section's name with its quantisation in capitals, as llama.cpp writes it."""
    head, colon, tag = name.rpartition(":")
    if not colon:
        return name
    match = _TAG.search(tag)
    return f"{head}:{(match[1] if match else tag).upper()}"


def _preset(section: str, written: Mapping[str, str], source: str) -> Preset:
    words: list[str] = []
    shown_words: list[str] = []
    left_out: list[str] = []
    lists: dict[str, tuple[str, ...]] = {}
    notes: list[str] = []
    setters: dict[tuple[str, ...], str] = {}  # the key that set a flag, by the flag's names
    values = {key: _read_value(value)[0] for key, value in written.items()}
    shown = dict(values)
    for key, value in list(values.items()):
        if key in _OWN_KEYS or key in _IDLE:
            continue
        if (list_name := _LISTS.get(key)) is not None:
            lists[list_name] = tuple(filter(None, (part.strip() for part in value.split(","))))
            notes += _changes(section, key, written[key])
            continue
        known = _known(key)
        if known is None:
            raise UsageError(f"{source}: option {key!r} not recognized in preset {section!r}")
        name, flag = known
        if (other := setters.setdefault(flag.names or flag.off, key)) != key:
            raise UsageError(
                f"{source}: {other!r} and {key!r} in preset {section!r} set the same option: leave "
                "one of them out"
            )
        shown[key] = _shown(name, flag, value)
        if flag.names and flag.names[0] in _OF_SERVER:
            left_out.append(key)
            continue
        if isinstance(flag, Flag) and flag.kind is SAMPLER_NAMES:
            values[key] = value = _read_value(written[key], "#")[0]  # `;` is between the names
        elif _is_plain(flag):
            values[key] = value = re.split("[;#]", value, maxsplit=1)[0].rstrip(" \t")
        else:
            notes += _changes(section, key, written[key])
        try:
            words += _words(name, flag, value)
        except ValueError as e:
            raise UsageError(f"{source}: {key} = {value} in preset {section!r}: {e}") from None
        shown[key] = _shown(name, flag, value)
        shown_words += _words(name, flag, shown[key])
    try:
        stop_s = float(values["stop-timeout"]) if "stop-timeout" in values else None
    except ValueError:
        stop_s = -1.0
    if stop_s is not None and not 0 <= stop_s <= 1e6:
        raise UsageError(
            f"{source}: stop-timeout = {values['stop-timeout']} in preset {section!r}: must be a "
            "number of seconds from 0 on"
        )
    loads = values.get("load-on-startup")
    if loads is not None and loads not in (*TRUE, *FALSE):
        raise UsageError(f"{source}: load-on-startup = {loads} in preset {section!r}: {_ON_OR_OFF}")
    return Preset(
        tuple(words),
        None if loads is None else loads in TRUE,
        stop_s,
        tuple(left_out),
        lists.get("alias", ()),
        lists.get("tags", ()),
        tuple(shown_words),
        shown,
        tuple(key for key in values if key in _IDLE),
        tuple(notes),
    )


_ON_OR_OFF = f"must be one of {', '.join((*TRUE, *FALSE))}"


def _is_plain(flag: Flag | Foreign) -> bool:
    """True for switches, numbers and names, in which `;` and `#` can only begin a comment."""
    if isinstance(flag, Foreign):
        return not flag.n_values
    return flag.kind.metavar in ("", "N", "X") or bool(flag.kind.values)


def _changes(section: str, key: str, written: str) -> list[str]:
    """Return sentences on what is left out of a value. They do not show the value, a secret maybe.

    A blank behind a comment's sign shows that no value was meant.
    """
    _, comment, quote = _read_value(written)
    said = []
    if quote:
        said.append(f"[{section}] {key}: the quotes around its value are left out")
    if comment[1:2].strip(" \t"):
        said.append(
            f"[{section}] {key}: the rest of the line from {comment[:1]} on is a comment (quotes "
            "around the whole value would keep it)"
        )
    return said


def _known(key: str) -> tuple[str, Flag | Foreign] | None:
    """Return the name that `key` stands for on a command line, and its flag; None if unknown."""
    for names in (flags_of("serve"), FOREIGN):
        for flag in names:
            for name in (*flag.names, *flag.off):
                if name.lstrip("-") == key:
                    return name, flag
            if key in flag.variables:
                return flag.names[0], flag
    return None


def _is_switch(flag: Flag | Foreign) -> bool:
    return flag.is_switch if isinstance(flag, Flag) else not (flag.n_values or flag.optional)


def _shown(name: str, flag: Flag | Foreign, value: str) -> str:
    """Return a value as users of the server may see it."""
    if _is_switch(flag) or name in flag.off:
        return value if value in (*TRUE, *FALSE) else HIDDEN
    if isinstance(flag, Flag):
        return flag.shown(value)
    return " ".join([HIDDEN] * max(1, flag.n_values))


def _words(name: str, flag: Flag | Foreign, value: str) -> list[str]:
    """Return the arguments that set a flag to `value`.

    A switch that has no name for "off" and is off is left out. Raises ValueError for a value that
    a switch cannot have, and for too few values.
    """
    if not _is_switch(flag) and name not in flag.off:
        n_values = 1 if isinstance(flag, Flag) else flag.n_values
        if n_values > 1:
            parts = value.split(maxsplit=n_values - 1)
            if len(parts) < n_values:
                raise ValueError(f"must be {n_values} values with blanks between them")
            return [name, *parts]
        long = next((one for one in (name, *flag.names) if one.startswith("--")), name)
        return [f"{long}={value}"] if long.startswith("--") else [long, value]
    if value not in (*TRUE, *FALSE):
        raise ValueError(_ON_OR_OFF)
    if not _is_switch(flag):  # such as no-webui of a flag that also takes a value
        return [name] if value in TRUE else []
    is_on = (value in TRUE) != (name in flag.off)
    if is_on:
        return [*flag.names[:1]]
    return [flag.off[0]] if flag.off else []
