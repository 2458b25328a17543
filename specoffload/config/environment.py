"""The only reader of environment variables. Bad values raise; nothing is silently defaulted."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from specoffload.errors import UsageError

# llama.cpp's variables that mean the same here, by the name of the parameter they are for; typer
# reads them, and what is typed wins. Those of speculation are read here, because one that takes no
# effect in a run is noted where a typed flag would be an error.
LLAMA_ARGS = {
    "ctx_size": "LLAMA_ARG_CTX_SIZE",
    "threads": "LLAMA_ARG_THREADS",
    "batch_size": "LLAMA_ARG_BATCH",
    "ubatch_size": "LLAMA_ARG_UBATCH",
    "n_gpu_layers": "LLAMA_ARG_N_GPU_LAYERS",
    "n_cpu_moe": "LLAMA_ARG_N_CPU_MOE",
    "flash_attn": "LLAMA_ARG_FLASH_ATTN",
    "device": "LLAMA_ARG_DEVICE",
    "ctx_checkpoints": "LLAMA_ARG_CTX_CHECKPOINTS",
    "host": "LLAMA_ARG_HOST",
    "port": "LLAMA_ARG_PORT",
    "api_key": "LLAMA_API_KEY",
}
LLAMA_DRAFT = "LLAMA_ARG_SPEC_DRAFT_MODEL"
LLAMA_SPEC_ARGS = {
    "--spec-type": "LLAMA_ARG_SPEC_TYPE",
    "--spec-draft-n-max": "LLAMA_ARG_SPEC_DRAFT_N_MAX",
    "--spec-draft-n-min": "LLAMA_ARG_SPEC_DRAFT_N_MIN",
    "--spec-draft-p-min": "LLAMA_ARG_SPEC_DRAFT_P_MIN",
    "--spec-draft-p-split": "LLAMA_ARG_SPEC_DRAFT_P_SPLIT",
    "--spec-synth-len": "LLAMA_ARG_SPEC_SYNTH_LEN",
    "--spec-synth-rates": "LLAMA_ARG_SPEC_SYNTH_RATES",
}
_READ = frozenset({*LLAMA_ARGS.values(), *LLAMA_SPEC_ARGS.values(), LLAMA_DRAFT})


@dataclass(frozen=True)
class Environment:
    """Every variable that the program knows; docs/flags.md lists them."""

    batch_costs: str | None = None  # GGML_BATCH_COSTS (A02): selects the policy `costs`
    max_look_ahead: int | None = None  # GGML_MAX_LOOK_AHEAD (B13)
    profile_dir: str | None = None  # SPECOFFLOAD_PROFILE_DIR
    cache_home: str | None = None  # XDG_CACHE_HOME
    verbose: bool = False  # SPECOFFLOAD_VERBOSE
    draft: str | None = None  # LLAMA_ARG_SPEC_DRAFT_MODEL
    spec: Mapping[str, str] = field(default_factory=dict)  # LLAMA_SPEC_ARGS that are set, by flag
    unread: tuple[str, ...] = ()  # LLAMA_ARG_* that are set and mean nothing here

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
        draft=environ.get(LLAMA_DRAFT) or None,
        spec={flag: environ[name] for flag, name in LLAMA_SPEC_ARGS.items() if environ.get(name)},
        unread=tuple(
            name for name in sorted(environ) if name.startswith("LLAMA_ARG_") and name not in _READ
        ),
    )


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
