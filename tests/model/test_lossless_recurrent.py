"""Rejected drafts leave no trace in recurrent and hybrid memory of every kind.

After each round, the first row of the next verification is compared with the logits of a second
engine that evaluates the whole text afresh. The attention cells are counted too. Both went wrong in
llama.cpp #19493 (docs/background.md, checkpoints).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lossless_parts import (
    BATCH_NOISE,
    EXACT,
    FIXED,
    GREEDY,
    SAMPLED,
    Judge,
    assert_each_position_once,
    assert_kept_and_rejected,
    cell_positions,
    distance_from_fresh,
    generate,
    judged,
    open_session,
)
from numpy.typing import NDArray
from speculation_parts import Sampler

from lab.options import engine_options
from lab.synth import Shape, plan_shape, write, write_preset
from lab.synth.mtp import HEADS
from offload.engine import Engine, open_engine
from offload.ggml.context import PARTIAL_STATE
from specdec.decoding.acceptance import Greedy, MatchAcceptance, Verdict
from specdec.decoding.drafting import ChainDrafting
from specdec.decoding.loop import DecodingLoop
from specdec.decoding.member import BatchMember
from specdec.drafters.model import ModelDrafter
from specdec.drafters.ngrams import HistoryDrafter
from specdec.drafters.suffix import SuffixDrafter
from specdec.policies.rules import Fixed
from specdec.types import Chooser, Decision, Draft, Drafter, DraftRequest, IsEnd, Round
from specoffload.bench.workloads import judged_prompts
from specoffload.config.options import WorkloadName

N_DRAFT = 4
N_PREDICT = 16
N_VOCAB = 64
# A prompt with every token, so that n-grams always have something to draft.
ALL_TOKENS = [(37 * i + 11) % N_VOCAB for i in range(N_VOCAB)]
NOISE = 0.01  # difference of logits by batch size alone; their standard deviation is 3

_BODY = {
    "block_count": 4,
    "embedding_length": 128,
    "feed_forward_length": 256,
    "context_length": 4096,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.layer_norm_epsilon": 1e-5,
}
_MAMBA = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 256,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 8,
}
_MAMBA2 = {**_MAMBA, "ssm.group_count": 1}
_EVERY_SECOND = {"attention.head_count_kv": (0, 2, 0, 2)}
SHAPES: dict[str, dict[str, object]] = {
    "mamba": {**_BODY, **_MAMBA},
    "mamba2": {**_BODY, **_MAMBA2},
    "falcon-h1": {**_BODY, **HEADS, **_MAMBA2},
    "granitehybrid": {**_BODY, **HEADS, **_MAMBA2, **_EVERY_SECOND},
    "jamba": {**_BODY, **HEADS, **_MAMBA, **_EVERY_SECOND},
    "lfm2": {**_BODY, **HEADS, **_EVERY_SECOND, "shortconv.l_cache": 3},
}
PURE = ("mamba", "mamba2")  # no attention, so no cells to count
PRESETS = ("qwen3next", "qwen35moe")


def write_model(folder: Path, name: str, seed: int = 3, *, with_text: bool = False) -> Path:
    """Write a tiny model. With `with_text` it has a tokenizer, and 512 tokens."""
    path = folder / f"lossless-{name}-{seed}-{with_text}.gguf"
    if path.exists():
        return path
    vocab, n_vocab = ("bytes", 512) if with_text else ("none", N_VOCAB)
    if name in PRESETS:
        more: dict[str, Any] = {"vocab": vocab, "n_vocab": n_vocab, "quant": "f32"}
        return write_preset(name, path, size="tiny", seed=seed, **more)
    shape = Shape(name, name, dict(SHAPES[name]), n_vocab, quant="f32", unchecked=True)  # type: ignore[arg-type]
    return write(plan_shape(shape, vocab), path, seed)


class Recurrent:
    """A target, and a second engine of the same file for fresh evaluations."""

    def __init__(self, name: str, target: Engine, fresh: Engine) -> None:
        self.name, self.target, self.fresh = name, target, fresh
        self.prompt, self.text = self._without_ties()

    def afresh(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits [n_vocab] after `tokens`, evaluated in one batch from an empty memory."""
        self.fresh.sequences.rewind(0, 0)
        return self.fresh.sequences.extend(0, tokens, 1)[0]

    def _without_ties(self) -> tuple[list[int], list[int]]:
        """Find a prompt whose greedy continuation cannot be changed by noise.

        Returns the prompt, and the prompt with its continuation.
        """
        for first in range(N_VOCAB):
            text = prompt = [first, *ALL_TOKENS]
            row, gap = self.afresh(text), np.inf
            for _ in range(N_PREDICT + N_DRAFT):
                second, best = np.partition(row, -2)[-2:]
                gap = min(gap, best - second)
                text = [*text, int(row.argmax())]
                row = self.fresh.sequences.extend(0, text[-1:], 1)[0]
            if gap > 2 * NOISE:
                return prompt, text
        raise AssertionError("every prompt has a tie")


@pytest.fixture(
    scope="module",
    params=[*((name, 0) for name in (*PRESETS, *SHAPES)), ("qwen35moe", 4), ("lfm2", 4)],
    ids=lambda param: f"{param[0]}, {param[1]} snapshots",
)
def recurrent(request: pytest.FixtureRequest, models: Path) -> Iterator[Recurrent]:
    name, n_rs_seq = request.param
    path = write_model(models, name)
    options = engine_options(device="cpu", n_ctx=128, **EXACT, n_rs_seq=n_rs_seq)
    with (
        open_engine(path, options) as target,
        open_engine(path, engine_options(options, n_rs_seq=0)) as fresh,
    ):
        assert not target.sequences.can_rewind
        assert target.sequences.n_rs_seq == n_rs_seq
        yield Recurrent(name, target, fresh)


class Compared(MatchAcceptance):
    """Acceptance that first compares the verification's first row with a fresh evaluation."""

    def __init__(self, models: Recurrent, chooser: Chooser) -> None:
        super().__init__(chooser)
        self._models = models
        self.distances: list[float] = []

    def __call__(
        self, draft: Draft, logits: NDArray[np.float32], history: list[int], is_end: IsEnd
    ) -> Verdict:
        models = self._models
        found = distance_from_fresh(models.fresh, history, len(models.prompt) - 1, logits[0])
        self.distances.append(found)
        return super().__call__(draft, logits, history, is_end)


class Scripted(HistoryDrafter):
    """Drafts the known continuation, with one wrong token at `wrong_at`."""

    name = "scripted"

    def __init__(self, text: Sequence[int], wrong_at: int) -> None:
        self._text, self._wrong_at = list(text), wrong_at

    def _propose(self, asked: DraftRequest) -> Draft:
        tokens = self._text[len(asked.history) :][: min(asked.limit, N_DRAFT)]
        if self._wrong_at < len(tokens):
            tokens[self._wrong_at] = (tokens[self._wrong_at] + 1) % N_VOCAB
        return Draft(tuple(tokens), (0.5,) * len(tokens), self.name, Decision(len(tokens), ""))

    def forget(self, sequence: int) -> None:
        pass


def rounds(
    models: Recurrent, drafter: Drafter, chooser: Chooser | None = None
) -> tuple[list[Round], float]:
    """Generate with `drafter`. Returns all rounds, and the largest distance of the target's
    logits from a fresh evaluation's."""
    target = models.target
    target.sequences.rewind(0, 0)
    acceptance = Compared(models, chooser or Greedy())
    out, length = [], len(models.prompt)
    loop = DecodingLoop(target.sequences, ChainDrafting(target.sequences, drafter, Fixed(N_DRAFT)))
    loop.add(BatchMember(0, list(models.prompt), acceptance, N_PREDICT, lambda _: False))
    while not loop.is_idle:
        step = loop.step()
        assert not step.failed
        if not step.rounds:
            continue
        ((_, round_),) = step.rounds
        out.append(round_)
        length += len(round_.emitted)
        assert target.sequences.length(0) == length - 1
        if models.name not in PURE:
            assert_each_position_once(target)
    return out, max(acceptance.distances)


def emitted(found: Sequence[Round]) -> list[int]:
    return [token for round_ in found for token in round_.emitted]


def n_rejected(found: Sequence[Round]) -> int:
    return sum(round_.n_drafted - round_.n_accepted for round_ in found)


def test_wrong_drafts_of_all_lengths_leave_no_trace(recurrent: Recurrent) -> None:
    found, distance = rounds(recurrent, SuffixDrafter(min_match=1))
    assert n_rejected(found) > N_PREDICT
    assert distance < NOISE
    assert emitted(found) == recurrent.text[len(recurrent.prompt) :][:N_PREDICT]


@pytest.mark.parametrize("n_right", range(N_DRAFT + 1))
def test_drafts_that_are_right_to_any_depth_leave_no_trace(
    recurrent: Recurrent, n_right: int
) -> None:
    sequences = recurrent.target.sequences
    before = replace(sequences.rollbacks)
    found, distance = rounds(recurrent, Scripted(recurrent.text, n_right))
    # Snapshots spare checkpoints, but not if drafts are longer than the snapshots reach.
    has_snapshots = sequences.n_rs_seq >= N_DRAFT
    assert (sequences.rollbacks.checkpoints > before.checkpoints) != has_snapshots
    assert all(r.n_accepted == min(n_right, r.n_drafted) for r in found)
    assert (n_rejected(found) > 0) == (n_right < N_DRAFT)
    assert distance < NOISE
    assert emitted(found) == recurrent.text[len(recurrent.prompt) :][:N_PREDICT]


def test_the_count_of_cells_catches_a_restore_without_the_removal_of_later_cells(
    recurrent: Recurrent,
) -> None:
    """Without the removal, cells of rejected tokens stay, and their positions get second cells."""
    if recurrent.name in PURE:
        pytest.skip("there are no attention cells to leave behind")
    target, first = recurrent.target, len(recurrent.prompt)
    target.sequences.rewind(0, 0)
    target.sequences.extend(0, recurrent.prompt, 0)
    assert_each_position_once(target)
    state = target.opened.context.state(0, PARTIAL_STATE)
    target.sequences.extend(0, [50, 51, 52], 0)
    target.opened.context.set_state(0, state, PARTIAL_STATE)
    target.sequences._lengths[0] = first
    with pytest.raises(AssertionError, match=rf"positions \[{first}, "):
        assert_each_position_once(target)
    target.sequences.extend(0, [7, 8, 9], 0)
    with pytest.raises(AssertionError, match="have several cells"):
        assert_each_position_once(target)
    found = sorted(cell_positions(target))
    assert found[first:] == sorted([first, first + 1, first + 2] * 2)


# -- recurrent drafts -----------------------------------------------------------------------------


class DraftedAfresh(ModelDrafter):
    """Compares each drafted token with a fresh evaluation by a second engine."""

    def __init__(self, model: Engine, fresh: Engine) -> None:
        super().__init__(model.sequences)
        self._fresh, self.n_compared = fresh, 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        (draft,), history = super().propose(requests), requests[0].history
        for i, (token, p) in enumerate(zip(draft.tokens, draft.probs, strict=True)):
            self._fresh.sequences.rewind(0, 0)
            row = self._fresh.sequences.extend(0, [*history, *draft.tokens[:i]], 1)[0]
            assert row.max() - row[token] < NOISE
            assert abs(p - 1 / np.exp(row - row[token]).sum()) < NOISE
            self.n_compared += 1
        return [draft]


@pytest.mark.parametrize("name", ["qwen3next", "mamba2"])
def test_a_recurrent_draft_is_rolled_back_to_what_was_kept(models: Path, name: str) -> None:
    """The draft is the target's own model, then one of other weights."""
    target_path, other_path = write_model(models, name), write_model(models, name, 5)
    options = engine_options(device="cpu", n_ctx=128, **EXACT)
    with open_engine(target_path, options) as target, open_engine(target_path, options) as fresh:
        pair = Recurrent(name, target, fresh)
        for path in (target_path, other_path):
            with open_engine(path, options) as draft, open_engine(path, options) as fresh_draft:
                drafter = DraftedAfresh(draft, fresh_draft)
                # At this temperature, drafts of the target's own model are right only in part.
                sampler = Sampler(0.7, rng=np.random.default_rng(1))
                found, distance = rounds(pair, drafter, sampler)
                if name not in PURE:
                    assert_each_position_once(draft)
            assert drafter.n_compared == sum(r.n_drafted for r in found) > 0
            assert distance < NOISE
            assert n_rejected(found) > 0
            n_accepted = sum(round_.n_accepted for round_ in found)
            assert (n_accepted > 0) == (path == target_path)


# -- sessions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "drafts", "place"),
    [
        ("target", "draft", "resident"),
        ("target", "draft", "streamed"),
        ("qwen3next", "suffix", "streamed"),
        ("qwen3next", "draft", "resident"),
        ("qwen35moe", "suffix", "resident"),
        ("qwen35moe", "draft", "streamed"),
    ],
)
def test_turns_with_rejected_drafts_leave_the_memory_of_a_fresh_evaluation(
    exact: Path, models: Path, name: str, drafts: str, place: str
) -> None:
    spec: dict[str, object] = {**FIXED, "--spec-type": drafts, "--spec-suffix-min-match": 1}
    path, more = exact, dict[str, object](ctx_size=256)
    if name != "target":
        path = write_model(models, name, with_text=True)
        more["draft"] = write_model(models, "qwen3next", 5, with_text=True)
    if drafts == "suffix":
        more["draft"] = None
    with open_session(path, spec, place, **more) as opened:
        history: list[int] = []
        rejected = 0
        for turn in range(3):
            history += [(7 * turn + 3 * i) % 64 for i in range(12)] * 2
            run = generate(opened, history, GREEDY if turn % 2 else SAMPLED)
            assert (run.stats.n_cached_tokens > 0) == (turn > 0)
            history += run.tokens
            rejected += run.n_rejected
        kept = opened.target.sequences.extend(0, history[-1:])[0]
        copied = opened.target.counters().streamed_bytes
    assert rejected > 0
    assert (copied > 0) == (place == "streamed")
    with open_engine(path, engine_options(device="cpu", n_ctx=256, **EXACT)) as fresh:
        assert distance_from_fresh(fresh, history, 1, kept) < (
            BATCH_NOISE if name == "target" else NOISE
        )


# Weights are random. With these seeds the model continues the log by tokens of the log.
@pytest.mark.parametrize(("name", "seed"), [("qwen3next", 8), ("qwen35moe", 5)])
def test_n_grams_of_an_agents_log_leave_a_recurrent_models_text_unchanged(
    models: Path, name: str, seed: int
) -> None:
    """A published report: an agent's code was subtly wrong with `ngram-mod` and checkpoints."""
    path = write_model(models, name, seed, with_text=True)
    spec = {**FIXED, "--spec-type": "ngram-mod", "--spec-ngram-mod-n-match": 1}
    texts = [text[-600:] for text in judged_prompts(WorkloadName.AGENT)]
    with (
        open_session(path, spec, draft=None) as opened,
        open_engine(path, engine_options(device="cpu", n_ctx=1024, **EXACT)) as engine,
    ):
        runs = judged(opened, Judge(engine), texts)
        rollbacks = opened.target.sequences.rollbacks
    assert_kept_and_rejected(runs)
    assert (rollbacks.restores > 0) == (name == "qwen3next"), "the other has snapshots"
