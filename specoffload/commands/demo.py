"""`specoffload demo`: one prompt decoded three ways side by side, by the embedded pair.

Plain is one token per decode and every copy waited for; streamed hides copies under computation and
keeps what was used; speculative also drafts, priced by T(n). All layers stream through slots that
hold a part of them, on a GPU if there is one, else on `sim`. The three take turns, and the one
whose own clock is behind goes next: what is on the screen is what each had written by then.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from rich.console import RenderableType

from offload.device import has_gpu
from offload.plan.min_batch import MinBatch
from offload.trace import Trace
from offload.trace_report import report as trace_report
from specoffload import report
from specoffload.commands.demo_screen import Column, screen
from specoffload.config.environment import Environment, read_host
from specoffload.config.options import Options
from specoffload.config.resolution import Config, resolve
from specoffload.config.speculation import NO_DRAFTS
from specoffload.session.generation import GenerateOptions, Piece
from specoffload.session.progress import OnProgress, ignore
from specoffload.session.session import Session
from specoffload.session.statistics import GenerationStats

# The pair continues this without turning in circles, and comes to an end by itself: after 181
# tokens. It knows codecs well, since Python's library has over a hundred alike.
PROMPT = """\
import codecs

class Codec(codecs.Codec):

    def encode(self,input,errors='strict'):
        return codecs.charmap_encode(input,errors,encoding_table)

    def decode(self,input,errors='strict'):"""
SAMPLING = GenerateOptions(n_predict=200, temperature=0.0, repeat_penalty=1.3, repeat_last_n=64)

# Copies and the computation of a verification batch take about equally long over this link, and
# the slots hold half of what streams.
_LINK = "2 GB/s"
_DEVICE = f"sim:bw={_LINK.replace(' ', '')}"
_VRAM_BYTES = 8 << 20
NEXT = (
    "Go on:  specoffload run -hf user/repo:Q4_K_M   fetches a model and talks to it",
    "        specoffload plan MODEL.gguf   says what would lie where, and the speed",
    "        specoffload serve MODEL.gguf -md DRAFT.gguf   is an OpenAI server",
)
_FRAMES_PER_S = 12.0


@dataclass
class Way:
    """One column while it runs."""

    title: str
    about: str
    session: Session
    trace: Trace
    text: str = ""
    n_tokens: int = 0
    own_s: float = 0.0
    stats: GenerationStats | None = None
    pieces: Iterator[Piece] = field(default_factory=lambda: iter(()))

    def start(self) -> None:
        """The prompt is read, outside the clock."""
        self.session.forget()
        self.pieces = self.session.generate(PROMPT, SAMPLING)
        while not (piece := next(self.pieces)).tokens:
            pass
        self._take(piece)

    def step(self) -> None:
        """One round, on this column's clock."""
        began = time.perf_counter()
        piece = next(self.pieces)
        self.own_s += time.perf_counter() - began
        self._take(piece)

    def _take(self, piece: Piece) -> None:
        self.text += piece.text
        self.n_tokens += len(piece.tokens)
        self.stats = piece.stats

    @property
    def done(self) -> bool:
        return self.stats is not None


def ways(
    environment: Environment | None = None, *, use_profile: bool = True
) -> list[tuple[str, str, Config]]:
    """(title, what it does, configuration) of the three columns; without a profile drafts are
    fixed blocks."""
    simulated = not has_gpu()
    streams = Options(
        device=_DEVICE if simulated else "auto",
        min_batch=MinBatch(1, 1),
        vram_bytes=_VRAM_BYTES,
        n_gpu_layers=0,
        ctx_size=1024,
        threads=1 if simulated else None,  # the link is a thread as well
    )
    host = read_host(environment)
    streamed = replace(streams, spec=NO_DRAFTS)
    drafting = replace(streams, use_profile=use_profile)
    plain = resolve(streamed, host)
    serial = replace(plain.streaming, depth=0, prefetch=False)
    return [
        ("plain", "copy, then compute", replace(plain, streaming=serial)),
        ("streamed", "copies under compute", plain),
        ("speculative", "and drafts by T(n)", resolve(drafting, host)),
    ]


def demo(environment: Environment) -> None:
    """Open the three, run them on the screen, and leave the last frame there."""
    with ExitStack() as closing:
        with report.steps("opening") as on_progress:
            opened = [open_way(closing, *way, on_progress) for way in ways(environment)]
        with report.live(_FRAMES_PER_S) as show:
            for _ in race(opened):
                show(frame(opened))
            show(frame(opened))


def open_way(
    closing: ExitStack,
    title: str,
    about: str,
    config: Config,
    on_progress: OnProgress = ignore,
) -> Way:
    """A column, open until `closing` closes."""
    trace = Trace()
    config = replace(config, streaming=replace(config.streaming, trace=trace))
    return Way(
        title, about, closing.enter_context(Session(config, on_progress, keeps_hits=False)), trace
    )


def race(running: list[Way]) -> Iterator[None]:
    """Let the way whose own clock is behind do its next round, until all have ended."""
    for way in running:
        way.start()
    while waiting := [way for way in running if not way.done]:
        yield
        min(waiting, key=lambda way: way.own_s).step()


def frame(running: Sequence[Way]) -> report.Frame:
    """The screen as it is when drawn; figures of whole texts once all have ended."""
    heading = _heading(running[0])
    n_predict = SAMPLING.n_predict or 0

    def draw(size: tuple[int, int]) -> RenderableType:
        columns = [_column(way, running) for way in running]
        costs, words = _costs(running[-1])
        return screen(heading, columns, n_predict, costs, words, NEXT, size)

    return draw


def _heading(way: Way) -> str:
    """Where it runs and what streams, in 80 columns."""
    target = way.session.target
    where = target.choice.description if target.choice.on_gpu else f"simulated GPU, {_LINK} link"
    assert target.plan is not None
    streamed, slots = (n / 2**20 for n in (target.plan.streamed_bytes, target.plan.slot_bytes))
    return f"Demo pair, {where}: {streamed:.0f} MiB of weights, {slots:.0f} MiB of GPU memory"


def _costs(way: Way) -> tuple[Sequence[float], str]:
    """T(n), and what drafts came to with it, once that is known."""
    assert way.session.speculation is not None
    step_s = way.session.speculation.costs.step_s
    words = f": T(8) = {step_s[7] / step_s[0]:.1f} T(1)" if len(step_s) >= 8 else ""
    if way.stats is None:
        return step_s, words
    if way.stats.acceptance_rate is None:
        return step_s, f"{words}; nothing was drafted"
    accepted, each = way.stats.acceptance_rate, way.stats.tokens_per_round
    return step_s, f"{words}; drafts {accepted:.0%} right, {each:.1f} a decode"


def _column(way: Way, running: Sequence[Way]) -> Column:
    ended = all(other.done for other in running)
    hidden = None
    if ended and not way.session.target.choice.on_gpu:  # there an event is a submission only
        found = trace_report(way.trace.events())
        hidden = found.hidden_s / found.copy_s if found.copy_s else None
    first = running[0]
    return Column(
        title=way.title,
        about=way.about,
        text=PROMPT.rsplit("\n", 1)[-1] + way.text,
        n_tokens=way.n_tokens,
        seconds=way.own_s,
        done=way.done,
        hidden=hidden,
        identical=way.text == first.text if ended and way is not first else None,
    )
