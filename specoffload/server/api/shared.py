"""The parts that the models of one server share."""

from __future__ import annotations

from dataclasses import dataclass, field

from specoffload.server.api.body import HeldBodies
from specoffload.server.api.kept import KeptStreams
from specoffload.server.api.stored import StoredResponses


@dataclass(frozen=True)
class SharedParts:
    """Kept streams and responses, which any model may have written, and all bodies in memory."""

    streams: KeptStreams = field(default_factory=KeptStreams)
    stored: StoredResponses = field(default_factory=StoredResponses)
    bodies: HeldBodies = field(default_factory=HeldBodies)
