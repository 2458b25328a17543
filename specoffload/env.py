"""The only reader of environment variables. Bad values raise; nothing is silently defaulted."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from specoffload.errors import UsageError


@dataclass(frozen=True)
class Environment:
    """Every variable that the program knows; docs/flags.md lists them."""

    batch_costs: str | None = None  # GGML_BATCH_COSTS (A02): selects the policy `costs`
    max_look_ahead: int | None = None  # GGML_MAX_LOOK_AHEAD (B13)
    profile_dir: str | None = None  # SPECOFFLOAD_PROFILE_DIR
    cache_home: str | None = None  # XDG_CACHE_HOME
    verbose: bool = False  # SPECOFFLOAD_VERBOSE

    @property
    def profile_folder(self) -> Path:
        """Where profiles are kept; it need not exist."""
        if self.profile_dir is not None:
            return Path(self.profile_dir)
        home = Path(self.cache_home) if self.cache_home else Path.home() / ".cache"
        return home / "specoffload" / "profiles"


def read_environment(environ: Mapping[str, str] = os.environ) -> Environment:
    """Raises UsageError naming the variable and its value."""
    return Environment(
        batch_costs=environ.get("GGML_BATCH_COSTS") or None,
        max_look_ahead=_integer(environ, "GGML_MAX_LOOK_AHEAD"),
        profile_dir=environ.get("SPECOFFLOAD_PROFILE_DIR") or None,
        cache_home=environ.get("XDG_CACHE_HOME") or None,
        verbose=_switch(environ, "SPECOFFLOAD_VERBOSE"),
    )


def prepare_native_library(environ: MutableMapping[str, str] = os.environ) -> None:
    """What the native library reads for itself, set before it is loaded; what is set stays.

    Without GGML_CUDA_REGISTER_HOST ggml refuses to pin memory of ours; without GGML_NO_BACKTRACE
    an assertion starts a debugger.
    """
    environ.setdefault("GGML_CUDA_REGISTER_HOST", "1")
    environ.setdefault("GGML_NO_BACKTRACE", "1")


def _integer(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if not text:
        return None
    if not text.isdecimal():
        raise UsageError(f"{name}={text}: must be a whole number, 0 or more")
    return int(text)


def _switch(environ: Mapping[str, str], name: str) -> bool:
    text = environ.get(name, "")
    if text not in ("", "0", "1"):
        raise UsageError(f"{name}={text}: must be 0 or 1")
    return text == "1"
