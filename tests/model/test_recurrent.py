"""Recurrent and hybrid memory: snapshots, checkpoints in device and host memory, edited prompts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from budgets import limited
from lossless_parts import BATCH_NOISE, EXACT
from numpy.typing import NDArray
from resolved import config_of, line_of

from lab.options import Streaming, engine_options
from lab.synth import write_preset
from offload.engine import Engine, EngineOptions, open_engine
from offload.errors import BadRequest
from offload.schedule.splitter import stay
from offload.times.min_batch import NEVER, MinBatch
from specoffload.generation.generation import GenerateOptions
from specoffload.session.session import Session
from specoffload.slots.slot import Slot

PROMPT = [(7 * i + 3) % 64 for i in range(20)]
WITH_SNAPSHOTS, WITHOUT = "qwen35moe", "qwen3next"


@pytest.fixture(scope="module", params=[WITH_SNAPSHOTS, WITHOUT])
def hybrid(request: pytest.FixtureRequest, models: Path) -> Path:
    return write_preset(request.param, models / f"hybrid-{request.param}.gguf", size="tiny", seed=3)


@pytest.fixture(scope="module")
def snapshots(models: Path) -> Iterator[Engine]:
    path = models / "snapshots.gguf"
    write_preset(WITH_SNAPSHOTS, path, size="tiny", seed=4, quant="f32")
    with open_engine(path, options("cpu", n_rs_seq=4)) as engine:
        yield engine


def options(device: str, **changes: object) -> EngineOptions:
    return engine_options(device=device, n_ctx=256, min_batch=MinBatch(1, 1), **EXACT, **changes)  # type: ignore[arg-type]


def fresh(engine: Engine, tokens: list[int]) -> NDArray[np.float32]:
    engine.sequences.rewind(0, 0)
    return engine.sequences.extend(0, tokens, 1)[0]


def test_sequences_of_unequal_lengths_have_the_same_states_on_split_layers(hybrid: Path) -> None:
    """libllama moves the state of a sequence that the next ubatch lacks, in nodes of the graph.

    Some of these nodes may be computed before the CPU's experts, and must write where they say.
    """
    lengths = (10, 12, 4, 14)  # of different texts, so that no two states are equal
    found = []
    split = limited(hybrid, Streaming(hybrid=True, splitter=stay), "half")
    for device, streaming in (("cpu", Streaming()), ("sim", split)):
        made = engine_options(
            device=device,
            n_ctx=1024,
            n_sequences=4,
            min_batch=MinBatch(NEVER, NEVER),
            streaming=streaming,
        )
        with open_engine(hybrid, made) as engine:
            sequences = engine.sequences
            sequences.extend_batch([(s, PROMPT[s : s + n], 0) for s, n in enumerate(lengths)])
            found.append(np.concatenate(sequences.extend_batch([(s, [5], 1) for s in range(4)])))
            if engine.opened.weights.hybrid is not None:
                assert engine.counters().n_pairs_host > 0
    assert np.array_equal(*found)


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("on_device", [True, False], ids=["on device", "in host memory"])
def test_a_restored_checkpoint_gives_the_bits_of_a_fresh_evaluation(
    hybrid: Path, device: str, on_device: bool
) -> None:
    with open_engine(hybrid, options(device)) as engine:
        wanted = fresh(engine, [*PROMPT, 5, 6, 7])
        engine.sequences.rewind(0, 0)
        engine.sequences.extend(0, PROMPT, 0)
        checkpoint = engine.sequences.checkpoint(0, lasting=not on_device)
        for rejected in ([5, 6, 9, 9], [8], [5, 1]):
            engine.sequences.extend(0, rejected)
            engine.sequences.restore(0, checkpoint)
            assert engine.sequences.length(0) == len(PROMPT)
        engine.sequences.extend(0, [5, 6], 0)
        assert np.array_equal(engine.sequences.extend(0, [7])[0], wanted)
        counted = engine.sequences.rollbacks
        assert (counted.checkpoints, counted.restores) == (1, 3)
        assert (counted.checkpoint_bytes == 0) == on_device


def test_a_replaced_checkpoint_on_the_device_is_refused(hybrid: Path) -> None:
    with open_engine(hybrid, options("cpu")) as engine:
        engine.sequences.extend(0, PROMPT, 0)
        lasting = engine.sequences.checkpoint(0, lasting=True)
        first = engine.sequences.checkpoint(0)
        engine.sequences.extend(0, [1], 0)
        second = engine.sequences.checkpoint(0)
        with pytest.raises(BadRequest, match="checkpoint 1 of sequence 0 was replaced by 2"):
            engine.sequences.restore(0, first)
        engine.sequences.restore(0, second)
        engine.sequences.restore(0, lasting)
        assert engine.sequences.length(0) == len(PROMPT)
        assert np.array_equal(engine.sequences.extend(0, [5])[0], fresh(engine, [*PROMPT, 5]))


@pytest.mark.parametrize("lasting", [True, False])
def test_a_checkpoint_whose_cells_are_gone_is_refused(hybrid: Path, lasting: bool) -> None:
    with open_engine(hybrid, options("cpu")) as engine:
        engine.sequences.extend(0, PROMPT, 0)
        checkpoint = engine.sequences.checkpoint(0, lasting=lasting)
        engine.sequences.extend(0, [1, 2], 0)
        engine.sequences.restore(0, checkpoint)  # earlier cells are unchanged
        engine.sequences.rewind(0, 0)
        engine.sequences.extend(0, PROMPT[::-1] + PROMPT, 0)
        with pytest.raises(BadRequest, match="is void: the sequence was cut to 0 since"):
            engine.sequences.restore(0, checkpoint)


@pytest.mark.parametrize("n_dropped", [1, 2, 3, 4])
def test_snapshots_take_back_tokens_of_the_last_decode(snapshots: Engine, n_dropped: int) -> None:
    assert snapshots.sequences.n_rs_seq == 4
    draft = [5, 6, 7, 8, 9]
    kept = draft[: len(draft) - n_dropped]
    wanted = fresh(snapshots, [*PROMPT, *kept, 11])
    snapshots.sequences.rewind(0, 0)
    snapshots.sequences.extend(0, PROMPT, 0)
    snapshots.sequences.extend(0, draft)
    snapshots.sequences.rewind(0, len(PROMPT) + len(kept))
    assert np.abs(snapshots.sequences.extend(0, [11])[0] - wanted).max() <= BATCH_NOISE


def test_snapshots_of_earlier_decodes_are_refused_though_the_library_takes_them(
    snapshots: Engine,
) -> None:
    snapshots.sequences.rewind(0, 0)
    snapshots.sequences.extend(0, [*PROMPT, 1, 2, 3, 4], 0)
    snapshots.sequences.extend(0, [5])  # writes one snapshot: earlier ones are outdated
    assert not snapshots.sequences.can_drop(0, 1)
    with pytest.raises(BadRequest, match="recurrent.*checkpoint"):
        snapshots.sequences.rewind(0, len(PROMPT) + 3)
    snapshots.sequences.extend(0, [6, 7, 8])
    snapshots.sequences.rewind(0, len(PROMPT) + 6)
    with pytest.raises(BadRequest, match="only to the last 0 less"):
        snapshots.sequences.rewind(0, len(PROMPT) + 5)  # no snapshot is left
    snapshots.sequences.extend(0, [9])


def test_an_edited_conversation_is_evaluated_from_the_last_prompt_it_shares(hybrid: Path) -> None:
    with open_engine(hybrid, options("cpu")) as engine:
        cache = Slot(0, engine.sequences, None, n_checkpoints=2)

        def turn(prompt: list[int], answer: list[int]) -> int:
            n_cached = cache.reuse(prompt)
            assert n_cached == engine.sequences.length(0)
            engine.sequences.extend(0, prompt[n_cached:-1], 0)
            cache.mark()
            engine.sequences.extend(0, [prompt[-1], *answer[:-1]], 0)
            cache.keep([*prompt, *answer])
            return n_cached

        first, second = PROMPT, [*PROMPT, 40, 41, 1, 2, 3]
        assert turn(first, [40, 41, 42]) == 0
        assert turn([*first, 40, 41, 42, 1, 2, 3], [7, 8]) == len(first) + 2  # all held tokens
        # The answer was edited, so the text is reused up to the end of the first prompt.
        assert turn(second, [9, 9]) == len(first) - 1
        assert turn([*second, 9, 8, 8, 8], [1]) == len(second) + 1
        # This prompt has another beginning, so nothing is reused.
        assert turn([63, *second], [1]) == 0
        engine.sequences.extend(0, [1])
        kept = engine.sequences.extend(0, [5])[0]
        assert np.abs(kept - fresh(engine, [63, *second, 1, 5])).max() <= BATCH_NOISE


@pytest.mark.parametrize("n_most", [0, 2])
def test_a_slot_keeps_as_many_checkpoints_as_the_flag_says(hybrid: Path, n_most: int) -> None:
    words = ("-m", str(hybrid), "--device", "cpu", "-c", "256", "-t", "1", "--ctx-checkpoints")
    config = config_of(line_of(*words, str(n_most)).options)
    assert config.ctx_checkpoints == n_most
    with Session(config) as session:
        (slot,) = session.batcher.slots
        prompt: list[int] = []
        for turn in range(4):
            prompt = [*prompt, *(40 + (turn + i) % 9 for i in range(10))]
            for _ in session.generate(prompt, GenerateOptions(n_predict=2, ignore_eos=True)):
                pass
            assert len(slot.checkpoints) == min(n_most, turn + 1)


def test_a_session_says_how_drafts_are_taken_back(hybrid: Path) -> None:
    given: dict[str, object] = {"--spec-type": "suffix", "--spec-policy": "fixed"}
    words = "snapshots, longer" if WITH_SNAPSHOTS in hybrid.name else "has no snapshots"
    opened = config_of(model=hybrid, device="cpu", ctx_size=256, threads=1, spec_given=given)
    with Session(opened) as session:
        assert any("recurrent model" in note and words in note for note in session.notes)


@pytest.mark.parametrize(
    ("preset", "n_ubatch", "wanted", "taken"),
    [
        (WITH_SNAPSHOTS, 8, 7, 6),
        (WITH_SNAPSHOTS, 8, 6, 6),
        (WITH_SNAPSHOTS, 2, 4, 0),
        (WITHOUT, 8, 4, 0),
        ("mistral-large", 4, 16, 0),
    ],
)
def test_a_small_ubatch_has_room_for_fewer_snapshots_and_it_is_said(
    models: Path, preset: str, n_ubatch: int, wanted: int, taken: int
) -> None:
    path = write_preset(preset, models / f"few-{preset}.gguf", size="tiny", seed=4)
    asked = engine_options(device="cpu", n_ctx=256, n_ubatch=n_ubatch, n_rs_seq=wanted)
    with open_engine(path, asked) as engine:
        assert engine.sequences.n_rs_seq == taken
        is_said = any("snapshots" in note for note in engine.opened.notes)
        assert is_said == (preset == WITH_SNAPSHOTS and wanted > taken)
        for n in (1, n_ubatch, n_ubatch + 1, 3 * n_ubatch + 1):
            engine.sequences.extend(0, [1] * n, 0)
