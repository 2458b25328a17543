"""Weights are laid out, read and given back in pages of the system, whatever their size.

The tests run in a process of its own whose `mmap.PAGESIZE` is larger than the kernel's. There, the
calls that a kernel with such pages refuses raise errors, as they do on arm64.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TESTS = (
    "tests/pure/plan/test_lookup_tables.py",
    "tests/pure/stream/test_store_layout.py",
    "tests/pure/stream/test_store_reading.py",
    "tests/pure/stream/test_disk_speed.py",
    "tests/pure/stream/test_expert_memory.py",
    "tests/pure/memory_nodes/test_numa_memory.py",
)
# These tests touch pages of the real size, or count bytes of experts that have small pages.
NOT_THERE = "not old_kernels and not given_back_under_pressure and not left_no_memory"
PLUGIN = '''
import mmap, os
PAGE = mmap.PAGESIZE = {page_bytes}

import numa.sys as system
from offload.plan import store_layout as layout
assert layout.PAGE_BYTES == PAGE

def strict(name, n_addresses):
    """The kernel accepts only addresses on page borders."""
    real = getattr(system, name)
    def checked(*args):
        assert all(at % PAGE == 0 for at in args[:n_addresses]), (name, args)
        calls.append(name)
        return real(*args)
    setattr(system, name, checked)

calls = []
strict("advise", 1)
strict("move_pages", 2)
strict("map_again", 1)
real_open, real_preadv, direct = os.open, os.preadv, set()

def open_file(path, flags, *args, **kwargs):
    found = real_open(path, flags, *args, **kwargs)
    (direct.add if flags & os.O_DIRECT else direct.discard)(found)
    return found

def preadv(descriptor, buffers, offset, *args):
    """A disk whose blocks are as large as pages. Only the last read of a file may be shorter."""
    if descriptor in direct:
        assert offset % PAGE == 0, offset
        calls.append("read")
    return real_preadv(descriptor, buffers, offset, *args)

os.open, os.preadv = open_file, preadv

def pytest_sessionfinish(session):
    missing = {{"advise", "move_pages", "read"}}.difference(calls)
    assert not missing, f"never called: {{missing}}"
'''


@pytest.mark.parametrize("page_kib", [16, 64])
def test_weights_are_read_and_given_back_in_pages_of_the_system(
    page_kib: int, tmp_path: Path
) -> None:
    (tmp_path / "large_pages.py").write_text(PLUGIN.format(page_bytes=page_kib << 10))
    paths = [str(tmp_path), str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "large_pages",
         "-p", "no:cacheprovider", "-k", NOT_THERE, *TESTS],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
