"""Plans count the memory that streamed layers take beside slots, as runs on `sim` allocate it."""

from __future__ import annotations

from pathlib import Path

import pytest
from splits import all_host, sim_options, split_streaming
from test_architectures import sample

from lab.options import engine_options
from lab.synth import write_preset
from lab.synth.mixtures import write_mixture
from offload.engine import open_engine
from offload.plan.working import WorkingMemory, working_memory
from offload.stream.cpu_side import HostGraph
from offload.stream.executor import Executor

WIDE = {"n_embd": 512, "n_ff_exp": 256}
PRESETS = {
    "qwen3-30b-a3b": WIDE,
    "deepseek-v3": WIDE,  # MLA, with dense layers and shared experts
    "qwen3.5-35b-a3b": WIDE,  # recurrent
    "gpt-oss-20b": WIDE,  # biases
    "kimi-k3": {},  # nine results between the products
    "llama-4-scout": {"n_ff_exp": 256},  # rows that a later node overwrites
}


def of_run(executor: Executor) -> WorkingMemory:
    """The bytes that an executor has allocated."""
    split, passes = executor._split, executor._passes
    assert split is not None
    assert passes._cpu is not None
    small = [made for made in split._made if isinstance(made, HostGraph)]
    prompt = [*passes._cpu._graphs.values()]
    return WorkingMemory(
        passes.device_bytes,
        split.device_bytes + executor.ids.device_bytes,
        *(sum(g.results.size_bytes + g._memory.size_bytes for g in its) for its in (prompt, small)),
    )


def check(path: Path, n_ubatch: int) -> None:
    """Prompts first of a part of an ubatch, then of a whole one, then decodes."""
    options = sim_options(
        split_streaming(all_host, path, "half"), n_ubatch=n_ubatch, n_outputs=n_ubatch
    )
    with open_engine(path, engine_options(options, n_ctx=2 * n_ubatch)) as engine:
        for n in (n_ubatch // 3, n_ubatch, 1, 3, 64):
            engine.sequences.extend(0, [(13 * i + 5 * n) % engine.n_vocab for i in range(n)])
        planned = working_memory(engine.facts, n_ubatch, splits=True, on_gpu=False)
        (executor,) = engine.opened.weights.parts[0].device.executors.values()
        its = of_run(executor)
    print(planned, its)
    for name, most in (
        ("pass_bytes", 0.05),
        ("small_bytes", 0.05),
        ("host_prompt_bytes", 0.05),
        ("host_small_bytes", 0.05),
    ):
        assert getattr(its, name) == pytest.approx(getattr(planned, name), rel=most), name


@pytest.mark.parametrize("n_ubatch", [256, 512])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_run_allocates_what_the_plan_counts(preset: str, n_ubatch: int, models: Path) -> None:
    path = models / f"working-{preset}.gguf"
    if not path.exists():
        write_preset(preset, path, size="tiny", seed=1, **PRESETS[preset])
    check(path, n_ubatch)


# Llama 4's rows are overwritten in some sizes of a batch, and not in others.
@pytest.mark.parametrize("architecture", dict.fromkeys(("llama4", *sample())))
def test_every_mixtures_rows_are_counted(architecture: str, tmp_path: Path) -> None:
    check(write_mixture(architecture, tmp_path / "tiny.gguf"), 256)
