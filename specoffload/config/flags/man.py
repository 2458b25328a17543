"""The manual page, specoffload(1), made from the table of flags."""

from __future__ import annotations

from collections.abc import Sequence

from specoffload.config.flags.flag import Flag
from specoffload.config.flags.page import TITLES, full_meaning
from specoffload.config.flags.table import TABLE

Commands = Sequence[tuple[str, str]]
"""(name, one line of help) of each command."""

_HEAD = """.\\" Made from the table of flags by scripts/gen-flags.
.TH SPECOFFLOAD 1
.SH NAME
specoffload \\- run big mixture-of-experts GGUF models on one GPU and a lot of RAM
.SH SYNOPSIS
.B specoffload
.I COMMAND
.RI [ FLAGS ]
.RI [ MODEL ]
.SH DESCRIPTION
Weights that do not fit the GPU lie in memory, and are copied into it while it computes; where the
processor is faster it computes them itself. The library is llama.cpp, whose flags are understood:
a command line that runs there starts here.
"""

_TAIL = """.SH ENVIRONMENT
The variables named with the flags stand for them; what is typed wins.
.TP
.B SPECOFFLOAD_PROFILE_DIR
Where profiles and measurements are kept; else a folder in XDG_CACHE_HOME or ~/.cache.
.SH EXIT STATUS
0 done, 1 something failed, 2 the input was bad, 130 interrupted.
"""


def man_page(commands: Commands) -> str:
    """The whole page, in roff with the man macros."""
    parts = [_HEAD, ".SH COMMANDS\n"]
    parts += [f".TP\n.B {_text(name)}\n{_text(words)}\n" for name, words in commands]
    for panel, title in TITLES.items():
        flags = [flag for flag in TABLE if flag.panel is panel]
        parts.append(f".SH {_text(title.upper())}\n")
        parts += [_entry(flag) for flag in flags if flag.panel is panel]
    return "".join((*parts, _TAIL))


def _entry(flag: Flag) -> str:
    names = ", ".join(f"\\fB{_text(name)}\\fR" for name in (*flag.names, *flag.off))
    metavar = f" \\fI{_text(flag.kind.metavar)}\\fR" if flag.kind.metavar.strip() else ""
    # A flag without a name is a variable alone.
    shown = names or f"\\fB{_text(', '.join(flag.variables))}\\fR"
    return f".TP\n{shown}{metavar}\n{_text(full_meaning(flag))}\n"


def _text(text: str) -> str:
    """Words as roff has them: nothing is a command or an escape."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("\n", " ")
    return f"\\&{escaped}" if escaped[:1] in (".", "'") else escaped
