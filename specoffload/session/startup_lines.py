"""Writes a session's start-up lines, which say what is active, what is not, and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from offload.decode import SMALL_BATCH
from offload.engine import Engine
from offload.measuring import streamed_kinds
from offload.notes import Note, NoteKind, kind_of
from offload.times.table import ranges
from specoffload import report
from specoffload.opening.choices import StartChoices
from specoffload.opening.draft_model import DraftModel
from specoffload.speculation.speculation import Speculation

_FAR_ROUNDED = 2  # rounded context over the asked one, from which the line is always printed
_A_PROMPT = SMALL_BATCH + 1  # tokens of a batch whose ways are those of all larger ones


def startup_lines(
    choices: StartChoices,
    target: Engine,
    draft: DraftModel | None,
    speculation: Speculation | None,
    chosen: Sequence[str],
) -> tuple[str, ...]:
    """All start-up lines, in the order in which they are shown.

    `chosen` are the lines on what was measured or chosen at the start, in their order.
    `speculation` is None if every token is decoded alone.
    """
    alone = (*choices.spec.reasons, "every token is decoded alone")
    return (
        *_device_lines(choices.n_ctx, target),
        *_weight_lines(target),
        *_draft_lines(target, draft),
        *(alone if speculation is None else speculation.notes),
        *(() if speculation is None else _rewinding_lines(target)),
        *(reason for device in target.opened.devices for reason in device.declined),
        *target.numa_notes,
        *chosen,
    )


def always_shown(lines: Iterable[str]) -> list[str]:
    """The start-up lines that every command shows: flags that do harm, and unused hardware."""
    return [words for words in lines if kind_of(words) in (NoteKind.FLAGS, NoteKind.UNUSED)]


def show_always_shown(lines: Iterable[str]) -> None:
    """Print those of the start-up lines that every command shows."""
    for words in always_shown(lines):
        report.note(words)


def _device_lines(n_ctx: int | None, target: Engine) -> Sequence[str]:
    places = [place for place, _ in target.start.choices]
    lines: list[str] = [
        Note(NoteKind.DEVICE, f"device {place.name}: {place.description} ({place.reason})")
        for place in places
    ]
    lines += target.opened.notes
    if n_ctx and n_ctx != target.n_cells:
        words = f"--ctx-size {n_ctx}: llama.cpp rounds it to {target.n_cells} tokens"
        is_far = target.n_cells >= _FAR_ROUNDED * n_ctx
        lines.append(Note(NoteKind.FLAGS, words) if is_far else words)
    return lines


def cell_lines(target: Engine, *, may_branch: bool) -> list[str]:
    """Say that each slot has cells of its own, and what that turns off.

    `may_branch`: drafts would be trees if the slots shared their cells.
    """
    if not target.sequences.has_own_cells:
        return []
    n_slots = target.layout.context.n_sequences
    lines: list[str] = [
        Note(
            NoteKind.CONTEXT,
            f"context: each of {n_slots} slots has {target.n_ctx:,} tokens of its own "
            "(--no-kv-unified), so conversations never move for others: --cache-idle-slots has no "
            "effect",
        )
    ]
    if may_branch:
        lines.append("drafts are chains, not trees, whose leaves share cells (--no-kv-unified)")
    if any(device.mla.crossover != 0 for device in target.opened.devices):
        lines.append(
            "value projections (MLA) of several slots in one batch are computed as llama.cpp does "
            "(--no-kv-unified)"
        )
    return lines


def _weight_lines(target: Engine) -> Sequence[str]:
    plan = target.opened.plan
    report = None if target.opened.weights.store is None else target.opened.weights.store.report
    read: list[str] = []
    if report is not None and report.weight_bytes:
        is_short = report.in_memory_bytes is not None
        read = [Note(NoteKind.MEMORY if is_short else NoteKind.OTHER, report.sentence())]
    if plan is None or not plan.streamed:
        where = "experts run on the CPU: --device cpu copies nothing to a GPU"
        if target.opened.remote is not None:
            where = (
                "experts run where their layers are: on the workers of --rpc, or on the CPU here"
            )
        elif plan is not None:
            where = "all weights are in GPU memory: nothing is copied to it"
        return [where, *read] if target.facts.n_experts else []
    place = "RAM" if report is None or report.in_memory_bytes is None else "RAM and on the disk"
    weights = (
        f"weights: {plan.streamed_bytes / 2**20:.0f} MiB in {place}, with a cache of "
        f"{plan.slot_bytes / 2**20:.0f} MiB in GPU memory"
    )
    lines = [
        Note(NoteKind.WEIGHTS, weights),
        _who_computes(target),
        *plan.reasons,
    ]
    return [*lines, *read]


def _who_computes(target: Engine) -> str:
    """Say which batches the GPU computes, which both share, and which the CPU computes alone."""
    kinds, ways = streamed_kinds(target), target.opened.weights.ways.now
    words = f"{target.min_batch_words(kinds)} (--min-batch)"
    shared = ways.split_sizes
    said = [f"batches of {_listed(ranges(shared))} token{'s' * (shared != [1])}"] if shared else []
    if ways.shares_prompts(_A_PROMPT):
        shared.append(_A_PROMPT)
        said.append("prompts")
    if said:
        words += f", and shares {' and '.join(said)} with the CPU (--hybrid)"

    def is_on_gpu(n_tokens: int) -> bool:
        thresholds = ways.min_batches or (ways.min_batch,)
        return all(m.streams(n_tokens, experts=k == "experts") for m in thresholds for k in kinds)

    rest = {*range(1, _A_PROMPT + 1)} - {*shared}
    return words + "; the CPU computes all other batches" * (not all(map(is_on_gpu, rest)))


def _listed(sizes: str) -> str:
    """Numbers separated by commas, with "and" before the last."""
    return " and ".join(sizes.rsplit(", ", 1))


def _draft_lines(target: Engine, draft: DraftModel | None) -> Sequence[str]:
    file = target.start.options.row_file
    if target.opened.row_draft is not None and file is not None:
        return [f"draft from the model's rows: {file.name}"]
    if draft is None:
        return ["draft model: none"]
    model = draft.model
    name, size_bytes = draft.facts.path.name, model.size_bytes
    lines = [f"draft model: {name}, {model.n_params / 1e6:.1f}M parameters"]
    if size_bytes > target.model.size_bytes:
        lines.append(
            f"the draft model ({size_bytes} bytes) is larger than the model "
            f"({target.model.size_bytes}): are the two files swapped?"
        )
    return lines


def _rewinding_lines(target: Engine) -> Sequence[str]:
    sequences = target.sequences
    if sequences.can_rewind:
        return []
    where = "in GPU memory" if sequences.device_checkpoints else "in RAM"
    if sequences.n_rs_seq:
        return [
            f"recurrent model: rejected drafts of up to {sequences.n_rs_seq} tokens are undone by "
            f"snapshots, longer ones by checkpoints {where}"
        ]
    return [
        f"recurrent model: rejected drafts are undone by checkpoints {where}; llama.cpp "
        f"has no snapshots for {target.facts.architecture}"
    ]
