"""docs/flags.md, made from the table."""

from __future__ import annotations

from specoffload.config.flags.flag import OPENS, Flag, Panel, need_words
from specoffload.config.flags.foreign import Already, Becomes, Foreign, NoEffect, Refused
from specoffload.config.flags.table import FOREIGN, TABLE

_HEAD = """# Flags

Made from the table of flags by `scripts/gen-flags`. Names are llama.cpp's where the meaning is the
same. `specoffload COMMAND --help` shows those of each command, `specoffload --help-all` all. Flags
without a note in brackets are of `run`, `chat`, `serve`, `bench`, `profile` and `plan`. The last of
several wins, and what is typed wins over a variable. A flag that changes nothing in a run is named
at start; with `--strict-flags` it is an error.
"""

_TAIL = """## Environment

The variables above stand for their flags, as with llama.cpp; a `LLAMA_ARG_` variable that is set
and means nothing here is named at start. Besides, `GGML_BATCH_COSTS` gives the times of batches
([speculation.md](speculation.md)). Profiles and what `tune` measured lie in
`SPECOFFLOAD_PROFILE_DIR`, else in `XDG_CACHE_HOME/specoffload/profiles`, else in
`~/.cache/specoffload/profiles`. The environment is read once, when a command starts; a value that
cannot be understood is an error, never a silent default.

Exit codes: 0 done, 1 something failed, 2 the input was bad, 130 interrupted.
"""

_THEIRS = """## llama.cpp's and ik_llama.cpp's other flags

A command line that runs there starts here. What is so already is accepted without a word; what is
read as something else, or changes nothing, is said in one line at start, and the last is an error
with `--strict-flags`; what would make another program of it is refused, with what to do instead.
"""

TITLES = {
    Panel.MODEL: "The model and its memory",
    Panel.OFFLOAD: "The device, what streams, threads and memory nodes",
    Panel.SPECULATION: "Speculation",
    Panel.SAMPLING: "Sampling",
    Panel.SERVER: "Server",
    Panel.COMMAND: "Of one command",
    Panel.DEBUGGING: "Debugging",
}


def flags_page() -> str:
    """The whole page, in Markdown."""
    parts = [_HEAD]
    for panel, title in TITLES.items():
        rows = [_row(flag) for flag in TABLE if flag.panel is panel]
        table = ["| flag | default | variable | meaning |", "|---|---|---|---|", *rows]
        parts.append("\n".join((f"## {title}\n", *table)) + "\n")
    return "\n".join((*parts, _theirs(), _TAIL))


def _theirs() -> str:
    """Flags grouped by their answer, in the order of the tables."""
    groups: dict[str, list[str]] = {}
    for flag in FOREIGN:
        groups.setdefault(_answer_words(flag), []).append(_names(flag))
    rows = [f"| {answer} | {', '.join(names)} |" for answer, names in sorted(groups.items())]
    return "\n".join((_THEIRS, "| answer | flags |", "|---|---|", *rows)) + "\n"


def _names(flag: Foreign) -> str:
    short = [name for name in flag.names if not name.startswith("--")][:1]
    long = [name for name in flag.names if name.startswith("--")][:1]
    return " ".join(f"`{name}`" for name in (*short, *long, *flag.off[-1:])) or " ".join(
        f"`{name}`" for name in flag.variables
    )


def _answer_words(flag: Foreign) -> str:
    match flag.answer:
        case Already():
            return "already so"
        case Becomes(words):
            return _cell(f"read as `{' '.join(words)}`")
        case NoEffect(why):
            return _cell(f"no effect: {why}")
        case Refused(why):
            return _cell(f"refused: {why}")
        case _:
            return "by its value"


def _row(flag: Flag) -> str:
    names = ", ".join(f"`{name}`" for name in flag.names)
    off = ", ".join(f"`{name}`" for name in flag.off)
    both = f"{names}; off: {off}" if names and off else names or off
    if flag.kind.metavar:
        both += f" {_cell(flag.kind.metavar)}"
    variables = ", ".join(f"`{name}`" for name in flag.variables)
    default = flag.shown_default or (_state(flag) if flag.is_switch and flag.names else "")
    return f"| {both} | {default} | {variables} | {_cell(meaning(flag))} |"


def _state(flag: Flag) -> str:
    return "on" if flag.default is True else "off"


def meaning(flag: Flag) -> str:
    """The help of a flag, its range, what it needs, and the commands that have it alone."""
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


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
