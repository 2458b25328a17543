"""docs/flags.md, made from the table."""

from __future__ import annotations

from specoffload.config.flags.flag import OPENS, Flag, Panel, need_words
from specoffload.config.flags.table import TABLE

_HEAD = """# Flags

Made from the table of flags by `scripts/gen-flags`. Names are llama.cpp's where the meaning is the
same. `specoffload COMMAND --help` shows those of each command; flags without a note in brackets are
of `run`, `serve`, `bench` and `profile`. The last of several wins, and what is typed wins over a
variable. A flag that changes nothing in a run is named at start; with `--strict-flags` it is an
error.
"""

_TAIL = """## Environment

The variables above stand for their flags, as with llama.cpp; a `LLAMA_ARG_` variable that is set
and means nothing here is named at start. Beside them, `GGML_BATCH_COSTS` and `GGML_MAX_LOOK_AHEAD`
select the policy `costs` ([speculation.md](speculation.md)), and profiles and what `tune` measured
lie in `SPECOFFLOAD_PROFILE_DIR`, else in `XDG_CACHE_HOME/specoffload/profiles`, else in
`~/.cache/specoffload/profiles`. The environment is read once, when a command starts; a value that
cannot be understood is an error, never a silent default.

Exit codes: 0 done, 1 something failed, 2 the input was bad, 130 interrupted.
"""

_TITLES = {
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
    for panel, title in _TITLES.items():
        rows = [_row(flag) for flag in TABLE if flag.panel is panel]
        table = ["| flag | default | variable | meaning |", "|---|---|---|---|", *rows]
        parts.append("\n".join((f"## {title}\n", *table)) + "\n")
    return "\n".join((*parts, _TAIL))


def _row(flag: Flag) -> str:
    names = ", ".join(f"`{name}`" for name in flag.names)
    off = ", ".join(f"`{name}`" for name in flag.off)
    both = f"{names}; off: {off}" if names and off else names or off
    if flag.kind.metavar:
        both += f" {_cell(flag.kind.metavar)}"
    variables = ", ".join(f"`{name}`" for name in flag.variables)
    default = flag.shown_default or ("off" if flag.is_switch and flag.names else "")
    return f"| {both} | {default} | {variables} | {_cell(_meaning(flag))} |"


def _meaning(flag: Flag) -> str:
    words = [flag.help, flag.more]
    if flag.range_words:
        words.append(f"{flag.range_words[0].upper()}{flag.range_words[1:]}.")
    if flag.needs:
        words.append(f"Needs {' or '.join(map(need_words, flag.needs))}.")
    if flag.commands != OPENS:
        words.append(f"[{', '.join(sorted(flag.commands))}]")
    return " ".join(filter(None, words))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
