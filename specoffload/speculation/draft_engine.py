"""Which engine computes the draft: libllama, or torch where it can; the faster, measured once.

What was measured is kept in a file beside the profiles, with a key of what it is true of.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from offload.model import ModelFacts
from offload.native_build import library_build
from specdec.whole_file import write_json
from specoffload.config.options import DraftEngine
from specoffload.speculation.profile_store import model_hash

_FORMAT = 1


@dataclass(frozen=True)
class EngineKey:
    """The file, device, settings and builds that a comparison of the engines is true of."""

    draft: str  # hash of the file
    device: str
    settings: str
    build: str  # of libllama and of torch


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one drafted token by either engine."""

    llama_s: float
    torch_s: float

    @property
    def faster(self) -> DraftEngine:
        return DraftEngine.TORCH if self.torch_s < self.llama_s else DraftEngine.LLAMA

    @property
    def words(self) -> str:
        return (
            f"a token takes {self.torch_s * 1e3:.2f} ms in torch and "
            f"{self.llama_s * 1e3:.2f} ms in libllama"
        )


def engine_key(facts: ModelFacts, device: str, settings: Mapping[str, object]) -> EngineKey:
    """The key of a comparison made now; `settings` are what both engines were opened with."""
    words = ", ".join(f"{name} {value}" for name, value in sorted(settings.items()))
    return EngineKey(model_hash(facts), device, words, f"{library_build()}, torch {_torch()}")


def _torch() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return "none"


def times_path(folder: Path, facts: ModelFacts, key: EngineKey) -> Path:
    """The file of this draft and these settings."""
    names = (str(facts.path.resolve()), key.device, key.settings)
    digest = hashlib.sha256("\0".join(names).encode()).hexdigest()[:12]
    return folder / f"{facts.path.stem}-{digest}-engines.json"


def load_times(path: Path, key: EngineKey) -> tuple[StepTimes | None, str]:
    """The times measured before, or None and why they are measured now."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None, "measured for the first time"
    except (OSError, ValueError, RecursionError) as e:
        return None, f"{path} cannot be read ({e}), so measured anew"
    times = _parsed(data)
    if times is None:
        return None, f"{path} is damaged, so measured anew"
    if data.get("key") != asdict(key):
        return None, f"{path} is of another file or build, so measured anew"
    return times, "as measured before"


def _parsed(data: Any) -> StepTimes | None:
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        return None
    values = [data.get(f"{engine}_s") for engine in ("llama", "torch")]
    good = [isinstance(v, float) and 0 < v < 1e9 for v in values]
    return StepTimes(*values) if all(good) else None  # type: ignore[arg-type]


def store_times(path: Path, key: EngineKey, times: StepTimes) -> str:
    """Write it; "" when done, else why not."""
    data = {"format": _FORMAT, "key": asdict(key), **asdict(times)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, data)
    except OSError as e:
        return f"not stored ({e}); SPECOFFLOAD_PROFILE_DIR names another folder"
    return ""
