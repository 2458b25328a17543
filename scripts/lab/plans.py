"""Makes docs/plans.md: the plan of every published shape at every device memory and context.

It uses headers and the machine model only. Nothing is measured and no model is opened.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from typer.testing import CliRunner

from lab import ROOT
from lab.synth.published import PUBLISHED, published_facts
from offload.errors import DoesNotFit
from offload.model import ModelFacts
from offload.plan.context import ContextSpec
from offload.plan.machine import TYPICAL, model_work
from offload.plan.placement import Plan, make_plan, workload_of
from offload.plan.sharing import SMALL_UBATCHES, UBATCHES, ring_slots
from specoffload.cli import app
from specoffload.commands.plan import expected_tps, rests_on_guess, rounded
from specoffload.config.hardware import PRESETS
from specoffload.kept import LEAST_MIX_TOKENS, MIX_HALF_LIFE_TOKENS

GIB = 1 << 30
VRAM_GIB = (8, 12, 16, 24, 48, 80)
CONTEXTS = (4096, 32768, 131072)
EXAMPLE = "DeepSeek-R1"

HEAD = f"""# Plans: what lives where

`specoffload plan MODEL.gguf` says what would live where. It reads the file's header alone: no weight is read and no device is
opened. It takes the flags of `serve` that matter (`--vram`, `--ctx-size`, `--ubatch-size`, `--cache-type-k`, `--n-cpu-moe`, `--draft`
…).

- `--hardware` plans for a machine that you do not have, and also prints the expected time of a decode of n tokens in each way: by the
  CPU in place, streamed, split. `--vram`, `--link` and `--ram` replace single values.
- Without `--vram` the plan is for what the GPU has free, or for 24 GiB if there is no GPU.
- Without a size in `--ram` it is for the host memory that is free here.
- A plan that streams more than host memory holds is made only if no other is possible. It then says that `serve` refuses it.

```
$ specoffload plan {EXAMPLE}.gguf --vram 24GiB --ram 512GiB
%s
```

`--hardware` takes a name ({", ".join(f"`{name}`" for name in PRESETS)}) or a file, in
JSON or with the ending `.toml` in TOML:

```toml
vram = "24GiB"         # of the GPU; the plan leaves 1 GiB of it free
ram = "120GiB"         # free RAM
link_rate = "25GB/s"   # from RAM to the GPU
ram_rate = "70GB/s"    # all cores together
vram_rate = "1008GB/s"
cpu_tflops = 0.8       # of products of quantised weights with many rows; may be left out, as the next
gpu_tflops = 80
```

`--json` prints one object:

| key | meaning |
|---|---|
| `resident_bytes`, `streamed_bytes` | weights on the device, and weights that stream from host memory |
| `reserve_bytes`, `reserve` | what the context and a draft take: their sum, and its parts |
| `slot_bytes`, `slots` | device memory of the slots; for each kind of weight `n_slots`, `n_ring`, `n_experts` of a layer (0: dense weights), `stride_bytes` |
| `streamed_layers` | layers whose experts stream, and layers whose dense weights stream |
| `ubatch` | tokens computed at once in prefill |
| `min_batch` | number of tokens from which streaming is expected to be faster than the CPU; null: never |
| `chunk_tokens` | larger batches are computed in chunks of that many tokens, whose experts fit the slots; 0: no chunks needed |
| `declined` | why some batches go to the CPU although the device could compute them; empty if none do |
| `reasons` | a sentence for each choice |
| `expected` | tokens/s that the machine model expects of prefill and of decoding token by token. Layers are split if `--hybrid` allows it and it is faster |
| `hits` | null if no layer may be split. Otherwise `rate`, the share of a decode's experts that are expected in slots; `source`, counted or guess; `n_tokens` and `counted_on` of what was counted |
| `host` | null with `--mmap`. Otherwise `available_bytes` for streamed weights, `limited_by` what, and `fits`: false if `serve` would refuse the plan |
| `machine`, `hardware` | the rates for which the plan was made, and the value of `--hardware` |
| `ways` | seconds that the machine model expects of a decode, by way and number of tokens |
| `model`, `architecture`, `vram_bytes`, `ctx_size` | what was asked |

## How device memory is shared

A plan chooses the size of a ubatch, how many layers' dense weights stream, how many layers' experts are resident, and how many slots
there are. The machine model estimates the time of every such choice, for a prompt of 8,192 tokens (or as many as the context holds) and
512 generated ones. The fastest choice is taken. More device memory or a shorter context never makes the expected time longer.

`--plan-for PROMPT:GENERATED` sets another mix of prompt tokens and generated ones, for example `4000:500`, whatever the context holds. More
weight on generated tokens never makes decoding slower. `--plan-for decode` means 0:1: no ring is kept, and a ubatch may be as small as
{SMALL_UBATCHES[0]} tokens, which makes prompts slow. A few prompt tokens, as in `1:20`, keep them bearable.

Without the flag the mix is that of earlier runs of the model, rounded to a power of two, once they have had {LEAST_MIX_TOKENS:,} tokens.
Prompt tokens that were found in the cache do not count. The mix is stored with the hits, in the model's kept file, and weighs half after
{MIX_HALF_LIFE_TOKENS:,.0f} more tokens. A line says what a plan was made for if it is not the usual mix.

- The *ring* has slots for all experts of a layer and an eighth of the next. With it, prompts run on the device while the link
  copies.
- The other slots are the *cache*.
- If a ring is not worth its memory, large batches are computed in chunks of tokens, or by the CPU (`declined`).

Slots that serve split layers can get room that resident layers would have otherwise ([hybrid.md](hybrid.md)). `--hybrid on` always
considers this. `auto` does so if hits were counted for the model and at least 5 %% less time is expected. Once `auto` has timed decodes
with both plans, these times decide. A line says which hits are expected, and whether they are a guess or counted.

## The published models

Made by `scripts/lab/run plans`, with the machine model of `offload/plan/machine.py`: {TYPICAL.link_bytes_per_s / 1e9:g} GB/s of link, {TYPICAL.ram_bytes_per_s / 1e9:g} GB/s of RAM, {TYPICAL.vram_bytes_per_s / 1e9:g} GB/s of
VRAM, {TYPICAL.cpu_flops / 1e12:g} TFLOPS of the CPU and {TYPICAL.gpu_flops / 1e12:g} of the GPU. **No speed is measured.**

| column | meaning |
|---|---|
| VRAM, tokens | GiB of device memory, and the context |
| weights | GiB of resident weights |
| context | GiB of KV cache, states and buffers |
| ring, cache | slots, each for one expert of one layer; in brackets the share of all streamed experts that have a slot |
| streams | number of layers whose experts stream, and of layers whose dense weights stream |
| min-batch | number of tokens from which streaming is expected to be faster; it is measured at a first start |
| prefill t/s | expected for a prompt of 8,192 tokens, or as many as the context holds |
| decode t/s | expected of decoding without drafts; one digit if it depends on guessed hits |
| declined | batches that go to the CPU, because slots are few and the CPU is faster than chunks; empty: none |
"""  # noqa: E501

COLUMNS = (
    "VRAM", "tokens", "weights", "context", "ring", "cache", "streams", "ubatch", "min-batch",
    "prefill t/s", "decode t/s", "declined",
)  # fmt: skip


def page() -> str:
    """The whole page."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts = [HEAD % example(folder)]
        for title in PUBLISHED:
            facts = published_facts(title, folder)
            parts.append(f"### {title}, {facts.size_bytes / GIB:.0f} GiB\n\n{table(facts)}\n")
    return "\n".join(parts)


def example(folder: Path) -> str:
    """The output of `specoffload plan` for one model."""
    path = published_facts(EXAMPLE, folder).path
    result = CliRunner().invoke(app, ["plan", str(path), "--vram", "24GiB", "--ram", "512GiB"])
    assert result.exit_code == 0, result.output
    return result.stdout.rstrip()


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
                cells += row(facts, plan, n_ctx)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plan_of(facts: ModelFacts, gib: float, n_ctx: int) -> Plan:
    """The plan that `serve` would make by default. Raises DoesNotFit."""
    return make_plan(
        facts,
        budget_bytes=int(gib * GIB),
        n_cpu_moe="fit",
        context=ContextSpec(n_ctx),
        most_ubatch=UBATCHES[-1],
    )


def row(facts: ModelFacts, plan: Plan, n_ctx: int) -> Iterator[str]:
    """The cells of a plan's row, after those with its conditions."""
    work = model_work(facts)
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
    speeds = expected_tps(plan, work, TYPICAL, workload_of(ContextSpec(n_ctx)).n_prompt)
    yield rounded(speeds["prefill_tps"])
    yield rounded(speeds["decode_tps"], 1 if rests_on_guess(plan, work, TYPICAL) else 2)
    if plan.chunk_tokens:
        yield f"none, in chunks of {plan.chunk_tokens}"
    elif plan.declined:
        yield f"over {min(pool.n_slots // pool.n_used for pool in experts)} tokens"
    else:
        yield ""


if __name__ == "__main__":
    (ROOT / "docs" / "plans.md").write_text(page(), encoding="utf-8")
