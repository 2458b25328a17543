"""Shows an answer on the terminal while it is written.

Content is shown as Markdown. The reasoning before it is dimmed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

from rich.console import Console
from rich.live import Live
from rich.text import Text

from specoffload import report
from specoffload.chat.conversation import Content, Delta, Reasoning
from specoffload.generation.generation import TextPiece

_FENCE = re.compile(r" {0,3}(```+|~~~+)")


def whole_blocks(text: str) -> tuple[str, str]:
    """Return the complete Markdown blocks of `text`, and the incomplete rest.

    A block ends at an empty line outside of a code fence. A list may continue after an empty line,
    so it is complete only when another block has begun.
    """
    cut = at = 0
    fence = ""
    after_empty = False
    for line in text.splitlines(keepends=True):
        is_whole = line.endswith("\n")
        if after_empty and not fence and is_whole and line.strip() and not _goes_on(line):
            cut = at
        match = _FENCE.match(line)
        if match and not fence:
            fence = match[1]
        elif match and match[1].startswith(fence) and line.strip() == match[1]:
            fence = ""
        after_empty = is_whole and not line.strip()
        at += len(line)
    return text[:cut], text[cut:]


def _goes_on(line: str) -> bool:
    """True if `line` may belong to a list above it."""
    return bool(re.match(r"\s+\S|\s*([-*+]|\d+[.)])\s", line))


_FRAMES_PER_S = 12


def show_answer(
    parts: Iterable[Delta | TextPiece], console: Console, *, as_markdown: bool = True
) -> None:
    """Show an answer part by part until `parts` ends.

    Without `as_markdown` the text is shown as it is. If `parts` raises, the text shown so far
    stays. A pipe gets the content without the reasoning.
    """
    with report.log_lines_held():
        if console.quiet or not console.is_terminal or not as_markdown:
            _show_plain(parts, console)
            return
        answer = _AnswerBlocks(console)
        try:
            for part in parts:
                answer.add(part)
        finally:
            answer.end()


def _show_plain(parts: Iterable[Delta | TextPiece], console: Console) -> None:
    for part in parts:
        if isinstance(part, Content) and not console.quiet:
            console.file.write(part.text)
            console.file.flush()
    if not console.quiet:
        console.file.write("\n")
        console.file.flush()


class _AnswerBlocks:
    """Prints each complete Markdown block once, and redraws the incomplete block as it grows."""

    def __init__(self, console: Console) -> None:
        from rich.markdown import Markdown  # slows down a start, and pipes do not need it

        self._console, self._markdown = console, Markdown
        self._rest = ""
        self._reasons = False
        self._live: Live | None = None
        self._due_s = 0.0

    def add(self, part: Delta | TextPiece) -> None:
        if isinstance(part, Reasoning):
            self._reasons = True
            self._console.print(Text(part.text, "dim"), end="", soft_wrap=True)
        elif isinstance(part, Content):
            if self._reasons:
                self._reasons = False
                self._console.print("\n")
            whole, self._rest = whole_blocks(self._rest + part.text)
            if whole.strip():
                self._stop_drawing()
                self._console.print(self._markdown(whole))
                self._console.print()
            self._draw()

    def end(self) -> None:
        self._stop_drawing()
        if self._reasons:
            self._console.print()
        if self._rest.strip():
            self._console.print(self._markdown(self._rest))

    def _draw(self) -> None:
        now_s = time.monotonic()
        if now_s < self._due_s:
            return
        self._due_s = now_s + 1 / _FRAMES_PER_S
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        # Show only the last lines that fit, since lines above the screen cannot be redrawn.
        width, height = self._console.size
        end = self._rest.rstrip("\n")[-width * height :]
        lines = Text(end).wrap(self._console, width)
        self._live.update(Text("\n").join(lines[-(height - 2) :]), refresh=True)

    def _stop_drawing(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
