"""Experts of every mixture that the library knows stream, split and lie on several devices.

Every run computes a sample of the architectures; WHOLE_MATRIX=1 computes all of them.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from library_memory import allocated
from test_slots import FIVE, answer_of, open_slots

from lab.architectures import PAGE, checkpoints_of, results
from lab.synth import mtp, plan_shape, write
from lab.synth.mixtures import (
    ARCHITECTURES,
    MODELS,
    REFUSED,
    RELEASE,
    mixture_shape,
    write_mixture,
)
from offload.errors import BadModel
from offload.model_file import read_facts
from offload.times.context_memory import ContextOptions, context_memory
from pinned_release import pinned_version
from specoffload.generation.generation import GenerateOptions

IS_WHOLE = bool(os.environ.get("WHOLE_MATRIX"))
N_SAMPLED = 5
SEED = int(os.environ["SPECOFFLOAD_TESTS_SEED"])  # of this run: tests/conftest.py prints it
# Their answers are compared first: they have caches or recurrent layers unlike all others'.
MOST_UNLIKE = ("deepseek4", "glm5-next", "minimax-01", "qwen4exp")


def sample(n: int = N_SAMPLED) -> tuple[str, ...]:
    """Return the architectures of this run: those most unlike others, and some at random."""
    if IS_WHOLE:
        return ARCHITECTURES
    others = [name for name in ARCHITECTURES if name not in MOST_UNLIKE]
    chosen = np.random.default_rng(SEED).choice(others, n, replace=False)
    return (*MOST_UNLIKE, *map(str, chosen))


def test_the_list_is_of_the_pinned_release() -> None:
    assert pinned_version() == RELEASE, "scripts/lab/run architectures --source llama.cpp/src"
    assert not MODELS.keys() & REFUSED.keys()
    assert len(MODELS) + len(REFUSED) >= 59


@pytest.mark.parametrize("architecture", sample())
def test_all_ways_give_the_bits_of_the_cpu_alone(architecture: str, tmp_path: Path) -> None:
    path = write_mixture(architecture, tmp_path / "tiny.gguf")
    found = dict(results(path))
    assert found == dict.fromkeys(found, "same bits")
    assert len(found) == 7


@pytest.mark.parametrize("architecture", sample())
def test_planned_caches_are_those_of_the_library(architecture: str, tmp_path: Path) -> None:
    path = write_mixture(architecture, tmp_path / "tiny.gguf")
    facts = read_facts(path)
    for n_sequences, n_ctx in ((1, 4096), (8, 16384)):
        spec = ContextOptions(n_ctx, n_sequences=n_sequences, device_checkpoints=False)
        ours, theirs = context_memory(facts, spec), allocated(path, spec)
        assert ours.kv_bytes == pytest.approx(theirs.kv_bytes, rel=0.01, abs=1 << 14)
        assert ours.recurrent_bytes == pytest.approx(theirs.recurrent_bytes, rel=0.01, abs=1 << 14)
        assert ours.compute_bytes >= 0.75 * theirs.compute_bytes - (16 << 20)


# Most of the library's buffers that may be planned, where the tiny shape's indexer is wide for its
# size. docs/models.md states these margins.
LARGER = {"deepseek32": 5.5, "glm-dsa": 5.5, "dots3note": 1.8, "hy_v4": 1.8, "deepseek4": 1.4}


@pytest.mark.parametrize("architecture", sample())
@pytest.mark.parametrize("n_ctx", [16 << 10, 128 << 10, 1 << 20])
def test_planned_buffers_of_long_contexts_hold_the_librarys(
    architecture: str, n_ctx: int, tmp_path: Path
) -> None:
    path = write_mixture(architecture, tmp_path / "tiny.gguf")
    spec = ContextOptions(n_ctx, device_checkpoints=False)
    ours, theirs = context_memory(read_facts(path), spec), allocated(path, spec)
    assert ours.compute_bytes >= 0.75 * theirs.compute_bytes - (16 << 20)
    assert ours.compute_bytes <= LARGER.get(architecture, 1.15) * theirs.compute_bytes + (4 << 20)
    assert ours.kv_bytes == pytest.approx(theirs.kv_bytes, rel=0.01, abs=1 << 14)


@pytest.mark.parametrize("architecture", sample(3))
def test_drafts_change_no_greedy_text(architecture: str, tmp_path: Path) -> None:
    path = write_mixture(architecture, tmp_path / "tiny.gguf", quant="f32")
    prompt = [*range(3, 40), *range(3, 30)]
    answers = []
    for spec in ({"--spec-type": "none"}, {"--spec-type": "suffix", **FIVE}):
        with open_slots(path, spec, 1) as session:
            request = session.start(prompt, GenerateOptions(n_predict=16, ignore_eos=True))
            while not session.is_idle:
                session.step()
            answers.append(answer_of(request))
    assert answers[0].tokens == answers[1].tokens
    assert answers[1].stats.n_drafted > 0, "the prompt's end repeats its beginning"
    if read_facts(path).recurrent_layers:
        assert answers[1].stats.n_accepted < answers[1].stats.n_drafted, "some are undone"


def test_the_page_has_a_row_for_each_architecture_with_what_tests_hold_of_it(
    tmp_path: Path,
) -> None:
    part = PAGE.read_text("utf-8").split("<!-- mixtures -->")[1].split("<!-- end -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")]
            for line in part.splitlines() if line.startswith("| `")]  # fmt: skip
    assert [row[0].strip("`") for row in rows] == sorted([*MODELS, *REFUSED])
    assert {len(row) for row in rows} == {12}
    for name, models, *cells in ([row[0].strip("`"), *row[1:]] for row in rows):
        if name in REFUSED:
            assert [cell for cell in (models, *cells) if cell] == [REFUSED[name]]
            continue
        assert cells[:7] == ["yes"] * 7, "the bits of six ways, and greedy text with drafts"
        assert cells[7] == ("yes" if name in mtp.ARCHITECTURES else "none")
        assert cells[9] == "yes"
    checkpoints = {row[0].strip("`"): row[10] for row in rows}
    for name in sample(3):
        assert checkpoints[name] == checkpoints_of(write_mixture(name, tmp_path / f"{name}.gguf"))


# Architectures that cannot be built here, and one whose name is as long and can be.
LOOKALIKES = {
    "graniteswitch": "granitehybrid",
    "llama-embed": "granite_swa",
    "nomic-bert-moe": "nemotron_h_moe",
}


@pytest.mark.parametrize("architecture", ["dflash", *LOOKALIKES])
def test_other_mixtures_are_refused_in_a_sentence(architecture: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    if base := LOOKALIKES.get(architecture):
        content = write_mixture(base, path).read_bytes()
        path.write_bytes(content.replace(base.encode(), architecture.encode()))
    else:
        shape = mixture_shape("qwen3moe")
        metadata = {**shape.metadata, "target_layers": (1, 2), "block_size": 4}
        shape = replace(shape, architecture=architecture, name=architecture, metadata=metadata)
        write(plan_shape(shape), path)
    with pytest.raises(BadModel, match=f"{architecture} .*: (open its target|use llama-server)"):
        open_slots(path, {"--spec-type": "none"}, 1)
    assert REFUSED[architecture].endswith("refused when it is opened")


@pytest.mark.parametrize("architecture", ["llada-moe", "rnd1"])
def test_models_that_write_by_diffusion_are_refused(architecture: str, tmp_path: Path) -> None:
    shape = mixture_shape("qwen3moe")
    shape = replace(shape, architecture=architecture, name=architecture)
    path = write(plan_shape(shape), tmp_path / "tiny.gguf")
    with pytest.raises(BadModel, match="writes by diffusion"):
        open_slots(path, {"--spec-type": "none"}, 1)
