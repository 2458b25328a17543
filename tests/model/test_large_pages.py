"""A model opens and decodes where the system's pages are larger than 4 KiB."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lab.synth import write_preset
from offload.model_file import read_facts

PROGRAM = """
import mmap, sys
page_bytes = int(sys.argv[2])
mmap.PAGESIZE = page_bytes or mmap.PAGESIZE

import numa.sys as system
from offload.plan import tables
from offload.plan import store_layout as layout
assert layout.PAGE_BYTES == tables._PAGE_BYTES == mmap.PAGESIZE

advise, n_advised = system.advise, 0
def checked(address, *arguments):
    global n_advised
    n_advised += 1
    assert address % mmap.PAGESIZE == 0, address
    return advise(address, *arguments)
system.advise = checked

from lab.options import Streaming, engine_options
from offload.engine import Engine, EngineOptions, open_engine
from offload.times.min_batch import MinBatch
from offload.store.store import StoreOptions

for ram_bytes in (None, int(sys.argv[3])):
    options = engine_options(
        device="sim", streaming=Streaming(), ram_bytes=ram_bytes,
        min_batch=MinBatch(1, 1), n_ctx=64, n_ubatch=16, n_outputs=16, n_threads=1,
        n_threads_batch=1,
    )
    with open_engine(sys.argv[1], options) as engine:
        read = engine.sequences.extend(0, [3, 1, 4, 1, 5])
        print(read.astype("<f4").tobytes().hex())
        assert (engine.opened.weights.store.experts is not None) == (ram_bytes is not None)
assert n_advised > 0
"""


@pytest.mark.parametrize("page_kib", [16, 64])
def test_a_mixture_opens_and_decodes_with_large_pages(page_kib: int, models: Path) -> None:
    # Experts as large as a page, so that some are on the disk with pages of any size.
    path = models / "large-pages.gguf"
    if not path.exists():
        write_preset("qwen3-30b-a3b", path, seed=1, quant="q8_0", n_embd=256, n_ff_exp=256)
    ram_bytes = str(int(0.9 * read_facts(path).expert_bytes))
    printed = []
    for page_bytes in (0, page_kib << 10):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(path), str(page_bytes), ram_bytes],
            capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        printed.append(done.stdout.split())
    assert len(printed[0]) == 2
    assert printed[0] == printed[1]
    assert printed[0][0] == printed[0][1]
