"""The machine that a command line is resolved on: environment, topology, what was tuned."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil

from numa.machine import read_topology
from numa.topology import Topology
from specoffload.config.environment import Environment, read_environment
from specoffload.config.tuned import Tuned, load_tuned


@dataclass(frozen=True)
class Host:
    """Read once; `n_allowed` processors are this process's, of `n_physical` cores."""

    environment: Environment
    topology: Topology
    tuned: Tuned
    n_physical: int
    n_allowed: int


def read_host(environment: Environment | None = None) -> Host:
    """This machine. Raises UsageError for a variable that cannot be understood."""
    environment = environment or read_environment()
    topology = read_topology()
    n_allowed = len(os.sched_getaffinity(0))
    return Host(
        environment,
        topology,
        load_tuned(environment.profile_folder, topology),
        psutil.cpu_count(logical=False) or n_allowed,
        n_allowed,
    )
