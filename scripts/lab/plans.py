"""Fills the tables of docs/plans.md and README's: plans of published shapes by device memory.

It uses headers and the machine model only. Nothing is measured and no model is opened.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from typer.testing import CliRunner

from lab import ROOT, filled
from lab.synth.published import PUBLISHED, published_facts
from offload.errors import DoesNotFit
from offload.model import ModelFacts
from offload.plan.context import ContextOptions
from offload.plan.placement import PlanRequest, make_plan
from offload.plan.sharing import UBATCHES
from offload.plan.weights import ring_slots
from specoffload.cli import app
from specoffload.commands.plan import rounded, speed_words
from specoffload.planning import Planned

GIB = 1 << 30
VRAM_GIB = (8, 12, 16, 24, 32, 48, 80)
CONTEXTS = (4096, 32768, 131072)
EXAMPLE = "DeepSeek-R1"
PAGE = ROOT / "docs" / "plans.md"
README = ROOT / "README.md"
README_CARD_GIB = 24  # card of README's table, whose plans have the first of CONTEXTS
README_TITLES = (
    "Qwen3-30B-A3B", "Qwen3.6-35B-A3B", "gpt-oss-120b", "Qwen3.8-Flash-Next", "Qwen3-235B-A22B",
    "DeepSeek-V4-Flash", "GLM-5.3-Flash", "GLM-4.6", "DeepSeek-R1 UD-Q2_K_XL", "MiniMax-M3",
    "DeepSeek-R1", "Kimi-K2", "Kimi-K3",
)  # fmt: skip
AS_PUBLISHED = ("gpt-oss-120b", "Kimi-K3")  # models whose experts have the published types

COLUMNS = (
    "VRAM", "tokens", "weights", "context", "ring", "cache", "streams", "ubatch", "min-batch",
    "prefill t/s", "decode t/s", "declined",
)  # fmt: skip


def page() -> str:
    """The text of docs/plans.md with a new example and new tables."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts = {"example": example(folder)}
        for title in PUBLISHED:
            facts = published_facts(title, folder)
            parts[title] = f"### {title}, {facts.size_bytes / GIB:.0f} GiB\n\n{table(facts)}"
    return filled(PAGE, parts)


def readme(plans_page: str) -> str:
    """The text of README.md with its table made from the text of docs/plans.md."""
    rows = "\n".join(_readme_row(title, plans_page) for title in README_TITLES)
    head = "| model, Q4_K_M unless said | file | RAM | prompts, tokens/s | answers, tokens/s |"
    return filled(README, {"plans": f"{head}\n|---|---|---|---|---|\n{rows}"})


def _readme_row(title: str, plans_page: str) -> str:
    size, table = plans_page.split(f"### {title}, ")[1].split("\n### ")[0].split(" GiB\n", 1)
    beginning = f"| {README_CARD_GIB} | {CONTEXTS[0] // 1024}k |"
    line = next(row for row in table.splitlines() if row.startswith(beginning))
    cells = dict(zip(COLUMNS, (cell.strip() for cell in line[1:-1].split("|")), strict=True))
    label = f"{title} (as published)" if title in AS_PUBLISHED else title
    if not cells["weights"]:
        return f"| {label} | {size} GiB | does not fit | | |"
    in_ram = round(int(size) - float(cells["weights"]))
    ram = "none" if cells["streams"] == "nothing" else f"{in_ram} GiB"
    return f"| {label} | {size} GiB | {ram} | {cells['prefill t/s']} | {cells['decode t/s']} |"


def example(folder: Path) -> str:
    """The output of `specoffload plan` for one model."""
    path = published_facts(EXAMPLE, folder).path
    result = CliRunner().invoke(app, ["plan", str(path), "--vram", "24GiB", "--ram", "512GiB"])
    assert result.exit_code == 0, result.output
    command = f"$ specoffload plan {EXAMPLE}.gguf --vram 24GiB --ram 512GiB"
    return f"```\n{command}\n{result.stdout.rstrip()}\n```"


def table(facts: ModelFacts) -> str:
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for gib in VRAM_GIB:
        for n_ctx in CONTEXTS:
            cells = [str(gib), f"{n_ctx // 1024}k"]
            try:
                plan = plan_of(facts, gib, n_ctx)
            except DoesNotFit as e:
                least = (
                    ""
                    if e.least_bytes is None
                    else f": {e.least_bytes / GIB:.1f} GiB are the least"
                )
                cells += [""] * (len(COLUMNS) - 3) + [f"does not fit{least}"]
            else:
                cells += row(plan)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plan_of(facts: ModelFacts, gib: float, n_ctx: int) -> Planned:
    """The plan that `serve` would make by default. Raises DoesNotFit."""
    request = PlanRequest(
        budget_bytes=int(gib * GIB),
        n_cpu_moe="fit",
        context=ContextOptions(n_ctx),
        most_ubatch=UBATCHES[-1],
        plan_for_splits=True,
    )
    return Planned(facts, make_plan(facts, request), request, "")


def row(planned: Planned) -> Iterator[str]:
    """The cells of a plan's row after its conditions (device memory and context)."""
    plan, work = planned.plan, planned.work
    yield f"{plan.resident_bytes / GIB:.1f}"
    yield f"{plan.reserve_bytes / GIB:.1f}"
    experts = [pool for pool in plan.layout.pools if pool.n_experts]
    n_ring = sum(ring_slots(pool) for pool in experts)
    n_slots = sum(pool.n_slots for pool in experts)
    has_ring = all(pool.n_slots >= ring_slots(pool) for pool in experts)
    if not experts:
        yield from ("", "")
    elif has_ring:
        yield str(n_ring)
        share = n_slots / sum(pool.n_pieces for pool in experts)
        yield f"{n_slots - n_ring} ({share:.0%})"
    else:
        yield from (f"none, {n_slots}", "")
    n_expert_layers = work.n_expert_layers - plan.n_resident if experts else 0
    streams = [
        f"{n} {kind}"
        for n, kind in ((n_expert_layers, "experts"), (plan.sharing.n_dense_streamed, "dense"))
        if n
    ]
    yield ", ".join(streams) or "nothing"
    yield str(plan.n_ubatch)
    yield "" if not plan.streamed else "never" if plan.min_batch is None else str(plan.min_batch)
    yield rounded(planned.expected["prefill_tps"])
    yield speed_words(planned, full_context=True)
    if plan.pass_experts:
        yield f"none, in passes over {plan.pass_experts} experts"
    elif plan.declined:
        yield f"over {min(pool.n_slots // pool.n_used for pool in experts)} tokens"
    else:
        yield ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    README.write_text(readme(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
