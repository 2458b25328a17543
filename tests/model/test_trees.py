"""Trees of drafted tokens in libllama's KV cache, and the texts that they write."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from lossless_parts import (
    BATCH_NOISE,
    EXACT,
    GREEDY,
    SAMPLED,
    Answer,
    Judge,
    generate,
    judged,
    open_session,
)

from lab.options import engine_options
from lab.synth import write_preset
from lab.synth.mtp import write_mtp
from offload.engine import Engine, EngineOptions, open_engine
from offload.errors import BadRequest, DoesNotFit
from specoffload.config.resolution import demo_prompts
from specoffload.report import summary

PROMPT, TOKENS, PARENTS = [1, 2, 3], [10, 20, 30, 40, 50, 60], [-1, 0, 0, 1, -1, 1]


def options(device: str, **changes: object) -> EngineOptions:
    return engine_options(device=device, n_ctx=256, **EXACT, **changes)  # type: ignore[arg-type]


def by_branch(engine: Engine) -> list[np.ndarray]:
    """The logits of each node, each computed as a text of its own."""
    found = []
    for node in range(len(TOKENS)):
        branch, at = [], node
        while at >= 0:
            branch.append(TOKENS[at])
            at = PARENTS[at]
        engine.sequences.rewind(0, 0)
        found.append(engine.sequences.extend(0, PROMPT + branch[::-1])[-1])
    engine.sequences.rewind(0, 0)
    return found


@pytest.mark.parametrize("preset", ["mistral-large", "qwen3-30b-a3b", "deepseek-v3"])
@pytest.mark.parametrize("n_levels", [1, 3])
def test_a_row_has_the_logits_of_its_branch_and_a_kept_path_goes_on(
    models: Path, preset: str, n_levels: int
) -> None:
    path = write_preset(preset, models / f"{preset}-exact.gguf", size="tiny", seed=4, quant="f32")
    with open_engine(path, options("cpu")) as engine:
        expected = by_branch(engine)
        engine.sequences.extend(0, [*PROMPT, 10, 20, 40])
        after = engine.sequences.extend(0, [99])
    ends = {1: [6], 3: [1, 3, 6]}[n_levels]
    with open_engine(path, options("sim", n_tree_leaves=6)) as engine:
        sequences = engine.sequences
        for _ in range(3):
            sequences.rewind(0, 0)
            sequences.extend(0, PROMPT)
            rows, at = [], 0
            for end in ends:
                rows.append(sequences.extend_tree(0, TOKENS[at:end], PARENTS[at:end]))
                at = end
            np.testing.assert_allclose(np.concatenate(rows), np.stack(expected), atol=BATCH_NOISE)
            sequences.keep_path(0, [0, 1, 3])
            assert sequences.length(0) == 6
            np.testing.assert_allclose(sequences.extend(0, [99]), after, atol=BATCH_NOISE)
            sequences.rewind(0, 3)
            sequences.extend_tree(0, TOKENS, PARENTS)
            sequences.keep_path(0, [])
            assert sequences.length(0) == 3


def test_a_tree_that_cannot_be_evaluated_leaves_the_sequence(models: Path) -> None:
    path = write_preset("mistral-large", models / "few-leaves.gguf", size="tiny", seed=4)
    with open_engine(path, options("cpu", n_tree_leaves=1)) as engine:
        sequences = engine.sequences
        sequences.extend(0, [1, 2])
        before = sequences.extend(0, [3])
        sequences.rewind(0, 2)
        with pytest.raises(DoesNotFit, match="more than 1 leaves"):
            sequences.extend_tree(0, [1, 2], [-1, -1])
        with pytest.raises(BadRequest, match="no tree"):
            sequences.keep_path(0, [0])
        sequences.extend_tree(0, [3], [-1])
        with pytest.raises(BadRequest, match="not in the vocabulary"):
            sequences.extend_tree(0, [-5], [0])
        assert sequences.length(0) == 2
        assert np.array_equal(sequences.extend(0, [3]), before)


@pytest.mark.parametrize(
    ("preset", "swa_full", "can"),
    [
        ("gpt-oss-20b", False, False),
        ("gpt-oss-20b", True, True),
        ("qwen3-next-80b-a3b", False, False),
    ],
)
def test_only_memory_that_keeps_every_cell_evaluates_trees(
    models: Path, preset: str, swa_full: bool, can: bool
) -> None:
    path = write_preset(preset, models / f"{preset}-tree.gguf", n_layer=4, seed=4)
    with open_engine(path, options("cpu", n_tree_leaves=4, swa_full=swa_full)) as engine:
        engine.sequences.extend(0, [1, 2])
        assert (engine.sequences.n_tree_leaves == 4) == can
        if not can:
            with pytest.raises(BadRequest, match="evaluates no trees"):
                engine.sequences.extend_tree(0, [3], [-1])


def test_own_layers_draft_after_a_tree_as_after_its_text(models: Path) -> None:
    """The rows of the kept path are those of the same tokens decoded one after the other."""
    path = write_mtp(models, "glm4moe")
    with open_engine(path, options("cpu", n_tree_leaves=6, mtp=True)) as engine:
        sequences, layers = engine.sequences, engine.opened.row_draft
        assert layers is not None
        text, drafts = [*PROMPT, 10, 20, 40], []
        for kept in ([], [0, 1, 3]):
            sequences.rewind(0, 0)
            sequences.extend(0, PROMPT if kept else text)
            if kept:
                sequences.extend_tree(0, TOKENS[:2], PARENTS[:2])
                sequences.extend_tree(0, TOKENS[2:], PARENTS[2:])
                sequences.keep_path(0, kept)
            n_unknown = layers.n_unknown_rows
            drafts.append(layers.extend(0, layers.tail(0, [*text, 7])))
            assert layers.n_unknown_rows == n_unknown
        np.testing.assert_allclose(drafts[1], drafts[0], atol=BATCH_NOISE)
        sequences.extend_tree(0, TOKENS, PARENTS)
        sequences.keep_path(0, ())
        layers.tail(0, [*text, 7])
        np.testing.assert_allclose(layers.extend(0, [7]), drafts[0], atol=BATCH_NOISE)


# -- texts -----------------------------------------------------------------------------------------

TREES: dict[str, object] = {"--spec-type": "draft"}


def all_prompts() -> list[str]:
    once = [*demo_prompts("code"), *demo_prompts("prose")]
    return [*once[:30], *(2 * text for text in once[:10])]


@pytest.mark.usefixtures("batches_are_cheap")
@pytest.mark.parametrize(
    ("place", "texts"),
    [("resident", slice(0, 40)), ("streamed", slice(0, 40, 5)), ("split", slice(2, 40, 5))],
)
def test_trees_write_the_targets_own_texts(
    exact: Path, judge: Judge, place: str, texts: slice
) -> None:
    """40 prompts, each greedily and sampled with penalties."""
    prompts = all_prompts()
    assert len(prompts) == 40
    with open_session(exact, TREES, place) as opened:
        runs = judged(opened, judge, prompts[texts], requests=(GREEDY, SAMPLED))
        counts = opened.counters()
    n_trees = sum(run.stats.n_trees for run in runs)
    assert counts["tree_rounds"] == n_trees > len(runs)
    assert 0 < counts["tree_saved"] < counts["tree_accepted"] < counts["tree_nodes"]
    assert sum(run.n_rejected for run in runs) > 0


@pytest.mark.usefixtures("batches_are_cheap")
def test_the_default_drafters_write_trees(exact: Path, judge: Judge) -> None:
    """The text, the target's own layers and the draft model, which alone drafts trees."""
    with open_session(exact, {}) as opened:
        judged(opened, judge, all_prompts()[:4], requests=(GREEDY, SAMPLED))
        counts = opened.counters()
        assert opened.target.opened.row_draft is not None
    assert counts["tree_rounds"] > 0


@pytest.mark.usefixtures("batches_are_cheap")
def test_a_second_request_makes_trees_chains_until_it_ends(exact: Path, judge: Judge) -> None:
    with open_session(exact, TREES, parallel=2, ctx_size=2048) as opened:
        prompts = [
            opened.tokenize(text, add_special=True, parse_special=True)
            for text in demo_prompts("code")[:2]
        ]
        rounds: list[tuple[bool, bool]] = []
        first = opened.start(prompts[0], replace(GREEDY, n_predict=250))
        opened.batcher.on_step.append(
            lambda report: rounds.extend(
                (second is None, bool(round_.draft.parents)) for _, round_ in report.rounds
            )
        )
        second = None
        while not opened.is_idle:
            opened.step()
            if second is None and sum(len(piece.tokens) for piece in first.pieces) > 30:
                second = opened.start(prompts[1], replace(GREEDY, n_predict=24))
        assert second is not None
        assert opened.counters()["joint_steps"] > 0
    assert sum(branches for alone, branches in rounds if alone) > 3
    for prompt, request in zip(prompts, (first, second), strict=True):
        tokens = [token for piece in request.pieces for token in piece.tokens]
        judge.check(Answer(prompt, tokens), GREEDY)


@pytest.mark.usefixtures("batches_are_cheap")
@pytest.mark.parametrize(
    "spec",
    [
        {**TREES, "--spec-accept": "reject"},
        {**TREES, "--spec-policy": "p-min"},
        {"--spec-type": "ngram-mod,suffix"},
    ],
    ids=str,
)
def test_other_acceptance_policies_and_drafters_keep_chains(
    exact: Path, spec: dict[str, object]
) -> None:
    with open_session(exact, spec) as opened:
        assert opened.target.sequences.n_tree_leaves == 0
        assert "trees" not in "".join(opened.notes)
        run = generate(opened, 2 * all_prompts()[0], GREEDY)
    assert run.stats.n_trees == 0
    assert run.stats.n_drafted > 0


@pytest.mark.usefixtures("batches_are_cheap")
def test_the_start_line_and_the_summary_name_trees(exact: Path) -> None:
    with open_session(exact, TREES) as opened:
        assert any("trees instead of chains" in note for note in opened.notes)
        run = generate(opened, all_prompts()[0], GREEDY)
    (_, line) = summary(run.stats)
    assert f", {run.stats.n_trees} trees)" in line
