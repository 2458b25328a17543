"""Profiles, traces and lookup caches with damage: each is read, or refused in one sentence."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from random import Random

from lab.attack import ATTACK
from lab.attack.outcome import Breach, Outcome
from offload.errors import OffloadError
from offload.trace import LANES, Trace
from offload.trace_report import read_report
from specdec.costs.profile import CostProfile
from specdec.costs.profile_io import load, save
from specdec.drafters.lookup import LookupCache
from specdec.errors import SpecDecError

_LIMIT_S = 10
_MOST_WORDS = 1000


def files_part(seed: int, numbers: range, folder: Path) -> Outcome:
    outcome = Outcome("files", len(numbers))
    kinds = _written(folder)
    for number in numbers:
        rng = Random(f"{seed}/{number}")
        name, (whole, read_back) = list(kinds.items())[number % len(kinds)]
        path = folder / f"damaged.{name}"
        path.write_bytes(damaged(rng, whole))
        ended, breach = _tried(read_back, path)
        outcome.tally[f"{name} {ended}"] += 1
        if breach:
            command = f"{ATTACK} --part files --seed {seed} --only {number}"
            outcome.breaches.append(Breach(f"{name}: {breach}", command))
    return outcome


def _written(folder: Path) -> dict[str, tuple[bytes, Callable[[Path], object]]]:
    """A whole file of each kind, and what reads it."""
    profile, trace, cache = folder / "profile", folder / "trace", folder / "cache"
    depths = ((0, (1.0, 1.2)), (100, (1.1, 1.3)))
    save(profile, CostProfile((1.0, 1.2, 1.3, 1.5), 0.1, depths=depths, uncertain=(3,)))
    events = Trace()
    for i in range(30):
        events.add(LANES[i % len(LANES)], "copy", i / 100, (i + 1) / 100, layer=i, bytes=100)
    events.write(trace)
    lookups = LookupCache()
    lookups.add([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 4], 0)
    lookups.save(cache)
    return {
        "profile": (profile.read_bytes(), load),
        "trace": (trace.read_bytes(), lambda path: read_report(path).as_json()),
        "cache": (cache.read_bytes(), lambda path: LookupCache.load(path, n_vocab=100)),
    }


def damaged(rng: Random, whole: bytes) -> bytes:
    """The file with one thing wrong; JSON by its values too."""
    kind = rng.randrange(8)
    at = rng.randrange(len(whole))
    if kind == 0:
        return whole[:at]
    if kind == 1:
        return whole[:at] + bytes([rng.randrange(256)]) + whole[at + 1 :]
    if kind == 2:
        return whole[:at] + rng.randbytes(rng.choice((1, 4, 100))) + whole[at:]
    if kind == 3:
        return rng.choice((b"", b"\0" * 1000, b"[" * 100_000, b"null", b"\xff\xfe", whole * 2))
    try:
        document = json.loads(whole)
    except ValueError:
        value = rng.choice((0, 1, -1, 2**31 - 1, -(2**31)))
        at -= at % 4
        return whole[:at] + value.to_bytes(4, "little", signed=True) + whole[at + 4 :]
    for _ in range(rng.choice((1, 1, 3))):
        _spoil(rng, document)
    return json.dumps(document).encode()


def _spoil(rng: Random, document: object) -> None:
    """Another value somewhere inside."""
    here = document
    while True:
        keys: list[object] = list(here) if isinstance(here, dict) else list(range(len(here)))  # type: ignore[arg-type]
        if not keys:
            return
        key = rng.choice(keys)
        below = here[key]  # type: ignore[index]
        if isinstance(below, dict | list) and below and rng.random() < 0.8:
            here = below
            continue
        strange = (None, True, -1, 0, 10**400, 1e308, -1e308, float("nan"), float("inf"))
        more = ("", "x" * 3000, "\ud800", [], {}, [[]], {"a": 1}, 2**63, 1.5)
        here[key] = rng.choice((*strange, *more))  # type: ignore[index]
        return


def _tried(read_back: Callable[[Path], object], path: Path) -> tuple[str, str]:
    """How reading ended, and what was wrong with that."""

    def too_late(*_: object) -> None:
        raise TimeoutError(f"it takes over {_LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, too_late)
    signal.alarm(_LIMIT_S)
    try:
        read_back(path)
    except (OffloadError, SpecDecError) as e:
        words = str(e)
        wrong = "\n" in words or len(words) > _MOST_WORDS
        return "refused", f"{len(words)} letters: {words[:200]!r}" if wrong else ""
    except Exception as e:
        return "raised", f"{type(e).__name__}: {e}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return "read", ""
