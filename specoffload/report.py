"""All output of the program for people: lines, tables, progress bars."""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console, JustifyMethod, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from offload.units import plural as plural
from specoffload.generation.logits_log import TRACE
from specoffload.generation.statistics import GenerationStats

_LONGEST_NUMBER = 40  # characters of a cell with numbers, such as "2,048 prompt tokens at once"
Frame = Callable[[tuple[int, int]], RenderableType]  # takes a terminal's (columns, rows)

_out = Console(highlight=False, emoji=False)  # else ":-1:" in a value becomes a picture
_err = Console(stderr=True, highlight=False, emoji=False)


def only_data(on: bool) -> None:
    """If `on`, write only values given to `data` to standard output (--json)."""
    _out.quiet = on


def data(value: object) -> None:
    """Write `value` as one line of JSON, if `only_data` is on."""
    if _out.quiet:
        sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()


def raw(written: str) -> None:
    """Write text unchanged to standard output, for formats of other tools."""
    sys.stdout.write(written)
    sys.stdout.flush()


def text(piece: str) -> None:
    """Write a piece of the answer to standard output and flush it."""
    if _out.quiet:
        return
    sys.stdout.write(piece)
    sys.stdout.flush()


_OURS = ("specoffload", "offload", "specdec", "numa")
_LIBRARY = "offload.llama"  # name of the logger of llama.cpp's lines
_library_level = 0


def is_of_output(error: OSError) -> bool:
    """True for errors of writing to standard output: a closed pipe or a full disk."""
    return error.filename is None and error.errno in (errno.EPIPE, errno.ENOSPC, errno.EIO)


def no_more_output(error: OSError) -> None:
    """Drop later output. Report that it cannot be written, unless its reader closed the pipe."""
    if error.errno != errno.EPIPE:
        _say(_err, f"specoffload: output cannot be written: {error.strerror}")
    # Otherwise the interpreter would try to flush the rest at its end, and report the error again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class UnwrittenFiles:
    """Records that an output file could not be written after the results were shown."""

    is_any = False


def be_verbose(*, library_level: int = 0) -> None:
    """Show log lines on standard error from now on.

    This project's lines are shown from INFO up. Lines of other packages are shown from WARNING up,
    each after the name of its package.
    With a `library_level`, which is one of llama.cpp's, all lines are shown: those of level DEBUG
    from 4 on, and those below it from 5 on.
    """
    global _library_level
    _library_level = library_level
    level = logging.INFO
    if library_level:
        level = TRACE if library_level >= TRACE else logging.DEBUG
    handler = WordsHandler(sys.stderr)
    handler.setFormatter(_WithPackage())
    handler.addFilter(lambda record: library_level > 0 or is_told(record))
    logging.basicConfig(level=level, handlers=[handler])


class WordsHandler(logging.StreamHandler[TextIO]):
    """Writes log lines. A terminal gets a long one as several, broken between words."""

    def format(self, record: logging.LogRecord) -> str:
        words = super().format(record)
        return broken(words, _err.width) if self.stream.isatty() else words


def wrap_warnings() -> None:
    """Break warnings between words on a terminal, also where no handler shows them."""
    logging.lastResort = _LastWords(logging.WARNING)


class _LastWords(logging.Handler):
    """Shows warnings on standard error while no other handler does."""

    def emit(self, record: logging.LogRecord) -> None:
        _say(_err, self.format(record))


def is_told(record: logging.LogRecord) -> bool:
    """True for a line that --verbose shows without the library's log."""
    return record.levelno >= (logging.INFO if _is_ours(record) else logging.WARNING)


def _is_ours(record: logging.LogRecord) -> bool:
    return record.name != _LIBRARY and record.name.partition(".")[0] in _OURS


class _WithPackage(logging.Formatter):
    """Puts the name of the package before log lines that are not this project's."""

    def format(self, record: logging.LogRecord) -> str:
        words = super().format(record)
        if _is_ours(record):
            return words
        name = "llama.cpp" if record.name == _LIBRARY else record.name.partition(".")[0]
        return "\n".join(f"{name}: {line}" for line in words.splitlines())


@contextmanager
def log_lines_held() -> Iterator[None]:
    """Show the log lines of the block at its end, so that none stands in the middle of an answer.

    Nothing is held if standard output is no terminal, because the lines are then read elsewhere.
    """
    if not _out.is_terminal:
        yield
        return
    from logging.handlers import BufferingHandler  # only answers need it, and no start

    root, held = logging.getLogger(), BufferingHandler(sys.maxsize)
    before, root.handlers = root.handlers, [held]
    try:
        yield
    finally:
        root.handlers = before
        for record in held.buffer:
            logging.getLogger(record.name).callHandlers(record)


def library_log_level() -> int:
    """The value of --verbosity if it shows llama.cpp's log too, else 0."""
    return _library_level


def is_verbose() -> bool:
    return logging.getLogger().isEnabledFor(logging.INFO)


# Bytes of C0 and C1 without line feed and tab, and halves of surrogate pairs. Names and messages
# may come from workers, hubs and model files, and terminals obey what control characters begin. A
# surrogate stands for a byte of a path that is not UTF-8, which no UTF-8 stream can write.
_CONTROLS = {
    code: "\ufffd"
    for code in (*range(32), *range(127, 160), *range(0xD800, 0xE000))
    if code not in (9, 10)
}


def plain(words: str) -> str:
    """Return `words` with control characters replaced, so that a terminal only shows them."""
    return words.translate(_CONTROLS)


def console() -> Console:
    """The rich console of standard output."""
    return _out


def _say(to: Console, words: str, style: str | None = None) -> None:
    """Write words for people. Only a terminal gets a long line as several, broken between words.

    A word that is longer than the terminal, such as a path, stays whole, so that it can be copied.
    """
    words = plain(words)
    shown = broken(words, to.width) if to.is_terminal else words
    to.print(shown, style=style, markup=False, soft_wrap=True)


def broken(words: str, width: int) -> str:
    """Return `words` in lines of up to `width` characters, which end between words."""
    lines = (
        textwrap.wrap(
            line, max(1, width), break_long_words=False, break_on_hyphens=False,
            replace_whitespace=False,
        )
        for line in words.split("\n")
    )  # fmt: skip
    return "\n".join("\n".join(parts) for parts in lines)


def line(words: str) -> None:
    """Write a line of results to standard output."""
    _say(_out, words)


def paragraph(words: str) -> None:
    """Write a sentence of results to standard output."""
    _say(_out, words)


def named(rows: Sequence[tuple[str, str]]) -> None:
    """Write rows of a name and a sentence. On a terminal, long sentences wrap beside the names."""
    if not _out.is_terminal:
        for name, words in rows:
            line(f"{name}: {words}")
        return
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    for name, words in rows:
        grid.add_row(plain(name), Text(plain(words)))
    _out.print(grid)


def entry(name: str, words: str) -> None:
    """Write `name` on a line of its own, and `words` indented below it."""
    line(name)
    indented(words)


def indented(words: str) -> None:
    """Write an indented paragraph of results to standard output."""
    if _out.is_terminal:
        _out.print(Padding(Text(plain(words)), (0, 0, 0, 4)))
    else:
        line(f"    {words}")


def note(words: str) -> None:
    """Write a line to standard error that says what the program does or leaves out."""
    _say(_err, words, "dim")


def detail(words: str) -> None:
    """Write a note if --verbose is on."""
    if is_verbose():
        note(words)


def error(words: str) -> None:
    _say(_err, f"specoffload: {words}", "red")


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write a table to standard output. The first column has names, and the others have numbers.

    A column with sentences begins at its left edge, since they may take several lines.
    """
    _say(_out, f"\n{title}", "bold")
    made = Table()
    for i, column in enumerate(columns):
        has_sentences = any(len(row[i]) > _LONGEST_NUMBER for row in rows)
        justify: JustifyMethod = "left" if i == 0 or has_sentences else "right"
        made.add_column(column, justify=justify, overflow="fold")
    for row in rows:
        made.add_row(*row)
    _out.print(made)


@contextmanager
def steps(what: str) -> Iterator[Callable[[str, float], None]]:
    """Show a progress bar on standard error. Call the yielded function with (step, fraction of 1).

    The bar disappears at the end. Nothing is shown if standard error is no terminal.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(),
               TimeElapsedColumn())  # fmt: skip
    with Progress(*columns, console=_err, transient=True, disable=not _err.is_terminal) as bar:
        task = bar.add_task(escape(plain(what)), total=1.0)
        known = ""

        def tell(step: str, done: float) -> None:
            nonlocal known
            if step != known:
                known = step
                bar.reset(task, description=escape(plain(f"{what}: {step}")))
            bar.update(task, completed=done)

        yield tell


@contextmanager
def progress(what: str) -> Iterator[Callable[[float], None]]:
    """Show a progress bar without steps. Call the yielded function with fractions of 1."""
    with steps(what) as tell:
        yield lambda done: tell("", done)


@contextmanager
def live(frames_per_s: float) -> Iterator[Callable[[Frame], None]]:
    """Open a screen on standard output. Call the yielded function with each frame to draw.

    The last frame stays. A pipe gets only the last frame.
    """
    last: list[Frame] = []
    due_s = 0.0
    with Live(console=_out, auto_refresh=False, vertical_overflow="crop") as screen:

        def show(frame: Frame) -> None:
            nonlocal due_s
            last[:] = [frame]
            if time.perf_counter() >= due_s and _out.is_terminal:
                screen.update(frame(_out.size), refresh=True)
                due_s = time.perf_counter() + 1 / frames_per_s

        yield show
        if last:
            screen.update(last[0](_out.size), refresh=True)


def bytes_text(n: float) -> str:
    """A size with its unit, such as 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    raise AssertionError("unreachable")


def summary(stats: GenerationStats) -> list[str]:
    """The two lines of statistics that are shown under an answer."""
    where = "read from the disk" if stats.n_from_disk else "cached"
    cached = f", {stats.n_cached_tokens} of them {where}" if stats.n_cached_tokens else ""
    speed = (
        f"{plural(stats.n_tokens, 'token')} in {stats.decode_s:.2f} s: "
        f"{stats.tokens_per_s:.1f} tokens/s · "
        f"prompt {plural(stats.n_prompt_tokens, 'token')}{cached} in {stats.prefill_s:.2f} s"
    )
    if stats.acceptance_rate is None:
        drafts = f"no drafts: {_no_drafts_reason(stats)}"
    else:
        drafts = (
            f"drafts {stats.acceptance_rate:.0%} accepted ({stats.n_accepted} of "
            f"{stats.n_drafted}{_trees(stats)}), "
            f"{stats.tokens_per_round:.2f} tokens per round"
        )
    streamed = (
        f" · copied {bytes_text(stats.streamed_bytes)} to the GPU" if stats.streamed_bytes else ""
    )
    return [speed, drafts + streamed, *_routing_lines(stats)]


def _routing_lines(stats: GenerationStats) -> list[str]:
    """What --route-cached changed; [] without it."""
    n = stats.n_choices
    if not n:
        return []
    return [
        f"routing kept {stats.n_choices_kept / n:.1%} of the router's choices: "
        f"{stats.n_choices_cached / n:.1%} were in slots, {stats.n_own_cached / n:.1%} without"
    ]


def _trees(stats: GenerationStats) -> str:
    """Number of trees, since most of a tree's tokens exclude each other."""
    return f", {plural(stats.n_trees, 'tree')}" if stats.n_trees else ""


def _no_drafts_reason(stats: GenerationStats) -> str:
    if stats.n_tokens < 2:
        return "the answer is too short"
    return next(filter(None, stats.last_reasons), "nothing drafts (--draft, --spec-type)")


def spec_lines(stats: GenerationStats) -> list[str]:
    """Lines on speculation for --verbose: acceptance by position, lengths, drafters, decisions."""
    lines = []
    if stats.acceptance_per_position:
        rates = " ".join(f"{rate:.2f}" for rate in stats.acceptance_per_position)
        lines.append(f"acceptance per position: {rates}")
    if stats.n_drafted:
        lengths = ", ".join(f"{n}: {rounds}" for n, rounds in stats.draft_lengths)
        lines.append(f"rounds per draft length: {lengths}")
        sources = ", ".join(f"{name}: {n}" for name, n in stats.accepted_by_source)
        lines.append(f"accepted tokens per drafter: {sources}")
    if stats.n_could_accept:
        lines.append(
            f"{plural(stats.n_could_accept, 'more token')} would have been accepted, but "
            f"{'was' if stats.n_could_accept == 1 else 'were'} not verified"
        )
    lines.append(
        f"{plural(stats.n_draft_steps, 'draft step')} took {stats.draft_s:.3f} s, "
        f"{plural(stats.n_rounds, 'verification')} {stats.verify_s:.3f} s, "
        f"rollbacks {stats.rollback_s:.3f} s"
    )
    if stats.n_checkpoints:
        saved = plural(stats.n_checkpoints, "checkpoint")
        lines.append(f"{saved} of the recurrent state, {stats.n_restores} restored")
    return lines + [
        f"{plural(rounds, 'round')}: {reason or 'nothing to decide'}"
        f"{' (the last)' * (kind != reason)}"
        for kind, rounds, reason in stats.reasons
    ]
