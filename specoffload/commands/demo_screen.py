"""The screen of `specoffload demo`: columns of text, their figures, and a plot of T(n). Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_PLOT_ROWS = 2
_CAPTION = "T(n), a decode of n tokens"
_OTHER_ROWS = 14  # of the screen: everything but the columns' text and the footer
_TEXT_ROWS = (4, 16)  # of a column: at least, at most


@dataclass(frozen=True)
class Column:
    """One way of decoding, as far as it has come."""

    title: str
    about: str
    text: str
    n_tokens: int
    seconds: float  # of this column's own decoding
    done: bool
    hidden: float | None = None  # share of the copies' time under computation; None: not known
    identical: bool | None = None  # to the first column's text; None: not compared

    @property
    def tokens_per_s(self) -> float:
        return self.n_tokens / self.seconds if self.seconds > 0 else 0.0


def screen(
    heading: str,
    columns: Sequence[Column],
    n_predict: int,
    step_s: Sequence[float],
    drafting: str,
    footer: Sequence[str],
    size: tuple[int, int],
) -> RenderableType:
    """All of it, for a terminal of `size` (columns, rows). `step_s[n-1]` is T(n), seconds;
    `drafting` says what came of it."""
    width, rows = size
    n_rows = min(max(rows - _OTHER_ROWS - len(footer), _TEXT_ROWS[0]), _TEXT_ROWS[1])
    inner = width // len(columns) - 4
    grid = Table.grid(expand=True)
    for _ in columns:
        grid.add_column(ratio=1)
    grid.add_row(*(_panel(column, n_predict, n_rows, inner) for column in columns))
    parts: list[RenderableType] = [Text(heading, style="bold", no_wrap=True, overflow="ellipsis")]
    parts += [grid, _figures(columns)]
    if step_s:
        parts += [Text(""), *_plot(step_s, drafting, width)]
    parts += [Text("")]
    parts += [Text(line, no_wrap=True, overflow="ellipsis") for line in footer]
    return Group(*parts)


def _panel(column: Column, n_predict: int, n_rows: int, width: int) -> Panel:
    text = column.text.rstrip() if column.done else column.text + "▌"
    lines = re.sub("\n\n+", "\n\n", text).split("\n")[-n_rows:]
    writing = "" if column.done else lines.pop()
    lines = [line if len(line) <= width else line[: width - 1] + "…" for line in lines]
    if writing:  # its end is what is new
        lines.append(writing if len(writing) <= width else "…" + writing[1 - width :])
    lines += [""] * (n_rows - len(lines))
    share = 1.0 if column.done else min(1.0, column.n_tokens / n_predict)
    bar = "━" * round(share * width)
    body = Text("\n".join(lines) + "\n", no_wrap=True)
    body.append(bar, style="cyan")
    title, about = Text(column.title, style="bold"), Text(column.about, style="dim")
    return Panel(body, title=title, subtitle=about, box=box.ROUNDED, padding=(0, 1))


def _figures(columns: Sequence[Column]) -> Table:
    table = Table.grid(expand=True)
    for _ in columns:
        table.add_column(ratio=1, justify="center", no_wrap=True)
    base = columns[0].tokens_per_s
    rates = []
    for i, column in enumerate(columns):
        words = Text(f"{column.tokens_per_s:.0f} tokens/s", style="bold")
        if i and base and column.n_tokens:
            words.append(f"  {column.tokens_per_s / base:.1f} ×", style="bold cyan")
        rates.append(words)
    table.add_row(*rates)
    table.add_row(*(_hidden(column) for column in columns))
    table.add_row(*(_identity(column) for column in columns))
    return table


def _hidden(column: Column) -> Text:
    if column.hidden is None:
        return Text("")
    return Text(f"copies hidden {column.hidden:.0%}")


def _identity(column: Column) -> Text:
    if column.identical is None:
        return Text("")
    if column.identical:
        return Text("text identical", style="green")
    return Text("text differs", style="bold red")


def _plot(step_s: Sequence[float], drafting: str, width: int) -> list[Text]:
    """T(n) as bars, one column for each n, an axis, and the figures that matter."""
    left = f"{max(step_s) * 1e3:.1f} ms "
    shown = step_s[: max(1, width - len(left) - 1)]
    rows = bars(shown, _PLOT_ROWS)
    ticks = [" "] * len(shown)
    for n in (1, 8, 16, 24, 32, 40, 48, 56, 64):
        if n <= len(shown):
            ticks[n - 1 : n - 1 + len(str(n))] = str(n)
    lines = [Text(_CAPTION + drafting, no_wrap=True, overflow="ellipsis")]
    first, *rest = rows
    lines.append(Text(left, no_wrap=True).append(first, style="cyan"))
    lines += [Text(" " * len(left), no_wrap=True).append(row, style="cyan") for row in rest]
    axis = "".join(ticks)
    lines.append(Text(f"{'n':>{len(left) - 1}} {axis}", style="dim", no_wrap=True))
    return lines


def bars(values: Sequence[float], n_rows: int) -> list[str]:
    """A bar chart in eighths of a character, `n_rows` lines from the top, 0 at the bottom."""
    top = max(values)
    eighths = [max(1, round(value / top * n_rows * 8)) for value in values]
    return [
        "".join(_EIGHTHS[min(8, max(0, height - 8 * row))] for height in eighths)
        for row in reversed(range(n_rows))
    ]
