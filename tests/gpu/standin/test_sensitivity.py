"""The GPU tests fail if CUDA's waits are left out, so they do detect a wrong order.

The same tests pass with the same delays if no wait is left out. So the delays alone fail nothing.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

GPU_TESTS = Path(__file__).parents[1]
# What tests of equality say of wrong numbers, and ggml and the player of a wrong expert's id. An id
# that is read too early may end the program or the decode in this way.
WRONG_NUMBERS = re.compile(
    r"\d+ of \d+ logits differ|Mismatched elements|GGML_ASSERT|'bad_ids': [1-9]|"
    r"the router chose expert \d+ of"
)


EQUALITY = ("test_gpu_equality.py", "half or least_slots or pinned_ring")
DOORBELL = ("test_gpu_doorbell.py", "deepseek-v3 or gpt-oss or q4_K or rewinds")


def ran(folder: Path, chosen: tuple[str, str], **settings: str) -> tuple[int, str]:
    """Run tests of equality with delays. Returns pytest's exit status and the output."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--capture=sys"]
    command += [str(GPU_TESTS / chosen[0]), "-k", chosen[1]]
    env = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    env.pop("STANDIN_IGNORE", None)
    env |= {"STANDIN_JITTER": "2000"} | settings
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=200, cwd=folder, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module", params=[EQUALITY, DOORBELL], ids=["streamed", "doorbell"])
def chosen(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, str]:
    """Tests that pass with the delays alone."""
    found: tuple[str, str] = request.param
    status, words = ran(tmp_path_factory.mktemp("control"), found)
    assert status == 0, words
    (n,) = re.findall(r"^(\d+) passed", words, re.MULTILINE)
    assert int(n) >= 3
    return found


@pytest.mark.parametrize("left_out", ["waits", "event_syncs", "stream_syncs", "value_waits"])
def test_leaving_out_waits_gives_wrong_numbers(
    left_out: str, chosen: tuple[str, str], tmp_path: Path
) -> None:
    """STANDIN_JITTER delays work, so that without the waits some data is read too early."""
    if left_out == ("value_waits" if chosen is EQUALITY else "event_syncs"):
        pytest.skip("these tests need no such wait")
    status, words = ran(tmp_path, chosen, STANDIN_IGNORE=left_out)
    assert status != 0, words
    assert WRONG_NUMBERS.search(words), words
