"""`specoffload demo`: one prompt decoded three ways side by side, by the embedded pair.

Plain decodes one token at a time and waits for every copy. Streamed hides copies behind computation
and caches experts. Speculative also drafts, with lengths chosen by T(n). All layers stream through
slots that hold a part of them, on a GPU if there is one, else on `sim`.

The three take turns. The one that has used the least time goes next, so the screen compares their
texts after equal times.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from offload.device import has_gpu
from offload.engine import Engine
from offload.notes import OnProgress
from offload.times.min_batch import MinBatch
from offload.trace.report import report as trace_report
from offload.trace.trace import NO_TRACE, Trace
from specoffload import report
from specoffload.config.environment import Environment, read_host
from specoffload.config.options import Options
from specoffload.config.resolution import Config, resolve
from specoffload.config.speculation import NO_DRAFTS
from specoffload.generation.generation import GenerateOptions, TextPiece, ignore
from specoffload.generation.statistics import GenerationStats
from specoffload.session.session import Session

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_PLOT_ROWS = 2
_CAPTION = "T(n), a decode of n tokens"
_MORE = 1.15  # ratio of two measured times below which they count as equal
_OTHER_ROWS = 14  # screen rows beside the columns' text and the footer
_TEXT_ROWS = (4, 16)  # least and most rows of a column's text


@dataclass
class DemoWay:
    """A way of decoding, and the state of its column on the screen."""

    title: str
    about: str
    session: Session | None = None  # None for a column that does not run
    trace: Trace = NO_TRACE
    text: str = ""
    n_tokens: int = 0
    own_s: float = 0.0  # seconds of this column's own decoding
    stats: GenerationStats | None = None  # None until the text has ended
    hidden: float | None = None  # share of the copies' time hidden by computing; None: not known
    identical: bool | None = None  # True if the text equals the first column's; None: not compared
    pieces: Iterator[TextPiece] = field(default_factory=lambda: iter(()))

    @property
    def done(self) -> bool:
        return self.stats is not None

    @property
    def tokens_per_s(self) -> float:
        return self.n_tokens / self.own_s if self.own_s > 0 else 0.0

    def start(self) -> None:
        """Evaluate the prompt, which the column's clock does not count."""
        assert self.session is not None
        self.session.forget()
        self.pieces = self.session.generate(PROMPT, SAMPLING)
        while not (piece := next(self.pieces)).tokens:
            pass
        self._take(piece)

    def step(self) -> None:
        """Run one round, and add its time to the column's clock."""
        began = time.perf_counter()
        piece = next(self.pieces)
        self.own_s += time.perf_counter() - began
        self._take(piece)

    def _take(self, piece: TextPiece) -> None:
        self.text += piece.text
        self.n_tokens += len(piece.tokens)
        self.stats = piece.stats


def screen(
    heading: str,
    columns: Sequence[DemoWay],
    n_predict: int,
    step_s: Sequence[float],
    drafting: str,
    footer: Sequence[str],
    size: tuple[int, int],
) -> RenderableType:
    """The whole screen for a terminal of `size` (columns, rows).

    `step_s[n-1]` is T(n) in seconds. `drafting` is shown with the plot of T(n).
    """
    width, rows = size
    notes = [_DIFFERS] if any(column.identical is False for column in columns) else []
    n_rows = rows - _OTHER_ROWS - len(footer) - len(notes)
    n_rows = min(max(n_rows, _TEXT_ROWS[0]), _TEXT_ROWS[1])
    inner = width // len(columns) - 4
    grid = Table.grid(expand=True)
    for _ in columns:
        grid.add_column(ratio=1)
    grid.add_row(*(_panel(column, n_predict, n_rows, inner) for column in columns))
    parts: list[RenderableType] = [Text(heading, style="bold", no_wrap=True, overflow="ellipsis")]
    parts += [grid, _figures(columns)]
    parts += [Text(line, style="dim", no_wrap=True, overflow="ellipsis") for line in notes]
    if step_s:
        parts += [Text(""), *_plot(step_s, drafting, width)]
    parts += [Text("")]
    parts += [Text(line, no_wrap=True, overflow="ellipsis") for line in footer]
    return Group(*parts)


def _panel(column: DemoWay, n_predict: int, n_rows: int, width: int) -> Panel:
    text = PROMPT.rsplit("\n", 1)[-1] + column.text
    text = text.rstrip() if column.done else text + "▌"
    lines = re.sub("\n\n+", "\n\n", text).split("\n")[-n_rows:]
    writing = "" if column.done else lines.pop()
    lines = [line if len(line) <= width else line[: width - 1] + "…" for line in lines]
    if writing:  # text cut at its start, since new text is at its end
        lines.append(writing if len(writing) <= width else "…" + writing[1 - width :])
    lines += [""] * (n_rows - len(lines))
    share = 1.0 if column.done else min(1.0, column.n_tokens / n_predict)
    bar = "━" * round(share * width)
    body = Text("\n".join(lines) + "\n", no_wrap=True)
    body.append(bar, style="cyan")
    title, about = Text(column.title, style="bold"), Text(column.about, style="dim")
    return Panel(body, title=title, subtitle=about, box=box.ROUNDED, padding=(0, 1))


def _figures(columns: Sequence[DemoWay]) -> Table:
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
    hidden = ("" if c.hidden is None else f"copies hidden {c.hidden:.0%}" for c in columns)
    table.add_row(*map(Text, hidden))
    table.add_row(*(_SAME[column.identical] for column in columns))
    return table


_SAME = {
    None: Text(""),
    True: Text("text identical", style="green"),
    False: Text("text differs *", style="yellow"),
}
_DIFFERS = "* a larger batch rounds otherwise, so of two nearly equal tokens another may win"


def _plot(step_s: Sequence[float], drafting: str, width: int) -> list[Text]:
    """T(n) as a bar chart with one column for each n and an axis, and `drafting`'s figures."""
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


# The pair continues this prompt without repeating itself, and ends by itself after 181 tokens. It
# knows codecs well, because Python's library has over a hundred similar ones.
PROMPT = """\
import codecs

class Codec(codecs.Codec):

    def encode(self,input,errors='strict'):
        return codecs.charmap_encode(input,errors,encoding_table)

    def decode(self,input,errors='strict'):"""
SAMPLING = GenerateOptions(n_predict=200, temperature=0.0, repeat_penalty=1.3, repeat_last_n=64)

# With this link, the copies of a verification batch take about as long as its computation. The
# slots hold half of the streamed weights.
_LINK = "2 GB/s"
_DEVICE = f"sim:bw={_LINK.replace(' ', '')}"
_VRAM_BYTES = 8 << 20
NEXT = (
    "Go on:  specoffload run -hf user/repo:Q4_K_M   fetches a model and talks to it",
    "        specoffload plan MODEL.gguf   says what would lie where, and the speed",
    "        specoffload serve MODEL.gguf -md DRAFT.gguf   is an OpenAI server",
)
_FRAMES_PER_S = 12.0


def ways(
    environment: Environment | None = None, *, use_profile: bool = True
) -> list[tuple[str, str, Config]]:
    """(title, description, configuration) of each of the three columns.

    Without a profile, drafts have a fixed length.
    """
    simulated = not has_gpu()
    streams = Options(
        device=_DEVICE if simulated else "auto",
        min_batch=MinBatch(1, 1),
        vram_bytes=_VRAM_BYTES,
        n_gpu_layers=0,
        ctx_size=1024,
        threads=1 if simulated else None,  # one thread, since the simulated link takes another
    )
    host = read_host(environment)
    streamed = replace(streams, spec=NO_DRAFTS)
    drafting = replace(streams, use_profile=use_profile)
    plain = resolve(streamed, host)
    serial = replace(plain.streaming, depth=0, prefetch=False, cache=False)
    return [
        ("plain", "copy, then compute", replace(plain, streaming=serial)),
        ("streamed", "copies under compute", plain),
        ("speculative", "and drafts by T(n)", resolve(drafting, host)),
    ]


def demo(environment: Environment) -> None:
    """Open the three sessions, and show them while they decode. The last frame stays."""
    with ExitStack() as closing:
        with report.steps("opening") as on_progress:
            opened = [open_way(closing, *way, on_progress) for way in ways(environment)]
        with report.live(_FRAMES_PER_S) as show:
            for _ in race(opened):
                show(frame(opened))
            show(frame(opened))


def open_way(
    closing: ExitStack, title: str, about: str, config: Config, on_progress: OnProgress = ignore
) -> DemoWay:
    """Open a column's session, which `closing` closes."""
    trace = Trace()
    config = replace(config, streaming=replace(config.streaming, trace=trace))
    session = closing.enter_context(Session(config, on_progress, keeps_hits=False))
    return DemoWay(title, about, session, trace)


def race(running: list[DemoWay]) -> Iterator[None]:
    """Run rounds until all ways have ended. The way that has used the least time goes next.

    Yields before each round.
    """
    for way in running:
        way.start()
    while waiting := [way for way in running if not way.done]:
        yield
        min(waiting, key=lambda way: way.own_s).step()
    for way in running:
        assert way.session is not None
        if (
            not way.session.target.start.choice.on_gpu
        ):  # not on a GPU, whose events time only submissions
            traced = trace_report(way.trace.events())
            way.hidden = traced.hidden_s / traced.copy_s if traced.copy_s else None
        if way is not running[0]:
            way.identical = way.text == running[0].text


def frame(running: Sequence[DemoWay]) -> report.Frame:
    """A function that draws the screen with the state at the time of its call."""
    assert running[0].session is not None
    heading = _heading(running[0].session.target)

    def draw(size: tuple[int, int]) -> RenderableType:
        costs, words = _costs(running[-1])
        return screen(heading, running, SAMPLING.n_predict or 0, costs, words, NEXT, size)

    return draw


def _heading(target: Engine) -> str:
    """A line for a screen of 80 columns on the device, the weights and the GPU memory."""
    where = (
        target.start.choice.description
        if target.start.choice.on_gpu
        else f"simulated GPU, {_LINK} link"
    )
    assert target.opened.plan is not None
    streamed, slots = (
        n / 2**20 for n in (target.opened.plan.streamed_bytes, target.opened.plan.slot_bytes)
    )
    return f"Demo pair, {where}: {streamed:.0f} MiB of weights, {slots:.0f} MiB of GPU memory"


def _costs(way: DemoWay) -> tuple[Sequence[float], str]:
    """Returns T(n) in seconds for n = 1, 2, ..., and a text on it and, at the end, on drafts."""
    assert way.session is not None
    assert way.session.speculation is not None
    step_s = way.session.speculation.costs.step_s
    words = ""
    if len(step_s) >= 8:
        times = step_s[7] / step_s[0]
        words = f": T(8) = {times:.1f} T(1)" if times >= _MORE else ": T(8) is about T(1)"
    if way.stats is None:
        return step_s, words
    if way.stats.acceptance_rate is None:
        return step_s, f"{words}; nothing was drafted"
    accepted, each = way.stats.acceptance_rate, way.stats.tokens_per_round
    return step_s, f"{words}; drafts {accepted:.0%} right, {each:.1f} a decode"
