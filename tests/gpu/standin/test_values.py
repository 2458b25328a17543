"""libcuda's stream memory operations on the stand-in, and the prototypes that use them.

https://docs.nvidia.com/cuda/archive/13.0.0/cuda-driver-api/group__CUDA__MEMOP.html describes the
calls. Each case runs in a process of its own, because the stand-in reads its settings only once.
"""

from __future__ import annotations

import contextlib
import ctypes as C
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
GEQ, EQ, AND, NOR, FLUSH = 0, 1, 2, 3, 1 << 30
INVALID_VALUE, NOT_SUPPORTED = 1, 801
LEFT_OUT = ("waits", "value_waits", "stream_syncs")


class Driver:
    """The runtime's and the driver's functions."""

    def __init__(self) -> None:
        self.runtime, self.driver = C.CDLL(None), C.CDLL("libcuda.so.1")
        for name in ("cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2"):
            getattr(self.driver, name).argtypes = [C.c_void_p, C.c_uint64, C.c_uint32, C.c_uint]
        self.runtime.standin_now_s.restype = C.c_double
        self.runtime.standin_set_rate.argtypes = [C.c_char_p, C.c_double]

    def made(self, name: str, *arguments: Any) -> int:
        found = C.c_void_p()
        assert getattr(self.runtime, f"cuda{name}")(C.byref(found), *arguments) == 0
        return found.value or 0

    def stream(self) -> int:
        return self.made("StreamCreateWithFlags", 1)  # non-blocking

    def words(self, n: int) -> Any:
        """Words of pinned memory that hold 0."""
        found = (C.c_uint32 * n).from_address(self.made("HostAlloc", C.c_size_t(4 * n), 0))
        found[:] = [0] * n
        return found

    def write(self, stream: int, address: int, value: int, flags: int = 0) -> int:
        return int(self.driver.cuStreamWriteValue32_v2(stream, address, value, flags))

    def wait(self, stream: int, address: int, value: int, flags: int = GEQ) -> int:
        return int(self.driver.cuStreamWaitValue32_v2(stream, address, value, flags))

    def synchronize(self, stream: int) -> None:
        assert self.runtime.cudaStreamSynchronize(C.c_void_p(stream)) == 0


def _holds(word: Any, at: int, value: int) -> bool:
    """Poll without a call of the runtime, as a host does that must not wait."""
    until_s = time.monotonic() + 10
    while word[at] != value and time.monotonic() < until_s:
        time.sleep(1e-4)
    return bool(word[at] == value)


def order() -> None:
    """A stream stops at a wait until the host writes. Others go on."""
    cuda = Driver()
    words = cuda.words(4)
    base = C.addressof(words)
    first, other = cuda.stream(), cuda.stream()
    assert cuda.wait(first, base, 7) == 0
    assert cuda.write(first, base + 4, 1) == 0
    assert cuda.write(other, base + 8, 2) == 0
    assert _holds(words, 2, 2)
    time.sleep(0.05)
    assert words[1] == 0, "the stream did not wait"
    words[0] = 6
    time.sleep(0.05)
    assert words[1] == 0, "6 is less than 7"
    words[0] = 8
    assert _holds(words, 1, 1), "8 is at least 7"
    cuda.synchronize(first)


def conditions() -> None:
    """The comparisons, of which GEQ is cyclic."""
    cuda = Driver()
    words = cuda.words(1)
    cases = ((GEQ, 5, 5, True), (GEQ, 5, 4, False), (GEQ, 3, 0xFFFFFFFE, False),
             (GEQ, 0xFFFFFFFE, 3, True), (EQ, 5, 6, False), (EQ, 6, 6, True), (AND, 6, 9, False),
             (AND, 6, 4, True))  # fmt: skip
    for flags, value, held, is_met in cases:
        stream, case = cuda.stream(), (flags, value, held)
        done = cuda.words(1)
        words[0] = held
        assert cuda.wait(stream, C.addressof(words), value, flags) == 0
        assert cuda.write(stream, C.addressof(done), 1) == 0
        time.sleep(0.02)
        assert (done[0] == 1) == is_met or is_met, case
        if not is_met:
            words[0] = value
        assert _holds(done, 0, 1), case
        cuda.synchronize(stream)


def refusals() -> None:
    """Misuse that the driver refuses, and what not every card can do."""
    cuda = Driver()
    words, stream = cuda.words(2), cuda.stream()
    base, pageable = C.addressof(words), C.create_string_buffer(64)
    device = cuda.made("Malloc", C.c_size_t(64))
    for call in (cuda.wait, cuda.write):
        assert call(stream, base + 2, 0) == INVALID_VALUE
        assert call(stream, C.addressof(pageable), 0) == INVALID_VALUE
        assert call(stream, 0, 0) == INVALID_VALUE
        assert call(stream, base, 0, 1 << 7) == INVALID_VALUE
        assert call(stream, device, 0) == 0
    assert cuda.write(stream, base, 1, 1) == 0, "a write without a barrier"
    assert cuda.wait(stream, base, 1, GEQ | FLUSH) == NOT_SUPPORTED
    assert cuda.wait(stream, base, 1, NOR) == NOT_SUPPORTED
    cuda.synchronize(stream)


def many() -> None:
    """64 streams, each of which waits for the one before it, in a circle that the host begins."""
    cuda = Driver()
    n, rounds = 64, 20
    words, streams = cuda.words(n), [cuda.stream() for _ in range(n)]
    base = C.addressof(words)
    for turn in range(1, rounds + 1):
        for i, stream in enumerate(streams):
            if i:
                assert cuda.wait(stream, base + 4 * (i - 1), turn) == 0
            else:
                assert cuda.wait(stream, base + 4 * (n - 1), turn - 1) == 0
            assert cuda.write(stream, base + 4 * i, turn) == 0
    assert _holds(words, n - 1, rounds)
    assert list(words) == [rounds] * n
    for stream in streams:
        cuda.synchronize(stream)


def watchdog() -> None:
    cuda = Driver()
    words, stream = cuda.words(1), cuda.stream()
    assert cuda.wait(stream, C.addressof(words), 41) == 0
    cuda.synchronize(stream)


def clock() -> None:
    """Waits last until the virtual time of the write, whichever side is earlier in real time."""
    cuda = Driver()
    for name in (b"value_write_s", b"value_wait_s", b"poll_s"):
        assert cuda.runtime.standin_set_rate(name, 1.0) == 0
    assert cuda.runtime.standin_set_rate(b"value_call_s", 0.0) == 0
    assert cuda.runtime.standin_set_rate(b"host_scale", 0.0) == 0
    cuda.runtime.standin_wait_until_s.argtypes = [C.c_double]
    cuda.runtime.standin_compute_for.argtypes = [C.c_void_p, C.c_double]
    cuda.runtime.standin_write_word.argtypes = [C.c_void_p, C.c_uint32]
    cuda.runtime.standin_await_word.argtypes = [C.c_void_p, C.c_uint32]
    words, stream = cuda.words(2), cuda.stream()
    base = C.addressof(words)
    start_s = cuda.runtime.standin_now_s()
    cuda.runtime.standin_compute_for(stream, 10.0)
    assert cuda.write(stream, base, 1) == 0
    assert cuda.wait(stream, base + 4, 1) == 0
    cuda.runtime.standin_await_word(base, 1)
    assert abs(cuda.runtime.standin_now_s() - start_s - 12.0) < 0.01, "compute, write, poll"
    cuda.runtime.standin_wait_until_s(start_s + 20.0)
    cuda.runtime.standin_write_word(base + 4, 1)
    cuda.runtime.standin_wait_until_s(start_s + 15.0)
    cuda.synchronize(stream)
    assert abs(cuda.runtime.standin_now_s() - start_s - 21.0) < 0.01, "the host's write, the wait"


def prototypes() -> None:
    """Prints how many layers' results arrived, of how many, for each way of the doorbell."""
    from lab.split_price import DOORBELL, WAITING, Prototype, compile_doorbell

    with tempfile.TemporaryDirectory() as scratch:
        library = compile_doorbell(Path(scratch))
        for way in (WAITING, DOORBELL):
            for is_pinned in (False, True):
                for n_ahead in (1, 2, 7):
                    layers = [(0.0, 0.0, 0.0)] * 12
                    made = Prototype(library, way, layers, 4096, 3, is_pinned=is_pinned,
                                     n_ahead=n_ahead)  # fmt: skip
                    for _ in range(4):
                        made.decode()
                    print(way, int(is_pinned), n_ahead, *made.sums)


def words() -> None:
    """Prints the steps that scripts/gpu-check measures, each with whether it took time."""
    sys.path.insert(0, str(ROOT / "scripts" / "gpu_check"))
    from words import NoWords, Words, measure_words

    for row in measure_words():
        print(row["taken_s"] > 0.0, row["step"])
    empty = Path(os.devnull)
    with contextlib.suppress(NoWords):
        Words(empty)
        print("a CUDA runtime was found in an empty list of libraries")


CASES: dict[str, Callable[[], None]] = {
    each.__name__: each
    for each in (order, conditions, refusals, many, watchdog, clock, prototypes, words)
}


def ran(case: str, **settings: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("STANDIN_")}
    env |= {"PYTHONPATH": os.pathsep.join(sys.path), **settings}
    return subprocess.run(
        [sys.executable, __file__, case], env=env, capture_output=True, text=True, timeout=100,
        check=False,
    )  # fmt: skip


_ORDERS = {"in order": {}, "with delays": {"STANDIN_JITTER": "500"},
           "as late as possible": {"STANDIN_LAZY": "1"}}  # fmt: skip


@pytest.mark.parametrize("settings", _ORDERS.values(), ids=_ORDERS)
@pytest.mark.parametrize("case", ["order", "conditions", "refusals", "many"])
def test_a_stream_waits_for_the_value(case: str, settings: dict[str, str]) -> None:
    done = ran(case, **settings)
    assert done.returncode == 0, done.stderr


def test_virtual_time_passes_until_the_write() -> None:
    done = ran("clock", STANDIN_CLOCK="1")
    assert done.returncode == 0, done.stderr


def test_a_value_that_never_comes_ends_the_process_with_a_sentence() -> None:
    began_s = time.monotonic()
    done = ran("watchdog", STANDIN_WATCHDOG="1")
    assert done.returncode < 0, "it aborts"
    assert "a stream has waited 1 s for the value 41" in done.stderr
    assert time.monotonic() - began_s < 20


@pytest.mark.parametrize("settings", _ORDERS.values(), ids=_ORDERS)
def test_prototypes_lose_no_row(settings: dict[str, str]) -> None:
    done = ran("prototypes", **settings)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert len(rows) == 12
    assert {tuple(row[3:]) for row in rows} == {("48", "48")}


@pytest.mark.parametrize("left_out", LEFT_OUT)
def test_a_missing_wait_loses_rows(left_out: str) -> None:
    done = ran("prototypes", STANDIN_JITTER="500", STANDIN_IGNORE=left_out)
    rows = [line.split() for line in done.stdout.splitlines()]
    wrong = {tuple(row[:2]) for row in rows if row[3] != row[4]}
    # Without synchronisations, only today's way and the last sum lack a wait.
    needs = {"waits": {("1", "0")}, "value_waits": {("1", "0"), ("1", "1")},
             "stream_syncs": {("0", "0"), ("0", "1")}}  # fmt: skip
    assert needs[left_out] <= wrong, done.stdout + done.stderr


def test_gpu_check_measures_words() -> None:
    done = ran("words")
    assert done.returncode == 0, done.stderr
    rows = done.stdout.splitlines()
    assert [row.split()[0] for row in rows] == ["True"] * 5, done.stdout
    assert len({*rows}) == 5


_MAIN = """
#include "doorbell.c"
#include <stdio.h>
int main(void) {
    struct layer layers[12] = {{0}};
    for (int way = WAITING; way <= DOORBELL; way++)
        for (int is_pinned = 0; is_pinned < 2; is_pinned++)
            for (int n_ahead = 1; n_ahead < 6; n_ahead += 2) {
                struct decoder d = {.way = way, .is_pinned = is_pinned, .n_layers = 12,
                                    .n_ahead = n_ahead, .layers = layers,
                                    .row_bytes = 4096, .n_rows = 3};
                int bad = doorbell_open(&d);
                for (int i = 0; i < 20 && !bad; i++) bad = doorbell_decode(&d);
                if (!bad && doorbell_sum(&d) == 240) continue;
                printf("%d %d %d\\n", way, is_pinned, n_ahead);
                return 1;
            }
    puts("all rows arrived");
    fflush(stdout);
    _exit(0);
}
"""


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_prototypes_under_a_sanitizer(sanitizer: str, tmp_path: Path) -> None:
    """The stand-in, compiled with the sanitizer too, runs them without a report."""
    from lab.split_price import cuda_headers

    # The loader would otherwise find the stand-in without the sanitizer first.
    hidden = ("LD_PRELOAD", "LD_LIBRARY_PATH")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    env |= {"STANDIN_SANITIZERS": sanitizer, "PYTHON": sys.executable}
    built = subprocess.run(
        [str(ROOT / "scripts" / "build-cuda-standin")], env=env, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    folder, main, program = Path(built.stdout.strip()), tmp_path / "main.c", tmp_path / "main"
    main.write_text("#include <unistd.h>\n" + _MAIN)
    subprocess.run(
        ["cc", "-O1", "-g", f"-fsanitize={sanitizer}", "-isystem", str(cuda_headers()),
         f"-I{ROOT / 'scripts' / 'lab'}", str(main), str(folder / "libcudart.so.13"),
         f"-Wl,-rpath,{folder}", "-o", str(program)],
        check=True, env=env,
    )  # fmt: skip
    for settings in ({}, {"STANDIN_JITTER": "300"}):
        done = subprocess.run(
            [str(program)], env=env | settings, capture_output=True, text=True, timeout=200,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout == "all rows arrived\n"
        assert done.stderr == ""


if __name__ == "__main__":
    threading.Timer(90, os._exit, (3,)).start()  # a host that waits for a word has no watchdog here
    CASES[sys.argv[1]]()
    sys.stdout.flush()
    os._exit(0)
