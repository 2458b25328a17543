"""Measured costs of split layers and decodes timed both ways, kept beside the profiles.

A file is true of one ProfileKey. One of another key, or one that is damaged, is not used, and why
is said: who reads it measures anew.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import date
from glob import escape
from pathlib import Path
from typing import Any

from offload.plan.machine import Sharing
from offload.plan.placement import MeasuredDecode
from offload.split.costs import MOST_ROWS, MeasuredCosts, from_json, to_json
from specdec.costs.profile import ProfileKey
from specdec.whole_file import read_text, write_json

_FORMAT = 3
_MOST_BYTES = 1 << 20
_DAMAGED = (KeyError, TypeError, AttributeError, ValueError, OverflowError)
_MOST_FILES = 32  # of one model that are looked through
_OF_PLACE = ("model", "threads", "device", "build")  # of a key: all but the plan


@dataclass(frozen=True)
class DecodeTimes:
    """Seconds of a decode by batch size, of sizes of up to `n_most` tokens."""

    n_most: int
    old_s: Mapping[int, float]  # by min-batch alone
    split_s: Mapping[int, float]


@dataclass(frozen=True)
class MeasuredSplit:
    """One measurement of split layers. With neither costs nor times it is not kept."""

    costs: MeasuredCosts | None  # None: the layer to be timed had no expert in a slot
    times: DecodeTimes | None  # None: nothing was compared, as --hybrid on needs it
    measured_on: date
    sharing: Sharing  # of the plan that it was measured with


def load_split(path: Path, key: ProfileKey, n_compared: int) -> tuple[MeasuredSplit | None, str]:
    """The measurement that was kept, or None; and in either case the words for it.

    Batches of up to `n_compared` tokens have to have been timed both ways; 0 where nothing is
    compared.
    """
    try:
        data = json.loads(read_text(path, _MOST_BYTES))
    except FileNotFoundError:
        return None, "nothing was kept yet"
    except (OSError, ValueError, RecursionError) as e:
        return None, f"{path} cannot be read: {e}"
    try:
        if data["format"] != _FORMAT:
            return None, f"{path} is of another version: its format is {data['format']!r:.40}"
        if (difference := ProfileKey(**data["key"]).difference(key)) is not None:
            return None, f"{path} is of another run: {difference:.600}"
        found = _from_data(data)
    except _DAMAGED as e:
        return None, f"{path} is damaged: {e!r:.200}"
    n_before = 0 if found.times is None else found.times.n_most
    if n_before < n_compared:
        return None, f"{path} compares batches of up to {n_before} tokens, not {n_compared}"
    return found, f"kept from {found.measured_on}: {path}"


def kept_decodes(folder: Path, stem: str, key: ProfileKey) -> tuple[MeasuredDecode, ...]:
    """Decodes of one token as earlier starts timed them by whatever plan, in the faster of both
    ways, the last comes last: those of a model file of that stem with the bytes, threads, device
    and library of `key`. A file that is damaged is left to who needs that very file."""
    found = []
    for path in _oldest_first(folder.glob(f"{escape(stem)}-*-split.json"))[-_MOST_FILES:]:
        try:
            data = json.loads(read_text(path, _MOST_BYTES))
            same = all(data["key"][name] == getattr(key, name) for name in _OF_PLACE)
            if data["format"] != _FORMAT or not same:
                continue
            split = _from_data(data)
        except (OSError, RecursionError, *_DAMAGED):
            continue
        if split.times is not None and 1 in split.times.old_s:
            seconds = min(split.times.old_s[1], split.times.split_s[1])
            found.append(MeasuredDecode(split.sharing, seconds))
    return tuple(found)


def _oldest_first(paths: Iterable[Path]) -> list[Path]:
    dated = []
    for path in paths:
        with suppress(OSError):
            dated.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(dated)]


def store_split(path: Path, key: ProfileKey, split: MeasuredSplit) -> str | None:
    """Write it; None when done, else why not. A run does not fail for a folder it cannot write."""
    times, costs = split.times, split.costs
    assert not (times is None and costs is None)
    data = {
        "format": _FORMAT,
        "key": asdict(key),
        "measured_on": split.measured_on.isoformat(),
        "sharing": asdict(split.sharing),
        "costs": None if costs is None else to_json(costs),
        "times": None if times is None else _times_as_data(times),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, data)
    except OSError as e:
        return f"not kept: {e}"
    return None


def _times_as_data(times: DecodeTimes) -> dict[str, Any]:
    return {
        "n_most": times.n_most,
        "old_s": sorted(times.old_s.items()),
        "split_s": sorted(times.split_s.items()),
    }


def _from_data(data: Mapping[str, Any]) -> MeasuredSplit:
    """Raises ValueError, KeyError, TypeError, AttributeError or OverflowError for a damaged one."""
    times, costs = data["times"], data["costs"]
    measured_on = date.fromisoformat(data["measured_on"])
    if times is None and costs is None:
        raise ValueError("neither costs nor times")
    return MeasuredSplit(
        None if costs is None else from_json(costs),
        None if times is None else _times_from_data(times),
        measured_on,
        Sharing(**{name: _count(n) for name, n in data["sharing"].items()}),
    )


def _times_from_data(data: Mapping[str, Any]) -> DecodeTimes:
    n_most = _n_tokens(data["n_most"])
    old_s, split_s = (
        {_n_tokens(n): _seconds(s) for n, s in data[way]} for way in ("old_s", "split_s")
    )
    if not old_s or old_s.keys() != split_s.keys():
        raise ValueError(f"sizes {sorted(old_s)} and {sorted(split_s)} cannot be compared")
    return DecodeTimes(n_most, old_s, split_s)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 40:
        raise ValueError(f"{value!r:.40} is no number of layers or slots")
    return int(value)


def _n_tokens(value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MOST_ROWS:
        raise ValueError(f"{value!r:.40} is no size of a batch that is split")
    return int(value)


def _seconds(value: Any) -> float:
    seconds = float(value)
    if not 0.0 < seconds < math.inf:
        raise ValueError(f"{value!r:.40} s is no time of a decode")
    return seconds
