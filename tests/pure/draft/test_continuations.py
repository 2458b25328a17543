"""The file of a target's texts goes on where it ended, and belongs to one target and its texts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specoffload.draft_making.continuations import RECORD, ContinuationFile, Records, likeliest
from specoffload.draft_making.schedule import WARM_UP, batch_rows, rate_factor
from specoffload.errors import UsageError

ABOUT = {"target": "a", "prompts": "b"}


def records(n: int, first: int = 0) -> Records:
    made = np.zeros(n, RECORD)
    made["tokens"] = np.arange(first, first + n)[:, None]
    return made


def test_a_file_goes_on_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "work" / "continuations.bin"
    file = ContinuationFile(path, ABOUT)
    assert len(file) == len(file.records(0)) == 0
    file.append(records(3), 2.0)
    file.append(records(2, 3), 1.5)
    again = ContinuationFile(path, ABOUT)
    assert len(again) == 5
    assert again.took_s == 3.5
    assert again.records(1)["tokens"][:, 0].tolist() == [1, 2, 3, 4]
    assert again.records(1, 3)["tokens"][:, 0].tolist() == [1, 2]


@pytest.mark.parametrize("n_torn", [1, RECORD.itemsize - 1])
def test_a_record_that_was_not_written_whole_is_dropped(tmp_path: Path, n_torn: int) -> None:
    path = tmp_path / "continuations.bin"
    ContinuationFile(path, ABOUT).append(records(2), 1.0)
    with path.open("ab") as f:
        f.write(b"x" * n_torn)
    file = ContinuationFile(path, ABOUT)
    assert len(file) == 2
    file.append(records(1, 2), 1.0)
    assert ContinuationFile(path, ABOUT).records(0)["tokens"][:, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("other", [{"target": "c", "prompts": "b"}, {"target": "a"}])
def test_records_of_another_target_or_other_texts_are_refused(
    tmp_path: Path, other: dict[str, str]
) -> None:
    path = tmp_path / "continuations.bin"
    ContinuationFile(path, ABOUT).append(records(2), 1.0)
    with pytest.raises(UsageError, match="made by another target or of other texts"):
        ContinuationFile(path, other)
    assert len(ContinuationFile(path, ABOUT)) == 2


def test_the_likeliest_tokens_come_first_with_their_share_of_all() -> None:
    probabilities = np.array([[0.1, 0.4, 0.2, 0.3], [0.25, 0.25, 0.25, 0.25]])
    ids, found = likeliest(np.log(probabilities).astype(np.float32), 3)
    assert ids[0].tolist() == [1, 3, 2]
    assert found[0] == pytest.approx([0.4, 0.3, 0.2], abs=1e-6)
    assert found[1] == pytest.approx([0.25] * 3, abs=1e-6)


@given(st.integers(1, 50), st.integers(1, 12))
def test_each_record_is_trained_on_once_before_any_is_again(n_records: int, n_batch: int) -> None:
    n_steps = n_records // min(n_batch, n_records)
    for first in (0, n_steps):
        used = [int(i) for s in range(n_steps) for i in batch_rows(n_records, n_batch, first + s)]
        assert len(used) == len(set(used)) == n_steps * min(n_batch, n_records)
        assert set(used) <= set(range(n_records))


def test_the_learning_rate_rises_and_then_falls_to_zero() -> None:
    factors = [rate_factor(share) for share in np.linspace(0, 1, 201)]
    top = factors.index(max(factors))
    assert 0.9 < factors[top] <= 1.0
    assert factors[: top + 1] == sorted(factors[: top + 1])
    assert factors[top:] == sorted(factors[top:], reverse=True)
    assert factors[0] > 0
    assert factors[-1] == 0
    assert top / 200 <= WARM_UP
