"""ggml's CPU backend stays inside the rows that it sorts, also if a client's scores are NaNs.

ARGSORT sorts by std::sort with `<` or `>`, which is no strict weak order with NaNs, so the C++
standard promises nothing. TOP_K uses std::partial_sort, whose heaps check each index. A worker
needs no guard, because libstdc++'s std::sort stays inside a row for each comparison in which at
most one of two numbers is before the other (bits/stl_algo.h):

1. A partition scans from both sides without looking at the ends. Its pivot is the median of three
   numbers. The other two stop the first scans: in each of the six cases of
   `__move_median_to_first`, one of them is not before the pivot, and the pivot is not before one of
   them. Numbers that were swapped stop the later scans.
2. The pivot stays in the left part, and no number of the right part is before it. So it stops the
   unguarded insertion of each of them later, wherever it is in the left part.
3. Heap sort takes over when partitions are too uneven. It checks each index. While it takes out a
   number, another remains that the first is not before: the other child of the root, or a NaN.
   It stops the insertion of the first, because it lies to the left.
4. The first 16 numbers are inserted with a look at the first one.

`sorting_probe.cpp` tries this with random relations. libc++'s std::sort leaves rows in such cases,
so the library must not use it. GPU backends exchange numbers at fixed places, or sort them by
their bits.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from offload.ggml.graph import Graph
from offload.ggml.tensor import Buffer, new_tensor
from offload.ggml.threads import cpu_device

N_ROWS, KNOWN = 256, 0xA5
PROBE = Path(__file__).with_name("sorting_probe.cpp")


def test_the_library_sorts_by_libstdcpp() -> None:
    assert cpu_device()  # the library is loaded
    maps = Path("/proc/self/maps").read_text("utf-8").splitlines()
    names = {Path(line.split()[-1]).name for line in maps}
    assert any(name.startswith("libstdc++.so") for name in names)
    assert not any(name.startswith("libc++.so") for name in names)


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++, whose std::sort is tried")
@pytest.mark.parametrize("seed", [1, 2])
def test_sorts_by_relations_that_are_no_order_stay_inside(tmp_path: Path, seed: int) -> None:
    probe = tmp_path / "probe"
    subprocess.run(["g++", "-O2", "-o", probe, PROBE], check=True)
    done = subprocess.run([probe, str(seed), "30000"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("width", [8, 17, 128, 512])
@pytest.mark.parametrize("kind", ["one", "some", "half", "all", "ascending", "descending"])
def test_rows_with_nans_give_each_number_once(width: int, kind: str) -> None:
    random = np.random.default_rng(width)
    scores = random.standard_normal((N_ROWS, width)).astype(np.float32)
    if kind in ("ascending", "descending"):
        scores.sort(axis=1)
    if kind == "descending":
        scores = scores[:, ::-1].copy()
    share = {"one": 0.0, "some": 0.02, "half": 0.5, "all": 1.0}.get(kind, 0.1)
    scores[random.random(scores.shape) < share] = np.nan
    scores[np.arange(N_ROWS), random.integers(0, width, N_ROWS)] = np.nan
    stream, buffer = cpu_device().open(), Buffer(cpu_device().buffer_type, 4 * scores.nbytes, "it")
    memory = buffer.host_range.array()
    memory[:] = KNOWN
    memory[: scores.nbytes] = scores.view(np.uint8).reshape(-1)
    source = new_tensor("f32", (width, N_ROWS, 1, 1), (buffer, 0))
    for order in (0, 1):
        first = 2 * scores.nbytes
        ids = new_tensor("i32", (width, N_ROWS, 1, 1), (buffer, first), "ARGSORT", [source])
        stream.compute(Graph.of([ids.with_parameters((order,))]))
        stream.synchronize()
        found = memory[first : first + scores.nbytes].view(np.int32).reshape(N_ROWS, width)
        assert (np.sort(found, axis=1) == np.arange(width)).all()
        around = (memory[scores.nbytes : first], memory[first + scores.nbytes :])
        assert all((part == KNOWN).all() for part in around)
    stream.close()
    buffer.close()
