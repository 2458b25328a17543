"""ggml's CPU backend stays inside the rows that it sorts, also if a client's scores are NaNs.

It sorts by std::sort and `>`, which is no strict weak order with NaNs, so the C++ standard promises
nothing. Workers rely on what libstdc++ does: NaNs end its scans.
"""

from __future__ import annotations

import numpy as np
import pytest

from offload.ggml.graph import Graph
from offload.ggml.tensor import Buffer, new_tensor
from offload.ggml.threads import cpu_device

N_ROWS, KNOWN = 256, 0xA5


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
