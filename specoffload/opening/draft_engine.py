"""Measures a draft model in both engines, and chooses the faster one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from specoffload.cpu_load import Watch
from specoffload.kept import Kept, KeptFile, today
from specoffload.kept_bounds import is_old
from specoffload.kept_engines import KeptEngines
from specoffload.opening.draft_model import DraftModel, measure_step, real_text

Openers = Mapping[str, Callable[[], DraftModel]]  # opens the draft, by the name of the engine


@dataclass(frozen=True)
class EngineChoice:
    """The engine that computes the draft model, and the reason for it."""

    name: str
    reason: str
    kept_key: str = ""  # of its measurements in the kept file; "": the engine was not measured

    @property
    def words(self) -> str:
        return f"draft engine: {self.name} ({self.reason})"


def measured_choice(file: KeptFile, key: str, openers: Openers) -> EngineChoice:
    """Return the faster engine by the measurements that are kept under `key`.

    An engine is measured once more if its kept values are old, or do not agree yet. Raises
    OffloadError.
    """
    engines = _young(file.load()[0], key)
    how = f"measured on {engines.date}"
    if due := engines.due(today()):
        watch = Watch()
        seconds = _measured(openers, due)
        is_doubted = watch.others().is_busy

        def added(to: KeptEngines) -> KeptEngines:
            return to.with_seconds(seconds, is_doubted=is_doubted, day=today())

        def change(kept: Kept) -> None:  # others may have kept theirs while this one measured
            kept.engines[key] = added(_young(kept, key))

        how = file.update(change) or "measured now"
        engines = added(engines)
    return EngineChoice(engines.faster, f"{engines.words}; {how}", key)


def _young(kept: Kept, key: str) -> KeptEngines:
    """Return the kept measurements, or none if nothing is kept or they are old."""
    engines = kept.engines.get(key)
    if engines is None or is_old(engines.date, today()):
        return KeptEngines(date=today())
    return engines


def _measured(openers: Openers, names: Iterable[str]) -> dict[str, float]:
    """Measure the seconds per token in each of these engines.

    Only one engine is open at a time, so that the device holds the draft model only once.
    """
    seconds = {}
    for name in names:
        with openers[name]() as draft:
            seconds[name] = measure_step(draft.sequences, real_text(draft))
    return seconds


def keep_step(file: KeptFile, choice: EngineChoice, step_s: float) -> str:
    """Keep the step that a session's rounds showed. Returns why it is not kept, or "".

    Nothing is kept if `step_s` is 0, or if the engine was not chosen by kept measurements.
    """
    if not (choice.kept_key and step_s):
        return ""

    def change(kept: Kept) -> None:
        engines = kept.engines.get(choice.kept_key)
        if engines is not None:
            kept.engines[choice.kept_key] = engines.with_served(choice.name, step_s)

    return file.update(change)
