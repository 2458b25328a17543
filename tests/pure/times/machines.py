"""Simulated machines with known rates, in place of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from offload.times.search import TimingRequest, fill
from offload.times.table import CostTable, Way

N_EXPERTS, N_USED = 64, 4


def need(n: int) -> float:
    """The share of a layer's experts that n tokens use."""
    return 1.0 - (1.0 - N_USED / N_EXPERTS) ** n


@dataclass
class Simulated:
    """A model on a machine whose link, CPU and device have known rates.

    At link 1.0, copying all experts takes 1 s.
    """

    link: float = 1.0
    cpu: float = 1.0  # relative speed of the CPU's memory
    token_s: float = 0.004  # seconds per further token of computing experts on the CPU
    rest_s: float = 0.02  # seconds of computing resident weights
    noise: float = 0.02
    n_layers: int = 24
    spent_s: float = 0.0
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))

    def seconds(self, way: Way, n: int) -> float:
        link_s, cpu_s = need(n) / self.link, 0.5 * need(n) / self.cpu + self.token_s * n
        if way is Way.STREAMED:
            return self.rest_s + link_s + 1e-4 * n
        if way is Way.SPLIT:
            return self.rest_s + 0.004 + 1.0 / (1.0 / link_s + 1.0 / cpu_s)
        return self.rest_s + cpu_s

    def decode_s(self, way: Way, n: int) -> float:
        """Seconds of one decode. Noise only makes it longer."""
        took_s = self.seconds(way, n) * (1.0 + abs(self.rng.normal(0.0, self.noise)))
        self.spent_s += took_s
        return took_s

    def measured(self, request: TimingRequest, most_s: float) -> CostTable:
        """The cost table of a first start with `most_s` seconds for measuring.

        Long decodes are broken off after four layers.
        """
        table, began_s = CostTable(N_EXPERTS, N_USED), self.spent_s

        def part(way: Way, n: int) -> float:
            is_long = table.has(way) and table.seconds(way, n) >= 0.4
            return 4 / self.n_layers if is_long else 1.0

        def time_size(way: Way, n: int) -> list[float]:
            share, before_s = part(way, n), self.spent_s
            took_s = self.decode_s(way, n)
            self.spent_s = before_s + share * took_s
            return [took_s]

        request = replace(request, part=part)
        fill(table, request, time_size, lambda: most_s - (self.spent_s - began_s), "2026-01-02")
        return table
