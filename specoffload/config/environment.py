"""Environment variables and facts of the machine, read once when a command starts.

No other module reads environment variables.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from numa.machine import cpu_quota, read_topology
from numa.topology import Topology
from specdec.user_path import user_path
from specoffload.errors import UsageError

if TYPE_CHECKING:
    from specoffload.kept_machine import Tuned

_MOST_MEASURE_S = 3600


@dataclass(frozen=True)
class Environment:
    """The values of the program's environment variables, which docs/flags.md lists.

    `variables` has all variables that begin with LLAMA_ or GGML_, empty ones too. Some of them
    stand for flags.
    """

    batch_costs: str | None = None  # GGML_BATCH_COSTS: T(n) for policies that read it
    max_look_ahead: int | None = None  # GGML_MAX_LOOK_AHEAD: sizes that the policy `costs` tries
    profile_folder: Path = Path(".cache/specoffload/profiles")  # folder that need not exist
    prompt_folder: Path = Path(".cache/specoffload/prompts")  # of --cache-disk without a folder
    measure_s: float | None = None  # SPECOFFLOAD_MEASURE_S: most seconds of a first measurement
    rpc_secret: str = field(default="", repr=False)  # SPECOFFLOAD_RPC_SECRET
    chat_history: Path = Path(".local/state/specoffload/chat-history")  # lines typed in `chat`
    llama_cache: Path = Path(".cache/llama.cpp")  # folder of llama.cpp's downloads
    ollama_folders: tuple[Path, ...] = ()  # folders that need not exist
    without: frozenset[str] = frozenset()  # SPECOFFLOAD_WITHOUT: parts to leave out
    variables: Mapping[str, str] = field(default_factory=dict)

    def of_drafts(self) -> list[str]:
        """Return the names of the variables on drafts that are set."""
        values = {"GGML_BATCH_COSTS": self.batch_costs, "GGML_MAX_LOOK_AHEAD": self.max_look_ahead}
        return [name for name, value in values.items() if value is not None]

    def without_drafts(self) -> Environment:
        """Return the environment without the variables on drafts."""
        return replace(self, batch_costs=None, max_look_ahead=None)


def read_environment(environ: Mapping[str, str] = os.environ) -> Environment:
    """Read the variables.

    Raises UsageError if there is no home folder, or SPECOFFLOAD_PROFILE_DIR is no folder name.
    """
    return Environment(
        batch_costs=environ.get("GGML_BATCH_COSTS") or None,
        max_look_ahead=_look_ahead(environ.get("GGML_MAX_LOOK_AHEAD")),
        profile_folder=_profile_folder(environ),
        prompt_folder=_caches(environ) / "specoffload" / "prompts",
        measure_s=_measure_s(environ.get("SPECOFFLOAD_MEASURE_S")),
        rpc_secret=environ.get("SPECOFFLOAD_RPC_SECRET", ""),
        chat_history=_state(environ) / "specoffload" / "chat-history",
        llama_cache=_named(environ, "LLAMA_CACHE") or _caches(environ) / "llama.cpp",
        ollama_folders=_ollama_folders(environ),
        without=frozenset(filter(None, environ.get("SPECOFFLOAD_WITHOUT", "").split(","))),
        variables={
            name: text for name, text in environ.items() if name.startswith(("LLAMA_", "GGML_"))
        },
    )


def _look_ahead(text: str | None) -> int | None:
    """Raises UsageError unless the text is empty or a whole number from 0 on."""
    if not text:
        return None
    if not (text.isascii() and text.isdigit()) or len(text) > 4:
        raise UsageError(
            f"GGML_MAX_LOOK_AHEAD={text:.20}: must be a number of batch sizes from 0 to 9999"
        )
    return int(text)


def _measure_s(text: str | None) -> float | None:
    """Raises UsageError unless the text is empty or a number of seconds above 0."""
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _MOST_MEASURE_S:
        raise UsageError(
            f"SPECOFFLOAD_MEASURE_S={text:.20}: must be a number of seconds above 0, at most "
            f"{_MOST_MEASURE_S}"
        )
    return seconds


def _profile_folder(environ: Mapping[str, str]) -> Path:
    """The folder of measurements. Raises UsageError for a name that the file system rejects."""
    named = _named(environ, "SPECOFFLOAD_PROFILE_DIR")
    if named is None:
        return _caches(environ) / "specoffload" / "profiles"
    try:
        named.exists()
    except (OSError, ValueError) as e:
        raise UsageError(
            f"SPECOFFLOAD_PROFILE_DIR={str(named):.60}...: not a folder name ({e})"
        ) from None
    return named


def _caches(environ: Mapping[str, str]) -> Path:
    return _named(environ, "XDG_CACHE_HOME") or _home() / ".cache"


def _state(environ: Mapping[str, str]) -> Path:
    return _named(environ, "XDG_STATE_HOME") or _home() / ".local" / "state"


def _named(environ: Mapping[str, str], variable: str) -> Path | None:
    """The folder in a variable; None if it is empty or not set."""
    named = environ.get(variable)
    return user_path(named) if named else None


def _home() -> Path:
    """The home folder. Raises UsageError if there is none.

    A user in a container may have neither HOME nor an entry in the user database.
    """
    try:
        return Path.home()
    except RuntimeError:
        raise UsageError(
            "this user has no home folder to keep models and measurements in: set HOME"
        ) from None


def _ollama_folders(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """The folder in OLLAMA_MODELS, else the folders of the user and of ollama's system service."""
    if named := _named(environ, "OLLAMA_MODELS"):
        return (named,)
    return (_home() / ".ollama" / "models", Path("/usr/share/ollama/.ollama/models"))


@dataclass(frozen=True)
class Host:
    """Facts of the machine that a command line's configuration depends on.

    `n_physical` is its number of cores. This process may use `n_allowed` processors, and
    `cpu_quota` processors' worth of time, if a control group limits it.
    """

    environment: Environment
    topology: Topology
    tuned: Tuned
    n_physical: int
    n_allowed: int
    cpu_quota: float | None = None


def read_host(environment: Environment | None = None) -> Host:
    """The facts of this machine. Raises UsageError for an invalid environment variable."""
    from specoffload.kept_machine import load_tuned  # loads pydantic, which --help does not need

    environment = environment or read_environment()
    topology = read_topology()
    n_allowed = len(os.sched_getaffinity(0))
    return Host(
        environment,
        topology,
        load_tuned(environment.profile_folder, topology),
        psutil.cpu_count(logical=False) or n_allowed,
        n_allowed,
        cpu_quota(),
    )
