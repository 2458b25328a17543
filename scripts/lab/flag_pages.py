"""Makes docs/flags.md and the manual page specoffload(1) from the table of flags.

Usage: scripts/gen-flags
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from specoffload.cli import commands
from specoffload.config.flag import TITLES, Flag, full_meaning, meaning
from specoffload.config.foreign import FOREIGN, Becomes, Foreign, NoEffect, Refused
from specoffload.config.table import TABLE

_ROOT = Path(__file__).resolve().parents[2]
_LLAMA_FLAGS = _ROOT / "tests" / "fixtures" / "llama_flags.json"
_HEAD = """# Flags

`scripts/gen-flags` makes this page from the table of flags. A flag that means the same as
one of llama.cpp has its name. `specoffload COMMAND --help` shows the flags of one command, and
`specoffload --help-all` shows all flags. A note in brackets names the commands that have a flag.
Flags without a note belong to `run`, `chat`, `serve`, `bench`, `profile`, `plan`, `tune all`,
`draft judge` and `draft distil`.
If a flag is given twice, the last value counts. A flag on the command line counts more than a
variable. A line at start names each flag that has no effect.
"""

_TAIL = """## Environment

The variables above set their flags, as in llama.cpp. A line at start names each `LLAMA_ARG_`
variable that has no meaning here.

| variable | meaning |
|---|---|
| `GGML_BATCH_COSTS` | T(n) for the policies that read it, instead of measured times |
| `GGML_MAX_LOOK_AHEAD` | sets `--spec-look-ahead`; chooses the policy `costs` if none is named |
| `SPECOFFLOAD_PROFILE_DIR` | folder of measurements (default: caches, `specoffload/profiles`) |
| `SPECOFFLOAD_MEASURE_S` | most seconds that a first start measures (default: 2.6 to 13) |
| `SPECOFFLOAD_RPC_SECRET` | the secret of `--rpc-secret-file` ([defence.md](defence.md)) |
| `XDG_CACHE_HOME` | folder of caches (default: `~/.cache`) |
| `SPECOFFLOAD_WITHOUT` | parts to leave out, for debugging ([development.md](development.md)) |

Variables are read once, when a command starts. A value that cannot be understood is an error. A
variable is not read if a flag decides the same: `-m FILE` leaves `LLAMA_ARG_HF_REPO` out, too.
As in llama.cpp, `LLAMA_ARG_NO_NAME` turns off the flag of `LLAMA_ARG_NAME` if that has a name for
"off", such as `--no-mmap`. Its value does not matter, and a line says so if it looks like "off".

Exit codes: 0 if all was done, 1 if something failed, 2 if the input was bad, 130 after Ctrl-C,
143 after SIGTERM (0 from a server that runs).
"""

_THEIRS = """## Other flags of llama.cpp and ik_llama.cpp

A command line that runs there starts here too. Flags that are "already so" are accepted silently,
because the program always does what they ask for. A line at start names flags that are read as
something else, or have no effect. Flags that ask for something else than the program would do are
refused, and the error says what to do instead.
"""


def flags_page() -> str:
    """docs/flags.md, in Markdown."""
    parts = [_HEAD]
    for panel, title in TITLES.items():
        rows = [_row(flag) for flag in TABLE if flag.panel is panel]
        table = ["| flag | default | variable | meaning |", "|---|---|---|---|", *rows]
        parts.append("\n".join((f"## {title}\n", *table)) + "\n")
    return "\n".join((*parts, _foreign_flags(), _TAIL))


def _foreign_flags() -> str:
    """A table of foreign flags, grouped by their answers."""
    groups: dict[str, list[str]] = {}
    for flag in FOREIGN:
        answer, off_answer = _answer_words(flag), _off_words(flag)
        names, off = _foreign_names(flag)
        if off and off_answer != answer:
            groups.setdefault(off_answer, []).append(_coded(off))
            off = ()
        if names or off:
            groups.setdefault(answer, []).append(_coded((*names, *off)))
    rows = [f"| {answer} | {', '.join(names)} |" for answer, names in sorted(groups.items())]
    return "\n".join((_THEIRS, "| answer | flags |", "|---|---|", *rows)) + "\n"


def _foreign_names(flag: Foreign) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names that the page shows: those of the flag, and the one that negates it, if any."""
    short = [name for name in flag.names if not name.startswith("--")][:1]
    long = [name for name in flag.names if name.startswith("--")][:1]
    names = (*short, *long) or (() if flag.off else flag.variables)
    return names, flag.off[-1:]


def _coded(names: Sequence[str]) -> str:
    return " ".join(f"`{name}`" for name in names)


def _off_words(flag: Foreign) -> str:
    """The answer to the name that negates the flag."""
    match flag.off_answer:
        case NoEffect(why):
            return f"no effect: {_cell(why)}"
        case Refused(why):
            return f"refused: {_cell(why)}"
        case Becomes(words):
            return f"read as `{' '.join(words)}`"
    return "already so"


def _answer_words(flag: Foreign) -> str:
    kind, _, rest = flag.words.partition(": ")
    match kind:
        case "already":
            return "already so"
        case "by value":
            return "by its value"
        case "read as":
            return f"read as `{rest}`"
    return _cell(flag.words)


def _row(flag: Flag) -> str:
    names = ", ".join(f"`{name}`" for name in flag.names)
    off = ", ".join(f"`{name}`" for name in flag.off)
    both = f"{names}; off: {off}" if names and off else names or off
    if flag.kind.metavar:
        both += f" {_cell(flag.kind.metavar)}"
    variables = ", ".join(f"`{name}`" for name in flag.variables)
    state = "on" if flag.default is True else "off"
    default = flag.shown_default or (state if flag.is_switch and flag.names else "")
    return f"| {both} | {default} | {variables} | {_cell(meaning(flag))} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# -- the manual page

Commands = Sequence[tuple[str, str]]
"""(name, one line of help) of each command."""

_MAN_HEAD = """.\\" Made from the table of flags by scripts/gen-flags.
.TH SPECOFFLOAD 1
.SH NAME
specoffload \\- run big mixture-of-experts GGUF models on one GPU and a lot of RAM
.SH SYNOPSIS
.B specoffload
.I COMMAND
.RI [ FLAGS ]
.RI [ MODEL ]
.SH DESCRIPTION
Weights that do not fit the GPU stay in RAM. They are copied to the GPU while it computes, or the
processor computes with them where that is faster. The library is llama.cpp, whose flags are
understood. A command line of llama-server starts here unless it has one of these flags:
"""

_MAN_TAIL = """.SH ENVIRONMENT
The variables named with the flags set them. A flag on the command line counts more.
.TP
.B SPECOFFLOAD_PROFILE_DIR
Folder of measurements. The default is a folder in XDG_CACHE_HOME or ~/.cache.
.SH EXIT STATUS
0 if all was done, 1 if something failed, 2 if the input was bad, 130 after Ctrl-C.
"""


def man_page(commands: Commands) -> str:
    """specoffload(1), in roff with the man macros."""
    parts = [_MAN_HEAD, _refused_by_serve(), ".SH COMMANDS\n"]
    parts += [f".TP\n.B {_roff(name)}\n{_roff(words)}\n" for name, words in commands]
    for panel, title in TITLES.items():
        parts.append(f".SH {_roff(title.upper())}\n")
        parts += [_man_entry(flag) for flag in TABLE if flag.panel is panel]
    return "".join((*parts, _MAN_TAIL))


def _refused_by_serve() -> str:
    """A sentence with the flags of llama-server that are refused, whatever their value."""
    of_llama = json.loads(_LLAMA_FLAGS.read_text(encoding="utf-8"))["flags"]
    of_server = {
        name
        for flag in of_llama
        if {"common", "server"}.intersection(flag["programs"])
        for name in flag["names"]
    }
    names = [
        flag.names[-1]
        for flag in FOREIGN
        if flag.words.startswith("refused:") and of_server.intersection(flag.names)
    ]
    return f"{_roff(', '.join(sorted(names)))}.\nThe error says what to do instead.\n"


def _man_entry(flag: Flag) -> str:
    names = ", ".join(f"\\fB{_roff(name)}\\fR" for name in (*flag.names, *flag.off))
    metavar = f" \\fI{_roff(flag.kind.metavar)}\\fR" if flag.kind.metavar.strip() else ""
    return f".TP\n{names}{metavar}\n{_roff(full_meaning(flag))}\n"


def _roff(text: str) -> str:
    """`text` with roff's special characters escaped."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("\n", " ")
    return f"\\&{escaped}" if escaped[:1] in (".", "'") else escaped


if __name__ == "__main__":
    docs = _ROOT / "docs"
    (docs / "flags.md").write_text(flags_page(), encoding="utf-8")
    (docs / "specoffload.1").write_text(man_page(commands()), encoding="utf-8")
