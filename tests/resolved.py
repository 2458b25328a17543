"""Configurations for tests, as the command line makes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from offload.stream.options import StreamingOptions
from specdec.options import SpecOptions
from specoffload.config.command_line import CommandLine, read_command_line
from specoffload.config.environment import Environment, read_host
from specoffload.config.options import Options
from specoffload.config.resolution import Config, resolve
from specoffload.config.values import min_batch


def line_of(*words: str, command: str = "run", **variables: str) -> CommandLine:
    """Read a command line in an environment that has only these variables."""
    return read_command_line(command, words, Environment(variables=variables))


def spec_of(given: Mapping[str, object]) -> SpecOptions:
    """Options of speculation.

    The keys of `given` are flags, or fields of SpecOptions that no flag sets. The value True stands
    for a flag without a value.
    """
    words: list[str] = []
    own: dict[str, Any] = {}
    for name, value in given.items():
        if not name.startswith("-"):
            own[name] = value
        else:
            words += [name] if value is True else [name, str(value)]
    return replace(line_of(*words).options.spec, **own)


def config_of(options: Options | None = None, **given: Any) -> Config:
    """A configuration, resolved on this machine.

    `given` are fields of Options, StreamingOptions or Config. `min_batch` may be text, and
    `spec_given` is passed to `spec_of`.
    """
    if "spec_given" in given:
        given["spec"] = spec_of(given.pop("spec_given"))
    if isinstance(given.get("min_batch"), str):
        given["min_batch"] = min_batch(given["min_batch"])
    asked = {name: given.pop(name) for name in _names(Options) & given.keys()}
    switches = {name: given.pop(name) for name in _names(StreamingOptions) & given.keys()}
    config = resolve(replace(options or Options(), **asked), read_host())
    return replace(config, streaming=replace(config.streaming, **switches), **given)


def _names(section: type) -> set[str]:
    return {field.name for field in fields(section)}
