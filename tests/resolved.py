"""Configurations for tests, as the command line makes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specdec.options import SpecOptions
from specoffload.config.command_line import CommandLine, read_command_line
from specoffload.config.environment import Environment
from specoffload.config.flags.reading import min_batch
from specoffload.config.host import read_host
from specoffload.config.options import Options
from specoffload.config.resolution import Config, resolve


def line_of(*words: str, command: str = "run", **variables: str) -> CommandLine:
    """A command line read in an environment of these variables alone."""
    return read_command_line(command, words, Environment(variables=variables))


def spec_of(given: Mapping[str, object]) -> SpecOptions:
    """Options of speculation by their flags; True is a switch."""
    words: list[str] = []
    for flag, value in given.items():
        words += [flag] if value is True else [flag, str(value)]
    return line_of(*words).options.spec


def config_of(options: Options | None = None, **fields: Any) -> Config:
    """Resolved on this machine; `spec_given` are flags of speculation by name,
    and `min_batch` may be text."""
    if "spec_given" in fields:
        fields["spec"] = spec_of(fields.pop("spec_given"))
    if isinstance(fields.get("min_batch"), str):
        fields["min_batch"] = min_batch(fields["min_batch"])
    return resolve(replace(options or Options(), **fields), read_host())
