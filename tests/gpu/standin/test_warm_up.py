"""A start on the stand-in finds slots however little `--vram` leaves after its warm-up."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from combinations.cases import Case
from combinations.found import FOUND
from combinations.opening import open_words
from combinations.play import faults_of
from combinations.small_models import model_of

from lab.synth import write_preset
from offload.device import DeviceChoice
from offload.errors import DoesNotFit
from offload.opening.opened import Opening
from offload.opening.start import Start
from offload.plan.placement import LEAST_FREE_BYTES
from offload.plan.warm_up import WarmedUp
from specoffload.session.session import Session

MIB = 1 << 20
FOUND_HERE = [case for case in FOUND if case.table == "session" and case["device"] == "stand-in"]
KINDS = ("full", "sinks", "mla", "tables", "dense")
ENOUGH = 110 * MIB  # the large model does not fit it, and one plan fits what its driver leaves
TWICE, EXCEEDS = "the model was opened twice", "more than --vram"


@contextmanager
def opened(path: Path, vram_bytes: int, *more: str) -> Iterator[Session]:
    words = (
        str(path), "--device", "CUDA0", "--hybrid", "on", "--vram", str(vram_bytes),
        "--ctx-size", "512", "--threads", "1", "--parallel", "1", "--spec-type", "none", *more,
    )  # fmt: skip
    with open_words(words, SPECOFFLOAD_WITHOUT="profile") as session:
        yield session


def least_of(path: Path) -> int:
    """The `--vram` that a refusal names."""
    with pytest.raises(DoesNotFit) as e, opened(path, MIB):
        pass
    assert e.value.least_bytes is not None
    return e.value.least_bytes


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is larger than what cuBLAS takes of the stand-in (64 MiB)."""
    path = tmp_path_factory.mktemp("large") / "large.gguf"
    return write_preset("gpt-oss-20b", path, quant="f32", n_layer=4, n_embd=512, n_ff_exp=512)


@pytest.mark.parametrize("case", FOUND_HERE, ids=str)
def test_what_has_failed_here_holds(standin: DeviceChoice, case: Case, models: Path) -> None:
    assert faults_of(case, models) == []


@pytest.mark.parametrize("memory", KINDS)
def test_every_size_from_the_least_on_starts(
    standin: DeviceChoice, memory: str, models: Path
) -> None:
    path = model_of(memory, models)
    least_bytes = least_of(path)
    with pytest.raises(DoesNotFit) as e, opened(path, least_bytes - 1):
        pass
    assert e.value.least_bytes == least_bytes
    for step in range(5):
        with opened(path, least_bytes + step * MIB * 3 // 2) as session:
            assert session.target.sequences.extend(0, [1, 2, 3]).shape[0] == 3


def test_a_second_start_keeps_within_the_size(standin: DeviceChoice, large: Path) -> None:
    gc.collect()
    before_bytes = standin.device.memory_bytes()[0]
    with opened(large, ENOUGH) as session:
        assert before_bytes - standin.device.memory_bytes()[0] <= ENOUGH
        said = [note for note in session.notes if TWICE in note or EXCEEDS in note]
        assert len(said) == 1
        assert TWICE in said[0]
        assert session.target.start.is_second
        assert session.target.opened.plan is not None
        assert session.target.opened.plan.slot_bytes > 0


def test_a_size_that_the_driver_fills_is_exceeded_with_a_note(
    standin: DeviceChoice, large: Path
) -> None:
    with opened(large, least_of(large)) as session:
        (said,) = [note for note in session.notes if TWICE in note or EXCEEDS in note]
        assert EXCEEDS in said
        assert not session.target.start.is_second


def test_a_model_is_opened_twice_at_most(
    standin: DeviceChoice, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although nothing ever seems to fit."""
    monkeypatch.setattr(WarmedUp, "fits", False)
    started: list[Start] = []
    init = Opening.__init__

    def counted(self: Opening, start: Start, *more: object) -> None:
        started.append(start)
        init(self, start, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(Opening, "__init__", counted)
    with opened(large, ENOUGH):
        assert [start.is_second for start in started] == [False, True]


def test_a_refusal_after_the_warm_up_names_a_size_that_works(
    standin: DeviceChoice, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver takes so much that `--vram` would be exceeded by more than is allowed."""
    monkeypatch.setattr("offload.plan.warm_up.LEAST_FREE_BYTES", 40 * MIB)
    least_bytes = least_of(large)
    says = "a warm-up took .* MiB more .* pass --vram"
    with pytest.raises(DoesNotFit, match=says) as e, opened(large, least_bytes):
        pass
    assert e.value.least_bytes is not None
    with opened(large, e.value.least_bytes) as session:
        assert session.target.sequences.extend(0, [1, 2, 3]).shape[0] == 3
    assert e.value.least_bytes < LEAST_FREE_BYTES
