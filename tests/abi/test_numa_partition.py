"""The pages that numa.place expects each thread to read are those that ggml's threads do read.

Two nodes are shown to ggml by a mount of two empty folders, seen by the probe only.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from numa.place import PAGE_BYTES, PlacedWeight, node_reads

ROOT = Path(__file__).parents[2]
PROBE = Path(__file__).with_name("numa_partition_probe.py")
ROW_BYTES = {("q4_k", 8192): 4608, ("q8_0", 8192): 8704, ("q8_0", 512): 544}

if os.geteuid() != 0 or not Path("/dev/userfaultfd").exists():
    pytest.skip("needs root and Linux 6.1 for userfaultfd and a mount", allow_module_level=True)


def probe(tmp_path: Path, *arguments: object) -> dict[str, object]:
    for node in ("node0", "node1"):
        (tmp_path / node).mkdir()
    script = f'mount --bind "{tmp_path}" /sys/devices/system/node && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, str(PROBE)]
    run = subprocess.run(
        [*command, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
        check=False,
    )
    if "mount:" in run.stderr or "unshare:" in run.stderr:
        pytest.skip(f"folders cannot be mounted here: {run.stderr.strip()[:200]}")
    assert run.returncode == 0, run.stderr
    answer: dict[str, object] = json.loads(run.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize(
    ("n_threads", "quant", "n_in", "n_rows", "n_matrices", "kind"),
    [
        (3, "q4_k", 8192, 256, 2, "routed"),
        (4, "q4_k", 8192, 250, 2, "routed"),
        (3, "q8_0", 8192, 100, 1, "dense"),
        (4, "q8_0", 512, 128, 128, "dense"),
    ],
)
def test_each_page_is_first_read_by_a_thread_that_the_partition_names(
    n_threads: int, quant: str, n_in: int, n_rows: int, n_matrices: int, kind: str, tmp_path: Path
) -> None:
    weight = PlacedWeight(0, n_rows, ROW_BYTES[quant, n_in], n_matrices, kind == "routed")
    answer = probe(tmp_path, n_threads, quant, n_in, n_rows, n_matrices, 1, kind)
    first, found = answer["first_bytes"], answer["reads"]
    assert isinstance(first, int)
    assert isinstance(found, list)
    assert answer["is_numa"] is True
    assert answer["n_team"] == n_threads
    assert len(found) == answer["n_pages"], "every page of the weight is read"
    planned: dict[int, set[int]] = {}
    for read in node_reads([weight], range(n_threads)):
        start = (read.start_bytes - first) // PAGE_BYTES
        for page in range(start, (read.stop_bytes - 1 - first) // PAGE_BYTES + 1):
            planned.setdefault(page, set()).add(read.node)
    assert all(thread in planned[(offset - first) // PAGE_BYTES] for offset, thread in found)


@pytest.mark.several_processors
def test_bindings_survive_a_graph_except_that_of_the_calling_thread(tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one processor: there is nothing to be bound to")
    answer = probe(tmp_path, 3, "q4_k", 8192, 256, 2, 1, "routed")
    first, *others = answer["affinities"]  # type: ignore[misc]
    assert others == [[min(os.sched_getaffinity(0))]] * 2
    # ggml-cpu.c:clear_numa_thread_affinity lets worker 0 run anywhere after each graph.
    assert len(first) > 1
