"""The sensors of the stand-in's card are found by the address that the real ggml-cuda tells."""

from __future__ import annotations

import pytest

from offload.device import DeviceChoice
from specoffload.bench.card_power import watch_of


def test_the_cards_address_leads_to_its_sensors(
    standin: DeviceChoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert standin.device.pci_address == "0000:01:00.0"
    monkeypatch.setenv("STANDIN_NVML", "watts=61,joules=70")
    watch = watch_of(standin)
    assert watch.why_not == ""
    sums = watch.sums()
    with watch.watching(sums):
        pass
    assert sums.use is not None
    assert (sums.use.most_watts, sums.use.limit_watts) == (61.0, 200.0)
    monkeypatch.setenv("STANDIN_NVML", "fail=3")
    assert watch_of(standin).why_not.endswith("cannot be read: NVML: Not Supported")
