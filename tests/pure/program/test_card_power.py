"""A card's power and clocks are read beside decodes, from NVML or sysfs, or it is said why not.

NVML is the stand-in's library, which the real nvidia-ml-py loads. The sysfs is a folder.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import false_nvml
import pytest

from specoffload.bench.card_meters import CardReading, NoReading, open_meter
from specoffload.bench.card_power import CardSums, CardWatch, use_words, watch_of
from specoffload.bench.comparison import card_rows
from specoffload.bench.paths import Measured
from specoffload.generation.statistics import GenerationStats

CARD = "0000:01:00.0"


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let nvidia-ml-py find the stand-in's library."""
    built = false_nvml.compiled(tmp_path_factory.mktemp("nvml"))
    if built is None:
        pytest.skip("no C compiler")
    false_nvml.loaded(built)


def hwmon(root: Path, **files: str) -> Path:
    """A sysfs in which the card has these files of sensors."""
    folder = root / "sys/bus/pci/devices" / CARD / "hwmon/hwmon3"
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return root


# ---- meters


@pytest.mark.usefixtures("nvml")
def test_nvml_tells_power_limit_energy_and_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_NVML", "watts=61.5,limit=200,core=1410,memory=5001,joules=40")
    meter = open_meter(CARD, Path("/nowhere"))
    found = meter.read()
    assert (found.watts, meter.limit_watts) == (61.5, 200.0)
    assert (found.core_hz, found.memory_hz) == (1410e6, 5001e6)
    assert found.joules == pytest.approx(40 * found.at_s, rel=0.01)


@pytest.mark.usefixtures("nvml")
def test_sensors_that_a_card_lacks_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_NVML", "core=0,memory=0")
    found = open_meter(CARD, Path("/nowhere")).read()
    assert found.watts == 60.0
    assert (found.joules, found.core_hz, found.memory_hz) == (None, None, None)


@pytest.mark.usefixtures("nvml")
@pytest.mark.parametrize(
    ("says", "address", "why"),
    [
        ("fail=3", CARD, "NVML: Not Supported"),
        ("fail=15", CARD, "NVML: .*lost"),
        ("init=9", CARD, "NVML: "),
        ("", "0000:07:00.0", "NVML: Not Found"),
        ("", None, "does not tell its PCI address"),
    ],
)
def test_a_card_without_a_reading_has_a_reason(
    monkeypatch: pytest.MonkeyPatch, says: str, address: str | None, why: str
) -> None:
    monkeypatch.setenv("STANDIN_NVML", says)
    with pytest.raises(NoReading, match=why):
        open_meter(address, Path("/nowhere"))


def test_without_the_package_the_reason_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NoReading, match=r"pip install 'specoffload\[power\]'"):
        open_meter(CARD, Path("/nowhere"))


@pytest.mark.parametrize("name", ["power1_average", "power1_input"])
def test_amdgpus_sensors_are_read_from_sysfs(tmp_path: Path, name: str) -> None:
    files = {name: "61000000\n", "power1_cap": "203000000\n", "freq1_input": "2100000000\n"}
    root = hwmon(tmp_path, **files, freq2_input="1249000000")
    meter = open_meter(CARD.upper(), root)
    found = meter.read()
    assert (found.watts, meter.limit_watts) == (61.0, 203.0)
    assert (found.core_hz, found.memory_hz, found.joules) == (2.1e9, 1.249e9, None)


def test_amdgpus_sensors_may_be_missing_or_fail(tmp_path: Path) -> None:
    root = hwmon(tmp_path, power1_average="61000000", freq1_input="no number")
    meter = open_meter(CARD, root)
    assert meter.limit_watts is None
    assert meter.read().core_hz is None
    next(root.rglob("power1_average")).write_text("")  # a card that is asleep
    with pytest.raises(NoReading, match="power1_average cannot be read"):
        meter.read()


# ---- sums


def test_power_is_the_energy_of_the_stretches_alone() -> None:
    sums = CardSums(200.0)
    for at_s, watts, joules in ((0.0, 50, 1000), (1.0, 70, 1080), (2.0, 60, 1120)):
        sums.add(CardReading(at_s, watts, joules, 1e9, 5e9))
    sums.end_stretch()
    sums.add(CardReading(10.0, 20, 9000))  # what was taken in between is not counted
    sums.add(CardReading(11.0, 40, 9060))
    use = sums.use
    assert use is not None
    assert use.watts == pytest.approx((80 + 40 + 60) / 3)
    assert (use.least_watts, use.most_watts, use.limit_watts, use.n_readings) == (20, 70, 200, 5)
    assert (use.core_hz, use.memory_hz) == (1e9, 5e9)
    assert use_words(use) == ("60 of 200 W", "1000 MHz", "5000 MHz")


def test_a_mean_without_a_counter_lies_between_the_readings() -> None:
    for seed in range(50):
        draw = random.Random(seed)
        clocks = [draw.choice([None, 1e9, 2e9]) for _ in range(draw.randint(1, 5))]
        sums = CardSums()
        for at_s, hz in enumerate(clocks):
            sums.add(CardReading(float(at_s), draw.uniform(1, 500), None, hz))
        use = sums.use
        assert use is not None
        assert use.least_watts <= use.watts * (1 + 1e-9)
        assert use.watts <= use.most_watts * (1 + 1e-9)
        assert (use.core_hz is None) is all(hz is None for hz in clocks)
        assert use.core_hz is None or 1e9 <= use.core_hz <= 2e9


def test_a_counter_that_goes_back_or_stands_still_counts_no_energy() -> None:
    sums = CardSums()
    for at_s, joules in ((0.0, 500.0), (1.0, 3.0), (2.0, 33.0), (2.0, 40.0)):
        sums.add(CardReading(at_s, 90.0, joules))
    assert sums.use is not None
    assert sums.use.watts == 30.0
    still = CardSums()
    still.add(CardReading(0.0, 90.0, 5.0))
    still.add(CardReading(0.1, 70.0, 5.0))
    assert still.use is not None
    assert still.use.watts == 80.0  # of the readings, since the counter told nothing


def test_without_a_reading_there_is_no_use() -> None:
    assert CardSums().use is None
    assert use_words(None) == ("-", "-", "-")


# ---- watching


@dataclass
class FakeMeter:
    """A meter that fails at a reading, or holds one up."""

    limit_watts: float | None = 200.0
    fails_at: int = -1
    holds_at: int = -1
    n_read: int = 0
    threads: set[str] = field(default_factory=set)
    go_on: threading.Event = field(default_factory=threading.Event)

    def read(self) -> CardReading:
        self.threads.add(threading.current_thread().name)
        self.n_read += 1
        if self.n_read - 1 == self.fails_at:
            raise NoReading("NVML: GPU is lost")
        if self.n_read - 1 == self.holds_at:
            self.go_on.wait(30)
        return CardReading(time.monotonic(), 60.0)


def test_a_thread_of_its_own_reads_until_the_block_ends() -> None:
    meter = FakeMeter()
    watch = CardWatch(meter, period_s=0.001)
    sums = watch.sums()
    with watch.watching(sums):
        while meter.n_read < 5:
            time.sleep(0.001)
    n_read = meter.n_read
    assert threading.current_thread().name not in meter.threads
    assert sums.use is not None
    assert sums.use.n_readings == n_read
    with watch.watching(CardWatch(meter).sums()):
        pass  # a block without a pause has a first and a last reading
    assert meter.n_read == n_read + 2
    assert not [thread for thread in threading.enumerate() if thread.name == "card power"]


def test_a_card_that_is_lost_is_said_and_ends_nothing() -> None:
    meter = FakeMeter(fails_at=1)
    watch = CardWatch(meter, period_s=0.001)
    sums = watch.sums()
    with watch.watching(sums):
        while not watch.why_not:
            time.sleep(0.001)
    assert watch.why_not == "NVML: GPU is lost"
    assert sums.use is not None
    assert sums.use.n_readings == 1
    with watch.watching(sums):
        pass
    assert meter.n_read == 2  # it is not asked again


def test_sensors_that_hang_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specoffload.bench.card_power._PATIENCE_S", 0.05)
    meter = FakeMeter(holds_at=1)
    watch = CardWatch(meter, period_s=0.001)
    sums = watch.sums()
    with watch.watching(sums):
        while meter.n_read < 2:
            time.sleep(0.001)
    assert watch.why_not == "its sensors gave no answer for 0.05 s"
    meter.go_on.set()
    for thread in threading.enumerate():
        if thread.name == "card power":
            thread.join(30)
    assert sums.use is not None
    assert sums.use.n_readings == 1  # the late reading belongs to another time


def test_a_device_that_is_no_card_is_not_read() -> None:
    watch = watch_of(SimpleNamespace(name="cpu", on_gpu=False))  # type: ignore[arg-type]
    assert watch.why_not == "cpu is no graphics card"
    sums = watch.sums()
    with watch.watching(sums):
        pass
    assert sums.use is None


@pytest.mark.usefixtures("nvml")
def test_a_card_is_found_by_its_pci_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_NVML", "watts=61")
    device = SimpleNamespace(pci_address=CARD)
    card = SimpleNamespace(name="CUDA0", on_gpu=True, device=device)
    watch = watch_of(card, Path("/nowhere"))  # type: ignore[arg-type]
    sums = watch.sums()
    with watch.watching(sums):
        pass
    assert watch.why_not == ""
    assert sums.use is not None
    assert sums.use.watts == 61.0
    device.pci_address = "0000:09:00.0"
    why = watch_of(card, Path("/nowhere")).why_not  # type: ignore[arg-type]
    assert why == "the power of CUDA0 cannot be read: NVML: Not Found"


def test_a_row_has_the_rate_of_copies_beside_the_power() -> None:
    sums = CardSums(200.0)
    sums.add(CardReading(0.0, 60.0, None, 1.4e9))
    stats = GenerationStats(
        n_prompt_tokens=1, n_tokens=8, prefill_s=1.0, decode_s=2.0, n_rounds=8,
        streamed_bytes=6_000_000_000,
    )  # fmt: skip
    found = {"wrapped": Measured((stats,), (1.0,), (0,), sums.use)}
    assert card_rows(found) == [("streamed", "3.00 GB/s", "60 of 200 W", "1400 MHz", "-")]
