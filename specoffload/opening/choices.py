"""Holds the choices of a start beside its configuration: drafters, ways to compute, the context."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from offload.device import DeviceChoice, start_devices
from offload.notes import Note, NoteKind
from offload.times.min_batch import NEVER, MinBatch
from specoffload.config.options import Toggle
from specoffload.config.placing import HybridChoice
from specoffload.config.resolution import Config
from specoffload.config.speculation import SpecConfig, ignored

log = logging.getLogger("specoffload.session")

_NOTHING_STREAMS = MinBatch(NEVER, NEVER)


@dataclass(frozen=True)
class StartChoices:
    """The choices of a start. They take the place of the fields of `Config` with the same names.

    `spec` has drafters that can draft. `n_ctx` is the context, or None while it is not chosen, and
    0 for the model's own length.
    """

    spec: SpecConfig
    min_batch: MinBatch | None  # None: measured when the model is opened
    hybrid: HybridChoice
    n_ctx: int | None

    @classmethod
    def as_asked(cls, config: Config) -> StartChoices:
        """The choices of a start that changes nothing that the user asked for."""
        return cls(config.spec, config.min_batch, config.hybrid, config.ctx_size)

    def on_device(self, choice: DeviceChoice) -> StartChoices:
        """Return the choices by which nothing streams if the device shares the RAM with the CPU.

        A copy would take as long as the product itself, and memory twice. The CPU computes the
        weights that the device has no room for, in place.
        """
        if not choice.shares_ram:
            return self
        hybrid = HybridChoice(Toggle.OFF, reason=_nothing_streams_reason(choice))
        return replace(self, min_batch=_NOTHING_STREAMS, hybrid=hybrid)


def devices_of(config: Config) -> tuple[DeviceChoice, ...]:
    """Return the local devices that a start of the target may use. Raises DeviceUnavailable."""
    return start_devices(config.device, config.tensor_split, has_workers=config.remote.is_used)


def shared_ram_notes(choice: DeviceChoice, config: Config) -> tuple[str, ...]:
    """Sentences on flags without effect, and on what a device that shares the RAM computes.

    Those on flags are logged too. Returns none for other devices.
    """
    if not choice.shares_ram:
        return ()
    reason = _nothing_streams_reason(choice)
    asks_batch = config.min_batch not in (None, _NOTHING_STREAMS)
    given = {"--min-batch": asks_batch, "--hybrid": config.hybrid.asked}
    unused = [ignored(flag, reason) for flag, is_given in given.items() if is_given]
    for words in unused:
        log.warning("%s", words)
    where = f"{reason}: the CPU computes the weights that it has no room for"
    return (*unused, Note(NoteKind.MIN_BATCH, where))


def _nothing_streams_reason(choice: DeviceChoice) -> str:
    return f"{choice.name} shares the RAM with the CPU, so nothing is copied to it"
