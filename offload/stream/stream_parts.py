"""Types of the objects that a stream's executor shares with the player and with split layers."""

from __future__ import annotations

from dataclasses import dataclass

from offload.ggml.backend import Stream
from offload.ggml.hostbuffer import HostBufferType
from offload.routing.routing import RoutingGuess, RoutingRecorder
from offload.schedule.schedule import Schedule
from offload.schedule.slots import StreamCounters
from offload.stream.copy_queue import CopyQueue
from offload.stream.program import Likeliest
from offload.trace.trace import Trace


@dataclass(frozen=True)
class StreamParts:
    """A stream of a device, and what decides and executes the copies of its weights.

    `host` holds the weights that stream.
    """

    stream: Stream
    host: HostBufferType
    schedule: Schedule
    copies: CopyQueue
    counters: StreamCounters
    trace: Trace


@dataclass(frozen=True)
class RoutingParts:
    """The routing of a model's layers: guessed, recorded, and ranked by recent uses.

    `most_experts` is the largest number of experts in a layer, and `n_used` the largest number that
    a token uses. `recorder` is None if nothing is recorded.
    """

    guess: RoutingGuess
    recorder: RoutingRecorder | None
    likeliest: Likeliest
    most_experts: int
    n_used: int
