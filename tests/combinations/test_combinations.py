"""All combinations that have shown a fault, and a sample of all others that each day draws anew.

SPECOFFLOAD_COMBINATIONS_S is the time for each table's sample. scripts/test-combinations tries
all cases.
"""

from __future__ import annotations

import datetime
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from combinations.cases import TABLES, Case, by_use, covering
from combinations.found import FOUND
from combinations.trying import Trier, grouped

SAMPLE_S = float(os.environ.get("SPECOFFLOAD_COMBINATIONS_S", "15"))
SEED = datetime.date.today().isoformat()


@pytest.fixture(scope="module")
def trier(models: Path) -> Iterator[Trier]:
    with Trier(models) as opened:
        yield opened


@pytest.mark.parametrize("case", grouped(FOUND), ids=str)
def test_what_has_failed_before_holds(trier: Trier, case: Case) -> None:
    if why := trier.why_not(case):
        pytest.skip(why)
    assert trier.faults_of(case) == []


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.timeout(SAMPLE_S + 300)
def test_a_sample_of_today_holds(
    trier: Trier, table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cases that people use most come first in one half, and any others in the other half."""
    cases = [case for case in covering(table, SEED) if not trier.why_not(case)]
    n = len(cases) // 2
    began, n_tried, failed = time.monotonic(), 0, []
    for pair in zip(by_use(cases)[:n], cases[::-1][:n], strict=True):
        for case in pair:
            if time.monotonic() - began > SAMPLE_S:
                break
            n_tried += 1
            if faults := trier.faults_of(case):
                failed.append(f"{case}: {faults}")
    with capsys.disabled():
        print(f"\n{table}: {n_tried} of {len(cases)} combinations, seed {SEED}")
    assert not failed
    assert n_tried


@pytest.mark.parametrize("table", TABLES)
def test_refused_pairs_say_their_sentence_and_its_remedy_works(trier: Trier, table: str) -> None:
    remedies = dict[Case, None]()  # several refusals have the same
    for refused in TABLES[table].refused:
        case = Case.of(table, **dict((refused.first, refused.second)))
        (fault,) = trier.faults_of(case)
        assert re.search(refused.says, fault)
        remedies[case.replaced(refused.second[0], refused.remedy)] = None
    for case in grouped([*remedies]):
        assert trier.faults_of(case) == []
