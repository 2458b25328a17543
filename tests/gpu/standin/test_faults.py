"""Lets each allocation of one kind fail in turn, each time in a process of its own.

Each process is forked before anything uses the device. It must report the failure in one sentence,
and then serve the next request or end.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import standin_calls
from on_gpu import Logits, options, slots_for

from lab.synth import write_preset
from offload.device import devices
from offload.engine import Engine, open_engine
from offload.errors import OffloadError
from offload.schedule.splitter import stay
from offload.times.min_batch import MinBatch

# ggml-cuda does not survive some failures. The process then ends with this message of ours.
FATAL = r"specoffload: .*the library stopped at an assertion: .*CUDA error \(.*\); lower --vram\n"
SENTENCE = r"[^\n]+; lower --[a-z-]+[^\n]*"
MOST_ALLOCATIONS = 40


@pytest.mark.parametrize("call", ["malloc", "host_alloc", "host_register", "instantiate", "cublas"])
def test_memory_that_runs_out_ends_a_request_or_the_program_in_one_sentence(call: str) -> None:
    done = subprocess.run(
        [sys.executable, __file__, call],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr


def requests(engine: Engine) -> list[Logits]:
    """Logits of split decodes of one token, which capture graphs, and of a prompt of several
    ubatches."""
    found = []
    for n in (*[1] * 6, 20):
        ids = [(7 * i + len(found)) % engine.n_vocab for i in range(n)]
        found.append(engine.sequences.extend(0, ids))
    engine.sequences.rewind(0, 0)
    return found


def check_sentence(error: OffloadError) -> None:
    assert re.fullmatch(SENTENCE, str(error)), error


def serve(path: Path, expected: Sequence[Logits] = ()) -> list[Logits]:
    """Open the model, compute the same requests until they succeeded twice, and return their
    logits.

    A fault may end one request, or the opening, in one sentence.
    """
    gpu = next(device for device in devices() if device.on_gpu)
    streaming = slots_for(path, "half", hybrid=True, splitter=stay)
    got: list[Logits] = []
    n_served = n_failed = 0
    try:
        with open_engine(path, options(gpu, streaming, min_batch=MinBatch(4, 4))) as engine:
            while n_served < 2:
                try:
                    got = requests(engine)
                except OffloadError as error:
                    check_sentence(error)
                    engine.sequences.rewind(0, 0)
                    n_failed += 1
                    assert n_failed == 1, "one fault ends one request"
                else:
                    for mine, its in zip(got, expected or got, strict=True):
                        np.testing.assert_array_equal(mine, its)
                    n_served += 1
    except OffloadError as error:
        check_sentence(error)
    return got


def in_a_child(work: Callable[[], bool], log: Path) -> tuple[int, str]:
    """Run `work` in a forked process. Returns its exit code and its output.

    The exit code is 0 if `work` returned True, 3 if it returned False.
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), log.read_text()
    status = 4
    try:
        file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        status = 0 if work() else 3
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


def main(call: str, folder: Path) -> None:
    path, saved, log = folder / "faults.gguf", folder / "expected.npz", folder / "log"
    write_preset("deepseek-v3", path, size="tiny-vulkan", seed=1)

    def without_fault() -> bool:
        np.savez(saved, *serve(path))
        return True

    status, words = in_a_child(without_fault, log)
    assert status == 0, words
    expected = list(np.load(saved).values())
    n_fatal = 0
    for nth in range(1, MOST_ALLOCATIONS):

        def with_fault(nth: int = nth) -> bool:
            standin_calls.fail(call, nth)
            serve(path, expected)
            return not standin_calls.fault_is_due()

        status, words = in_a_child(with_fault, log)
        if status == 3:
            break  # fewer than `nth` calls: no fault
        n_fatal += status in (1, 2)
        assert status == 0 or (status in (1, 2) and re.search(FATAL, words)), (nth, status, words)
        if call == "instantiate" and nth == 3:
            break  # further layers are alike
    assert nth > 1, "no such call was made"
    print(f"{call}: {nth} runs, {n_fatal} of them ended the program")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(sys.argv[1], Path(made))
