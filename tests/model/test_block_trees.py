"""Trees of DFlash2's candidates: the rows after them, and texts as of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lossless_parts import BATCH_NOISE, EXACT
from mtp_parts import prompts, written
from test_slots import open_slots

from lab.options import engine_options
from lab.synth.block import write_block
from lab.synth.eagle import write_target
from offload.decode import Rows
from offload.engine import open_engine
from offload.sequences.block_draft import BlockDraft, DraftedBlock
from specoffload.session.session import Session

PROMPT, TOKENS, PARENTS = [1, 2, 3], [10, 20, 30, 40, 50, 60], [-1, 0, 0, 1, -1, 1]
N_PREDICT = 60


def lattice_pair(models: Path, architecture: str = "qwen3moe") -> tuple[Path, Path]:
    target = write_target(models, architecture)
    return target, write_block(models, target, "dflash2")


@pytest.mark.parametrize("variant", ["dflash", "dspark-conf"])
def test_a_block_after_a_tree_is_that_after_its_text(models: Path, variant: str) -> None:
    """The rows of the kept path are those of the same tokens decoded one after the other."""
    target = write_target(models, "qwen3moe")
    draft = write_block(models, target, variant)
    options = engine_options(device="cpu", n_ctx=256, n_tree_leaves=6, row_file=draft, **EXACT)
    with open_engine(target, options) as engine:
        sequences, layers = engine.sequences, engine.opened.row_draft
        assert isinstance(layers, BlockDraft)
        assert not layers.has_lattice
        text, blocks = [*PROMPT, 10, 20, 40], []
        for kept in ([], [0, 1, 3]):
            sequences.rewind(0, 0)
            sequences.extend(0, PROMPT if kept else text)
            if kept:
                sequences.extend_tree(0, TOKENS[:2], PARENTS[:2])
                sequences.extend_tree(0, TOKENS[2:], PARENTS[2:])
                sequences.keep_path(0, kept)
            (block,) = layers.draft_blocks([(0, layers.tail(0, [*text, 7]))], 5)
            blocks.append(block.logits.copy())
            assert layers.n_unknown_rows == 0
        np.testing.assert_allclose(blocks[1], blocks[0], atol=BATCH_NOISE)


def test_a_places_candidates_are_those_of_its_logits(models: Path) -> None:
    target, draft = lattice_pair(models)
    options = engine_options(device="cpu", n_ctx=256, row_file=draft, **EXACT)
    with open_engine(target, options) as engine:
        layers = engine.opened.row_draft
        assert isinstance(layers, BlockDraft)
        assert layers.has_lattice
        engine.sequences.extend(0, PROMPT)
        (block,) = layers.draft_blocks([(0, layers.tail(0, [*PROMPT, 7]))], 5)
        before = None
        for index in range(5):
            successors = block.successors(index, before)
            logits, _ = block.place(index, before)
            assert len(successors) == layers.shape.n_candidates == np.isfinite(logits).sum()
            best = logits.max()
            p = np.exp(logits - best) / np.exp(logits - best).sum()
            assert successors[0][1] == max(q for _, q in successors)
            for token, q in successors:
                assert q == pytest.approx(p[token], abs=1e-6)
            before = successors[-1][0]  # also after one that is not the likeliest


@dataclass
class Helped:
    """A block that has the text's own token among its candidates, often not as the likeliest."""

    block: DraftedBlock
    text: Sequence[int]  # the tokens that the block should draft
    rng: np.random.Generator

    def place(self, index: int, before: int | None) -> tuple[Rows, float | None]:
        return self.block.place(index, before)

    def successors(self, index: int, before: int | None) -> list[tuple[int, float]]:
        tokens = [token for token, _ in self.block.successors(index, before)][:3]
        if index < len(self.text) and self.rng.random() < 0.9:
            tokens = [token for token in tokens if token != self.text[index]]
            tokens.insert(int(self.rng.integers(2)), self.text[index])
        return list(zip(tokens, (0.55, 0.4, 0.04, 0.01), strict=False))


def help_blocks(session: Session, text: Sequence[int]) -> None:
    """Let the session's blocks have the tokens of `text`, from its beginning, among theirs."""
    layers, rng = session.target.opened.row_draft, np.random.default_rng(1)
    assert isinstance(layers, BlockDraft)
    draft_blocks = BlockDraft.draft_blocks

    def helped(parts: Sequence[tuple[int, Sequence[int]]], n_tokens: int) -> list[Any]:
        blocks = draft_blocks(layers, parts, n_tokens)
        return [
            Helped(block, text[layers.length(s) + 1 :], rng)
            for (s, _), block in zip(parts, blocks, strict=True)
        ]

    layers.draft_blocks = helped  # type: ignore[assignment, method-assign]


@pytest.mark.usefixtures("batches_are_cheap")
@pytest.mark.parametrize("way", [{}, {"device": "sim", "min_batch": "1"}], ids=["cpu", "streamed"])
def test_trees_of_candidates_write_the_plain_text(models: Path, way: dict[str, Any]) -> None:
    target, draft = lattice_pair(models)
    with (
        open_slots(target, {"--spec-type": "none"}, 1) as plain,
        open_slots(target, {"--spec-type": "dflash"}, 1, draft=draft, **way) as session,
    ):
        assert any("trees instead of chains" in note for note in session.notes)
        for prompt in prompts(6):
            answer = written(plain, prompt, N_PREDICT)
            help_blocks(session, [*prompt, *answer])
            assert written(session, prompt, N_PREDICT) == answer
        counts, layers = session.counters(), session.target.opened.row_draft
        assert counts["tree_rounds"] > 6
        assert 0 < counts["tree_saved"] < counts["tree_accepted"] < counts["tree_nodes"]
        assert layers is not None
        assert not layers.n_unknown_rows


@pytest.mark.usefixtures("batches_are_cheap")
@pytest.mark.parametrize(
    ("architecture", "variant", "spec"),
    [
        ("qwen3moe", "dflash", {}),
        ("qwen3moe", "dspark", {}),
        ("qwen3moe", "dflash2", {"--spec-accept": "reject"}),
        ("qwen3moe", "dflash2", {"--spec-policy": "p-min"}),
        ("qwen35moe", "dflash2", {}),  # recurrent
        ("gpt-oss", "dflash2", {}),  # windows
    ],
)
def test_other_blocks_draft_chains(
    models: Path, architecture: str, variant: str, spec: dict[str, str]
) -> None:
    target = write_target(models, architecture)
    draft = write_block(models, target, variant)
    kind = "dspark" if variant == "dspark" else "dflash"
    with open_slots(target, {"--spec-type": kind, **spec}, 1, draft=draft) as session:
        assert session.target.sequences.n_tree_leaves == 0
        assert not any("trees instead of chains" in note for note in session.notes)
        assert written(session, prompts(1)[0], 8)
