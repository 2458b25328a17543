"""The machine's tuned NUMA choice: one file beside the profiles, written by `tune numa`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from numa.errors import BadTopology
from numa.topology import Topology
from numa.tune import TuneResult, from_json, to_json
from specdec.whole_file import whole_file
from specoffload.errors import UsageError

FILE_NAME = "numa.json"
TUNE = "`specoffload tune numa`"


@dataclass(frozen=True)
class Tuned:
    """The choice measured on this machine, or None and, where there is something to say, why."""

    result: TuneResult | None = None
    why_not: str = ""


def load_tuned(folder: Path, topology: Topology) -> Tuned:
    """The stored choice if it is for this machine as it is now. A bad file is said, not used."""
    path = folder / FILE_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Tuned()
    except (OSError, UnicodeDecodeError) as error:
        return Tuned(None, f"{path} cannot be read ({error}): nothing tuned is used")
    try:
        result = from_json(text)
    except BadTopology as error:
        return Tuned(None, f"{path}: {error}; nothing tuned is used")
    if not result.is_for(topology):
        return Tuned(
            None,
            f"the tuned NUMA choice is for {result.machine}, which this machine no longer is:"
            f" not used, run {TUNE} again",
        )
    return Tuned(result)


def save_tuned(folder: Path, result: TuneResult) -> Path:
    """Write it at once or not at all. Raises UsageError for a folder that cannot be written."""
    path = folder / FILE_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as f:
            f.write(to_json(result).encode())
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written ({error.strerror}); SPECOFFLOAD_PROFILE_DIR names another"
            " folder"
        ) from error
    return path


def tuned_sentence(result: TuneResult) -> str:
    """The start-up line of a tuned choice, with its numbers."""
    trial = next(t for t in result.trials if t.candidate == result.best)
    times = ", ".join(f"T({n}) {s * 1e3:.1f} ms" for n, s in sorted(trial.seconds.items()))
    return f"measured by {TUNE}: {times}"
