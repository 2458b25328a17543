"""Tables that are looked up are never in GPU memory, whether they are in RAM or on the disk."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
from library_log import log_lines
from on_gpu import options

from lab.synth.tables import ARCHITECTURES, write_with_table
from offload.device import DeviceChoice
from offload.engine import open_engine
from offload.model_file import read_facts
from offload.plan.store_layout import PAGE_BYTES
from offload.plan.tables import LookupTable, lookup_tables
from offload.plan.weights import device_bytes
from offload.store.reading import OpenFile

_MODEL_BUFFER = re.compile(r"(\S+) +model buffer size = +([\d.]+) MiB")


def table_is_in_memory(table: LookupTable) -> bool:
    entry, file = table.place.entry, OpenFile(table.place.file)
    first = entry.offset_bytes // PAGE_BYTES * PAGE_BYTES
    try:
        return file.is_cached(first, entry.offset_bytes + entry.size_bytes - first)
    finally:
        file.close()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_table_is_never_in_gpu_memory(gpu: DeviceChoice, models: Path, architecture: str) -> None:
    path = write_with_table(architecture, models / f"gpu_table_{architecture}.gguf")
    os.sync()  # the kernel drops no page that was not written to the disk
    facts = read_facts(path)
    (table,) = lookup_tables(facts)
    found = []
    for ram_bytes in (None, facts.expert_bytes + 1):
        opened = options(gpu, ram_bytes=ram_bytes)
        with log_lines() as lines, open_engine(path, opened) as engine:
            assert bool(engine.layout.on_disk) == (ram_bytes is not None)
            rows = [engine.sequences.extend(0, list(range(n, 2 * n))) for n in (3, 24, 1, 5)]
            found.append(np.concatenate(rows))
            if ram_bytes is None:
                assert table_is_in_memory(table), "it was dropped after loading"
            plan = engine.opened.plan
            assert plan is not None
            assert plan.resident_bytes + plan.streamed_bytes == device_bytes(facts)
        sizes = [(m[1], float(m[2]) * 2**20) for m in map(_MODEL_BUFFER.search, lines) if m]
        on_gpu = sum(size for name, size in sizes if name == engine.start.choice.name)
        in_ram = sum(size for name, size in sizes if name.startswith("CPU"))
        # Each buffer's size is rounded, and each tensor begins at a multiple of 256 bytes.
        assert 0 < on_gpu < plan.resident_bytes + 512 * len(facts.weights) + 2**14
        assert in_ram >= table.size_bytes - 2**14
    assert np.array_equal(*found)
