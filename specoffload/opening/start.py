"""Decides how a session starts. Each file, the kept data and the machine are looked at once.

A configuration says what the user asked for. A start adds what follows from the model's header,
from earlier starts and from the machine: the context, the drafters that can draft, and where
everything lies.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from offload.device import choose_device
from offload.engine import Engine
from offload.header_check import tokenizer_reason
from offload.notes import Note, NoteKind, OnProgress
from offload.open_check import check_opens
from offload.opening.start import Start
from specoffload.config.resolution import Config
from specoffload.config.speculation import ignored
from specoffload.generation.generation import ignore
from specoffload.opening.choices import StartChoices, shared_ram_notes
from specoffload.opening.context_size import chosen_context, context_reason
from specoffload.opening.drafters import usable_drafters, without_text
from specoffload.opening.flag_costs import flag_cost
from specoffload.opening.header import override_reason, target_facts
from specoffload.opening.kept_plan import KeptForPlan, doubted_threads, with_imported_costs
from specoffload.opening.planner import Planner

log = logging.getLogger("specoffload.session")


@dataclass(frozen=True)
class SessionStart:
    """A decision how a session starts.

    `config` is what the user asked for. `choices` is what was decided beside it, and `target` how
    the target is opened. `notes` are those of the configuration, and those on the choices.
    """

    config: Config
    choices: StartChoices
    notes: tuple[str, ...]
    kept: KeptForPlan
    target: Start


def session_start(config: Config, *, imports_costs: bool = True) -> SessionStart:
    """Decide how the session starts. Raises OffloadError.

    With `imports_costs`, drafts are priced by imported costs, if there are any for this model.
    """
    config.check_unused_workers()
    choice = choose_device(config.device)
    on_cpu = not (choice.wrapped or config.uses_workers)
    spec = with_imported_costs(config) if imports_costs else config.spec
    spec = usable_drafters(target_facts(config), spec)
    if on_cpu:
        spec = without_text(spec)
    device_notes = shared_ram_notes(choice, config)
    planner = Planner(config, spec)
    if words := tokenizer_reason(planner.facts.header.metadata):
        log.warning("%s: %s", planner.facts.path.name, words)
    if overridden := override_reason(planner.facts):
        check_opens(planner.facts)  # before the weights are read, which may take minutes
    too_long = context_reason(config, planner.facts)
    context = chosen_context(config, planner)
    unused = _unused_on_cpu(config, choice.reason) if on_cpu else ()
    cost = None if on_cpu else flag_cost(config, planner, context.n_ctx)
    notes = (
        *(() if cost is None else (cost.note,)),
        *context.notes,
        *(Note(NoteKind.FLAGS, words) for words in (overridden, too_long) if words),
        *config.reasons,
        *device_notes,
        *filter(None, [doubted_threads(config)]),
        *unused,
    )
    choices = planner.choices(context.n_ctx)
    return SessionStart(config, choices, notes, planner.kept, planner.start(context.n_ctx))


def _unused_on_cpu(config: Config, reason: str) -> tuple[str, ...]:
    """Log and return a sentence for each given flag that needs a GPU.

    `reason` says why the model is opened on the CPU alone.
    """
    unused_reason = f"the CPU computes alone ({reason}), and nothing is copied to a GPU"
    unused = tuple(ignored(name, unused_reason) for name in config.gpu_flags)
    for words in unused:
        log.warning("%s", words)
    return unused


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
