"""Reads presets of several models, as llama-server's `--models-preset` does.

The grammar and the rules are those of common/preset.cpp in llama.cpp: sections in brackets, lines
`key = value`, comments after `;` or `#`. A key is a flag without its dashes, or a variable. Values
of the section `[*]` hold for all models, a model's own section takes precedence, and the command
line before both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from specoffload.config.command_line import flags_of
from specoffload.config.flag import FALSE, HIDDEN, TRUE, Flag
from specoffload.config.foreign import FOREIGN, Foreign
from specoffload.errors import UsageError

EVERY = "*"  # the section whose values hold for all models
_UNNAMED = "default"  # llama.cpp's name of the lines before the first section
_HEADER = re.compile(r"\[[ \t]*([^]\r\n]+?)[ \t]*\][ \t]*(?:[;#].*)?")
_PAIR = re.compile(r"([a-zA-Z_][a-zA-Z0-9_.-]*)[ \t]*=[ \t]*(.*?)[ \t]*(?:[;#].*)?")
_BLANK = re.compile(r"[ \t]*(?:[;#].*)?")
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
        )


def read_presets(text: str, source: str) -> dict[str, Preset]:
    """Return the presets in `text`, by the names of their sections; EVERY is one.

    Raises UsageError, which names the line and `source`.
    """
    sections: dict[str, dict[str, str]] = {}
    current = _UNNAMED
    for number, line in enumerate(re.split(r"\r\n|\n|\r", text), 1):
        if found := _HEADER.fullmatch(line):
            current = canonical(found[1])
            sections[current] = {}
        elif found := _PAIR.fullmatch(line):
            sections.setdefault(current, {})[found[1]] = found[2]
        elif not _BLANK.fullmatch(line):
            raise UsageError(
                f"{source}, line {number}: neither [SECTION], KEY = VALUE nor a comment: "
                f"{line.strip()[:80]!r}"
            )
    return {
        name: _preset(name, values, source)
        for name, values in sections.items()
        if name != _UNNAMED or values.keys() - {"version"}
    }


def idle_words(presets: Mapping[str, Preset]) -> list[str]:
    """Return a sentence for each key of `presets` that has no effect."""
    found = sorted({key for preset in presets.values() for key in preset.idle})
    return [f"{key}: no effect, because {_IDLE[key]}" for key in found]


def canonical(name: str) -> str:
    """Return a section's name with its quantisation in capitals, as llama.cpp writes it."""
    head, colon, tag = name.rpartition(":")
    if not colon:
        return name
    found = _TAG.search(tag)
    return f"{head}:{(found[1] if found else tag).upper()}"


def _preset(section: str, values: Mapping[str, str], source: str) -> Preset:
    words: list[str] = []
    shown_words: list[str] = []
    shown = dict(values)
    left_out: list[str] = []
    lists: dict[str, tuple[str, ...]] = {}
    for key, value in values.items():
        if key in _OWN_KEYS or key in _IDLE:
            continue
        if (list_name := _LISTS.get(key)) is not None:
            lists[list_name] = tuple(filter(None, (part.strip() for part in value.split(","))))
            continue
        known = _known(key)
        if known is None:
            raise UsageError(f"{source}: option {key!r} not recognized in preset {section!r}")
        name, found = known
        shown[key] = _shown(found, value)
        if found.names and found.names[0] in _OF_SERVER:
            left_out.append(key)
        else:
            words += _words(name, found, value)
            shown_words += _words(name, found, shown[key])
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
    )


def _known(key: str) -> tuple[str, Flag | Foreign] | None:
    """Return the name that `key` stands for on a command line, and its flag; None if unknown."""
    for names in (flags_of("serve"), FOREIGN):
        for found in names:
            for name in (*found.names, *found.off):
                if name.lstrip("-") == key:
                    return name, found
            if key in found.variables:
                return found.names[0], found
    return None


def _is_switch(found: Flag | Foreign) -> bool:
    return found.is_switch if isinstance(found, Flag) else not (found.n_values or found.optional)


def _shown(found: Flag | Foreign, value: str) -> str:
    """Return a value as users of the server may see it."""
    if _is_switch(found):
        return value if value in (*TRUE, *FALSE) else HIDDEN
    return found.shown(value) if isinstance(found, Flag) else HIDDEN


def _words(name: str, found: Flag | Foreign, value: str) -> list[str]:
    """Return the arguments that set a flag to `value`. A switch that has no name for "off" and is
    off is left out."""
    if not _is_switch(found):
        if name in found.off:  # such as no-webui of a flag that also takes a value
            return [name] if value not in FALSE else []
        return [f"{name}={value}"] if name.startswith("--") else [name, value]
    is_on = (value in TRUE) != (name in found.off)
    if is_on:
        return [*found.names[:1]]
    return [found.off[0]] if found.off else []
