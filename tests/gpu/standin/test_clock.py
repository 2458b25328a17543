"""The stand-in's virtual clock: what copies and waits take, and steps of the real program."""

from __future__ import annotations

import ctypes as C
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
MIB = 1 << 20
LINK, VRAM = 1e9, 4e9  # bytes/s
COPY_S = 64 * MIB / LINK
TO_DEVICE, TO_HOST = 1, 2
MOST_OF_RESIDENT = 1.10  # the goal is 1.05, which not every machine reaches (docs/gpu.md)
MOST_RATIO = 1.08  # step ÷ max(copy, compute)
_RUNS = 6  # most runs of a measurement that other programs disturb


class Cuda:
    """The runtime's functions, with a clock whose calls and latencies take no time."""

    def __init__(self) -> None:
        self.library = C.CDLL(None)
        self.library.standin_now_s.restype = self.library.standin_waited_s.restype = C.c_double
        self.library.standin_set_rate.argtypes = [C.c_char_p, C.c_double]
        rates = {"link_bytes_per_s": LINK, "vram_bytes_per_s": VRAM, "staging_bytes_per_s": LINK,
                 "host_scale": 0.0}  # fmt: skip
        fixed = ("kernel_s", "copy_s", "launch_call_s", "copy_call_s", "event_call_s",
                 "sync_call_s", "idle_sync_call_s")  # fmt: skip
        for name, value in {**rates, **dict.fromkeys(fixed, 0.0)}.items():
            assert self.library.standin_set_rate(name.encode(), value) == 0
        assert self.library.standin_set_rate(b"no such rate", 1.0) == 1

    def now_s(self) -> float:
        return float(self.library.standin_now_s())

    def waited_s(self) -> float:
        return float(self.library.standin_waited_s())

    def call(self, name: str, *arguments: Any) -> None:
        assert getattr(self.library, f"cuda{name}")(*arguments) == 0

    def made(self, name: str, *arguments: Any) -> C.c_void_p:
        """What a function returns through its first argument."""
        found = C.c_void_p()
        self.call(name, C.byref(found), *arguments)
        return found

    def stream(self) -> C.c_void_p:
        return self.made("StreamCreateWithFlags", 1)  # non-blocking

    def copy(self, to: Any, source: Any, kind: int, stream: C.c_void_p) -> None:
        self.call("MemcpyAsync", to, source, C.c_size_t(64 * MIB), kind, stream)


def steps(cuda: Cuda) -> dict[str, float]:
    """Seconds of copies of 64 MiB in various orders, in units of one copy."""
    device = cuda.made("Malloc", C.c_size_t(128 * MIB))
    pinned = cuda.made("HostAlloc", C.c_size_t(128 * MIB), 0)
    pageable = C.create_string_buffer(64 * MIB)
    a, b = cuda.stream(), cuda.stream()
    event = cuda.made("EventCreateWithFlags", 2)
    upper = C.c_void_p((device.value or 0) + 64 * MIB)

    def both(first: int, second: int) -> None:
        for kind, stream in ((first, a), (second, b)):
            to, source = (device, pinned) if kind == TO_DEVICE else (pinned, upper)
            cuda.copy(to, source, kind, stream)

    def waits() -> None:
        cuda.copy(device, pinned, TO_DEVICE, a)
        cuda.call("EventRecord", event, a)
        cuda.call("StreamWaitEvent", b, event, 0)
        cuda.copy(pinned, upper, TO_HOST, b)

    def no_wait() -> None:
        cuda.copy(device, pinned, TO_DEVICE, a)

    def staged() -> None:
        cuda.copy(device, pageable, TO_DEVICE, a)

    ways: dict[str, Callable[[], None]] = {
        "one direction": lambda: both(TO_DEVICE, TO_DEVICE),
        "both directions": lambda: both(TO_DEVICE, TO_HOST),
        "in order": waits, "pageable": staged,
        "memset": lambda: cuda.call("MemsetAsync", device, 0, C.c_size_t(64 * MIB), a),
    }  # fmt: skip
    found = {}
    for name, way in ways.items():
        start_s = cuda.now_s()
        way()
        for stream in (a, b):
            cuda.call("StreamSynchronize", stream)
        found[name] = (cuda.now_s() - start_s) / COPY_S
    start_s, waited_s = cuda.now_s(), cuda.waited_s()
    no_wait()
    found["enqueued only"] = (cuda.now_s() - start_s) / COPY_S
    cuda.call("DeviceSynchronize")
    found["waited"] = (cuda.waited_s() - waited_s) / COPY_S
    return found


def test_copies_queue_for_an_engine_of_each_direction(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, __file__], env={**os.environ, "STANDIN_CLOCK": "1"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == pytest.approx({
        "one direction": 2.0, "both directions": 1.0, "in order": 2.0,
        "pageable": 2.0,  # the host stages all bytes, and then the engine copies them
        "memset": LINK / VRAM, "enqueued only": 0.0, "waited": 1.0,
    })  # fmt: skip


def virtual(*arguments: str, command: str = "virtual_gpu") -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", f"lab.{command}", "--json", *arguments],
        env={**os.environ, "STANDIN_CLOCK": "1", "STANDIN_SKIP": "products", "STANDIN_FILL": "0",
             "STANDIN_DEVICES": "2", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=580,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def undisturbed(part: str, key: str, most: float, *arguments: str) -> dict[str, dict[str, Any]]:
    """The rows of a part of the table by `key`, each of the run with its least ratio.

    The clock counts the host's own processor time. Other programs empty its caches, which makes
    that time longer. So a run with a ratio above `most` is repeated.
    """
    best: dict[str, dict[str, Any]] = {}
    for _ in range(_RUNS):
        for row in virtual("--only", part, *arguments)[part]:
            known = best.setdefault(row[key], row)
            best[row[key]] = min(known, row, key=lambda its: float(its["ratio"]))
        if all(row["ratio"] <= most for row in best.values()):
            break
    return best


@pytest.mark.timeout(1200)
def test_all_experts_in_slots_take_little_longer_than_a_resident_model() -> None:
    found = undisturbed("turns", "card", MOST_OF_RESIDENT)
    assert [*found] == ["RTX 4090", "RTX 3060", "H100"]
    for row in found.values():
        assert row["ratio"] <= MOST_OF_RESIDENT, row


def test_decodes_and_prompts_take_a_cards_time() -> None:
    """The table's rows, with a model of few layers and experts."""
    found = virtual(
        "--only", "cases", "--small", "--setup", "resident", "--setup", "100 % in slots"
    )
    steps = {(row["setup"], row["case"], row["card"]): row for row in found["cases"]}
    for card in ("RTX 4090", "RTX 3060", "H100"):
        resident = steps["resident", "decode", card]
        in_slots = steps["100 % in slots", "decode", card]
        assert in_slots["copy_s"] == 0.0
        prompt = steps["resident", "prompt of 4,096", card]
        assert prompt["step_s"] > 20 * resident["step_s"]
    slow, fast = (steps["resident", "prompt of 4,096", card] for card in ("RTX 3060", "RTX 4090"))
    # The host computes the embeddings, which takes as long for both. The rest is the cards' own.
    cards = 40 / 9
    host_s = (cards * fast["step_s"] - slow["step_s"]) / (cards - 1)
    assert 0.0 < host_s < 0.35 * fast["step_s"], "0.26 of it on two slow cores without AVX-512"


@pytest.mark.timeout(1200)
def test_copies_hide_behind_computation() -> None:
    found = undisturbed("overlap", "case", MOST_RATIO, "--small")
    for row in found.values():
        assert row["copy_s"] > 0.0
        assert row["step_s"] < 0.95 * row["serial_s"] or row["case"] == "verification batch"
        assert row["ratio"] <= MOST_RATIO, row
    cases = ["dense stream", "expert prefill", "prompt of 4 ubatches", "verification batch"]
    assert [*found] == cases


@pytest.mark.parametrize(
    ("case", "most_best", "most_ratio"),
    [
        ("CPU ÷ copy 1, 1 token", 0.75, 1.25),
        ("CPU ÷ copy 1, 4 tokens", 0.7, 1.1),
        ("CPU ÷ copy 0.4, 1,024 tokens", 0.95, 1.25),  # in passes
        ("CPU ÷ copy 1.7, 512 tokens", 0.7, 1.1),  # in passes
    ],
)
def test_a_layers_two_sides_compute_at_once(case: str, most_best: float, most_ratio: float) -> None:
    """If one side began when the other had ended, a step would take as long as its copies."""
    (row,) = virtual("-r", "2", "--case", case, command="split")["split"]
    assert row["case"] == case
    assert min(row["cpu_s"], row["copy_s"]) > 0.15, "at least 20 experts of 8 ms"
    assert row["both_s"] == pytest.approx(1 / (1 / row["cpu_s"] + 1 / row["copy_s"]))
    assert row["best"] == pytest.approx(row["step_s"] / min(row["cpu_s"], row["copy_s"]))
    assert row["best"] < most_best
    assert row["ratio"] == pytest.approx(row["step_s"] / row["both_s"])
    assert row["ratio"] < most_ratio


# Largest ratio of a layer's time to its bound on an RTX 4090, by number of experts on the CPU.
# docs/gpu.md has 1.21 and 1.10. Much of what is above the bound is this machine's own processor
# time, so a slower processor makes it longer, and the limits are far. Layers of the same run that
# wait are the nearer limit. docs/gpu.md has 1.36 and 1.16 for them.
MOST_OF_BOUND = {1: 1.54, 4: 1.24}


@pytest.mark.timeout(1200)
def test_layers_with_a_doorbell_end_soon_after_their_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound: the device's work up to the router, then the longer one of both sides.

    The limits are about 60 us. The host's own time counts, so a disturbed run is repeated.
    """
    monkeypatch.setenv("STANDIN_TIMELINE", str(tmp_path / "timeline"))
    best: dict[int, dict[str, float]] = {}
    for _ in range(_RUNS):
        for row in virtual("--model", "Qwen3-30B-A3B", command="split_price")["rung"]:
            known = best.setdefault(row["n_host"], row)
            best[row["n_host"]] = min(known, row, key=lambda its: float(its["ratio"]))
        if all(row["ratio"] <= MOST_OF_BOUND[n] for n, row in best.items()):
            break
    assert {*best} == {*MOST_OF_BOUND}
    for n, row in best.items():
        assert 1.0 < row["ratio"] <= MOST_OF_BOUND[n], row
        assert row["layer_s"] < row["waiting_s"], row


if __name__ == "__main__":
    print(json.dumps(steps(Cuda())))
