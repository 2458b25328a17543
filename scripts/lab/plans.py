"""Fills the tables of docs/plans.md and README's: plans of published shapes by card and RAM.

It uses headers and the machine model only. Nothing is measured and no model is opened.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from typer.testing import CliRunner

from lab import ROOT
from lab.synth.published import PUBLISHED, published_facts
from lab.tables import filled, page_of
from offload.errors import DoesNotFit
from offload.model import ModelFacts
from offload.plan.cache_place import full_context_s
from offload.plan.context_choice import RequestSeconds, choose_context
from offload.plan.decision import decide
from offload.plan.devices import DevicePlan, Division
from offload.plan.found import DeviceRoom, Found, FoundDevice, Kind
from offload.plan.layout import Layout
from offload.plan.placement import MARGIN_BYTES, PlanRequest, make_plan
from offload.plan.ranges import LayerRange
from offload.plan.sharing import UBATCHES
from offload.plan.wanted import Wanted
from offload.store.store import HostRoom
from offload.times.context_memory import ContextOptions, context_memory
from offload.times.min_batch import MinBatch
from offload.units import size_words
from specoffload.cli import app
from specoffload.opening.context_size import request_seconds
from specoffload.opening.planning import Planned
from specoffload.opening.speeds import rounded, speed_range, speed_words

GIB = 1 << 30
VRAM_GIB = (8, 12, 16, 24, 32, 48, 80)
RAM_GIB = (64, 128, 256, 512)
SYSTEM_GIB = 8  # RAM that the system and the program take, as in the presets of --hardware
EXAMPLE = "DeepSeek-R1"
PAGE = page_of("plans")
README = ROOT / "README.md"
README_CARD_GIB = 24  # card of README's table, whose machine has RAM for the whole model
README_TITLES = (
    "Qwen3-30B-A3B", "Qwen3.6-35B-A3B", "gpt-oss-120b", "Qwen3.8-Flash-Next", "Qwen3-235B-A22B",
    "DeepSeek-V4-Flash", "GLM-5.3-Flash", "GLM-4.6", "DeepSeek-R1 UD-Q2_K_XL", "MiniMax-M3",
    "DeepSeek-R1", "Kimi-K2", "Kimi-K3",
)  # fmt: skip
AS_PUBLISHED = ("gpt-oss-120b", "Kimi-K3")  # models whose experts have the published types
MORE, ENOUGH = "or more", "enough"  # words on RAM that holds all that the card does not

CACHE_CARD_GIB, CACHE_RAM_GIB, CACHE_TOKENS = 12, 512, 131072  # of the table of caches in RAM
CACHE_TITLES = (
    "Qwen3-235B-A22B", "GLM-4.6", "MiniMax-M2", "Kimi-K3", "DeepSeek-R1", "DeepSeek-V3.2",
    "gpt-oss-120b",
)  # fmt: skip
CACHE_COLUMNS = (
    "model", "KV cache", "on the GPU", "in RAM", "chosen", "the GPU computes attention of",
)  # fmt: skip

COLUMNS = (
    "card", "RAM", "context", "on the card", "in RAM", "on the disk", "prompts", "answers",
    "at the context's end", "llama.cpp's prompts", "its answers",
)  # fmt: skip


def page() -> str:
    """The text of docs/plans.md with a new example and new tables."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts = {"example": example(folder), "caches": caches(folder)}
        for title in PUBLISHED:
            facts = published_facts(title, folder)
            parts[title] = f"### {title}, {facts.size_bytes / GIB:.0f} GiB\n\n{table(facts)}"
    return filled(PAGE, parts)


def readme(plans_page: str) -> str:
    """The text of README.md with its table made from the text of docs/plans.md."""
    rows = "\n".join(_readme_row(title, plans_page) for title in README_TITLES)
    heads = ("model, Q4_K_M unless said", "file", "RAM", "context", "prompts", "answers")
    head = f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}"
    return filled(README, {"plans": f"{head}\n{rows}"})


def _readme_row(title: str, plans_page: str) -> str:
    size, table = plans_page.split(f"### {title}, ")[1].split("\n### ")[0].split(" GiB\n", 1)
    rows = [line for line in table.splitlines() if line.startswith(f"| {README_CARD_GIB} |")]
    cells = dict(zip(COLUMNS, (cell.strip() for cell in rows[-1][1:-1].split("|")), strict=True))
    label = f"{title} (as published)" if title in AS_PUBLISHED else title
    in_ram = f"{cells['in RAM']} GiB" if cells["in RAM"] else "none"
    keys = ("context", "prompts", "answers")
    return f"| {label} | {size} GiB | {in_ram} | {' | '.join(cells[key] for key in keys)} |"


def caches(folder: Path) -> str:
    """The table of KV caches on a small card and in RAM."""
    lines = [f"| {' | '.join(CACHE_COLUMNS)} |", "|" + "---|" * len(CACHE_COLUMNS)]
    for title in CACHE_TITLES:
        facts = published_facts(title, folder)
        on_gpu, in_ram, chosen = (
            _with_cache(facts, kv_offload=kv_offload, chooses=chooses)
            for kv_offload, chooses in ((True, False), (False, False), (True, True))
        )
        assert in_ram is not None
        assert chosen is not None
        assert in_ram.plan is not None
        size = size_words(context_memory(facts, in_ram.context).host_kv_bytes)
        batch = in_ram.plan.attention_batch
        reader = "no batch" if batch is None else "all batches"
        reader = f"{batch:,} tokens or more" if batch is not None and batch > 1 else reader
        cells = (title, size, _end_words(on_gpu), _end_words(in_ram))
        place = "on the GPU" if chosen.context.kv_offload else "in RAM"
        lines.append(f"| {' | '.join((*cells, place, reader))} |")
    return "\n".join(lines)


def _end_words(layout: Layout | None) -> str:
    if layout is None:
        return "does not fit"
    return f"{full_context_s(layout.division, layout.context):,.0f} s"


def _with_cache(facts: ModelFacts, *, kv_offload: bool, chooses: bool) -> Layout | None:
    """The layout of a start with a cache in this place, None if it does not fit."""
    card = FoundDevice("GPU0", Kind.GPU, CACHE_CARD_GIB * GIB)
    wanted = Wanted(
        ContextOptions(CACHE_TOKENS, kv_offload=kv_offload),
        n_cpu_moe="fit", plan_for_splits=True, hybrid=True,
        most_ubatch=UBATCHES[-1], chooses_cache=chooses,
    )  # fmt: skip
    found = Found((card,), ram_bytes=(CACHE_RAM_GIB - SYSTEM_GIB) * GIB)
    try:
        return decide(facts, found, wanted)
    except DoesNotFit:
        return None


def example(folder: Path) -> str:
    """The output of `specoffload plan` for one model."""
    path = published_facts(EXAMPLE, folder).path
    result = CliRunner().invoke(app, ["plan", str(path), "--vram", "24GiB", "--ram", "512GiB"])
    assert result.exit_code == 0, result.output
    command = f"$ specoffload plan {EXAMPLE}.gguf --vram 24GiB --ram 512GiB"
    printed = result.stdout.replace(str(path), path.name).rstrip()
    return f"```\n{command}\n{printed}\n```"


def table(facts: ModelFacts) -> str:
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for gib in VRAM_GIB:
        for cells in rows_of(facts, gib):
            lines.append(f"| {gib} | {' | '.join(cells)} |")
    return "\n".join(lines)


def rows_of(facts: ModelFacts, card_gib: int) -> Iterator[list[str]]:
    """The cells after the card's, a row for each size of RAM until all weights fit."""
    for ram_gib in RAM_GIB:
        try:
            planned = plan_of(facts, card_gib, ram_gib)
        except DoesNotFit as e:
            least = (
                "" if e.least_bytes is None else f": {e.least_bytes / GIB:.1f} GiB are the least"
            )
            yield ["", f"does not fit{least}", *[""] * (len(COLUMNS) - 3)]
            return
        if not planned.plan.streamed:
            yield ["any", *row(planned)]
            return
        if planned.disk is None:
            yield [f"{ram_gib} {MORE}", *row(planned)]
            return
        yield [str(ram_gib), *row(planned)]
    yield [ENOUGH, *row(plan_of(facts, card_gib, None))]


def plan_of(
    facts: ModelFacts, card_gib: float, ram_gib: int | None, n_ctx: int | None = None
) -> Planned:
    """The plan that `serve` would make by default, with its context. Raises DoesNotFit.

    Its ubatches have at most 8,192 tokens, although a long context may get larger ones.
    `ram_gib` is the machine's RAM; None: enough for the whole model. 1 GiB of the card stays free.
    `n_ctx`: tokens of context; None: those that the plan chooses.
    """
    ram_bytes = 1 << 50 if ram_gib is None else (ram_gib - SYSTEM_GIB) * GIB
    found: dict[int, Planned] = {}

    def planned(n_ctx: int) -> Planned:
        if n_ctx not in found:
            request = PlanRequest(
                budget_bytes=int(card_gib * GIB) - MARGIN_BYTES,
                n_cpu_moe="fit",
                context=ContextOptions(n_ctx),
                most_ubatch=UBATCHES[-1],
                plan_for_splits=True,
                host_bytes=ram_bytes,
            )
            found[n_ctx] = on_one_gpu(facts, request, HostRoom(ram_bytes, ""))
        return found[n_ctx]

    def request_s(n_ctx: int) -> RequestSeconds | None:
        try:
            return request_seconds(planned(n_ctx))
        except DoesNotFit:
            return None

    if n_ctx is None:
        n_ctx = choose_context(facts.n_ctx_train, request_s, for_agents=True).n_ctx
    return planned(n_ctx)


def on_one_gpu(facts: ModelFacts, request: PlanRequest, room: HostRoom | None = None) -> Planned:
    """The plan of a GPU that computes the whole model. `request` has a context.

    Raises DoesNotFit.
    """
    assert request.context is not None
    gpu = DeviceRoom(FoundDevice("GPU", Kind.GPU, request.budget_bytes or 0))
    layers = LayerRange(0, facts.n_layers + 1)
    its = DevicePlan(gpu, layers, make_plan(facts, request), facts, request)
    layout = Layout(facts, Division((its,)), request.context, MinBatch(1, 1))
    return Planned(layout, "", room=room)


def row(planned: Planned) -> Iterator[str]:
    """The cells of a plan's row after card and RAM. Sizes are GiB of weights, speeds tokens/s."""
    plan, llama, on_disk = planned.plan, planned.llama, planned.missing_bytes
    in_ram = plan.streamed_bytes - on_disk
    yield f"{planned.context.n_ctx / 1024:g}k"
    yield f"{plan.resident_bytes / GIB:.1f}"
    yield f"{in_ram / GIB:.0f}" if in_ram else ""
    yield f"{on_disk / GIB:.0f}" if on_disk else ""
    yield rounded(planned.expected["prefill_tps"])
    yield speed_words(planned)
    yield speed_words(planned, full_context=True)
    if llama is None:
        yield from ("", "")
        return
    yield rounded(llama.prefill_tps)
    in_cache = llama.cache_decode_tps or (0.0, 0.0)
    least_tps, most_tps = (max(llama.decode_tps, tps) for tps in in_cache)
    yield speed_range(least_tps, most_tps)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    README.write_text(readme(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
