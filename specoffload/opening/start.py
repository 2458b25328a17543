"""Decides how a session starts. Each file, the kept data and the machine are looked at once.

A configuration says what the user asked for. A start adds what follows from the model's header,
from earlier starts and from the machine: the context, the drafters that can draft, and where
everything lies.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from offload.device import choose_device
from offload.engine import Engine
from offload.notes import Note, NoteKind
from offload.opening.start import Start
from specoffload.config.resolution import Config
from specoffload.config.speculation import ignored
from specoffload.generation.generation import OnProgress, ignore
from specoffload.opening.context_size import context_complaint, sized
from specoffload.opening.drafters import with_usable_drafters, without_text
from specoffload.opening.flag_costs import flag_cost
from specoffload.opening.kept_plan import KeptForPlan, with_imported_costs
from specoffload.opening.planner import Planner
from specoffload.opening.tokenizer import tokenizer_complaint

log = logging.getLogger("specoffload.session")


@dataclass(frozen=True)
class SessionStart:
    """A decision how a session starts, with its final configuration and the kept data.

    `target` is the decision how the target is opened.
    """

    config: Config
    kept: KeptForPlan
    target: Start


def session_start(config: Config, *, imports_costs: bool = True) -> SessionStart:
    """Decide how the session starts. Raises OffloadError.

    With `imports_costs`, drafts are priced by imported costs, if there are any for this model.
    """
    config.check_unused_workers()
    if imports_costs:
        config = with_imported_costs(config)
    config = with_usable_drafters(config)
    choice = choose_device(config.device)
    on_cpu = not (choice.wrapped or config.uses_workers)
    if on_cpu:
        config = without_text(config)
    planner = Planner(config)
    if words := tokenizer_complaint(planner.facts.header.metadata):
        log.warning("%s: %s", planner.facts.path.name, words)
    if words := context_complaint(config, planner.facts):
        config = replace(config, reasons=(Note(NoteKind.FLAGS, words), *config.reasons))
    config = sized(config, planner)
    if on_cpu:
        config = _without_gpu_flags(config, choice.reason)
    cost = None if on_cpu else flag_cost(config, planner)
    if cost is not None:
        config = replace(config, reasons=(cost.note, *config.reasons))
    return SessionStart(config, planner.kept, planner.start(config.ctx_size))


def _without_gpu_flags(config: Config, reason: str) -> Config:
    """Name the given flags that need a GPU, since the model is opened on the CPU alone.

    Returns the configuration with these sentences among its reasons.
    """
    why = f"the CPU computes alone ({reason}), and nothing is copied to a GPU"
    said = tuple(ignored(name, why) for name in config.gpu_flags)
    for words in said:
        log.warning("%s", words)
    return replace(config, gpu_flags=(), reasons=(*config.reasons, *said))


def open_target(start: SessionStart, on_progress: OnProgress = ignore) -> Engine:
    """Open the target, and try it out if --warmup is on. Raises OffloadError."""
    engine = Engine(start.target, on_progress)
    try:
        if start.config.streaming.warmup:
            engine.try_out()
    except BaseException:
        engine.close()
        raise
    return engine
