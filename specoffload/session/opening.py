"""Opening the target: options of its engine, room for the draft, the measured min-batch.

Whoever calls closes what is returned; a failure on the way closes what this module opened.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter

from offload.device import choose_device
from offload.engine import Engine, EngineOptions
from offload.errors import DeviceFailed
from offload.model_file import read_facts
from offload.native_build import library_build
from offload.plan.context import type_of_values
from offload.plan.min_batch import MinBatch
from offload.plan.min_batch_search import budget_s
from offload.plan.placement import MeasuredDecode
from offload.plan.sharing import TokenMix
from offload.routing import HitCurve
from offload.split.choosing import n_to_compare, split_sizes, words
from offload.split.switch import MOST_TOKENS, ByCosts
from offload.store.store import StoreOptions
from specdec.costs.estimate import typical
from specdec.costs.measure import TextWalk
from specdec.costs.profile import ProfileKey
from specoffload.config.options import Toggle
from specoffload.config.resolution import Config
from specoffload.session.draft_opening import draft_bytes
from specoffload.session.min_batch import choose_min_batch, n_most_at_once, streamed_kinds
from specoffload.session.progress import OnProgress, ignore
from specoffload.speculation.kept_hits import load_kept, may_be_kept
from specoffload.speculation.kept_split import (
    DecodeTimes,
    MeasuredSplit,
    kept_decodes,
    load_split,
    store_split,
)
from specoffload.speculation.profile_store import key_of, model_hash, profile_path, thread_words
from specoffload.speculation.profiling import LEAD_TOKENS, real_text

TREE_LEAVES = 32  # of a verified tree
_SPAN = 512  # tokens, before the memory is cut back
_SIZES = (1, 8, 64, 2, 16, 4, 32)  # tokens, those that tell most first


@dataclass(frozen=True)
class KeptForPlan:
    """The evidence of earlier starts that a plan takes, and a complaint where it cannot be used."""

    hits: HitCurve | None = None  # as counted of the model's routing
    decodes: tuple[MeasuredDecode, ...] = ()  # as timed on this device, by whatever plan
    mix: TokenMix | None = None  # of what earlier runs evaluated and generated; None: too little
    complaint: str = ""


NOTHING_KEPT = KeptForPlan()


def open_target(
    config: Config,
    on_progress: OnProgress = ignore,
    kept: KeptForPlan = NOTHING_KEPT,
) -> Engine:
    """The model that answers. Raises OffloadError."""
    engine = Engine(config.model, target_options(config, kept), on_progress)
    try:
        if config.streaming.warmup:
            engine.try_out()
    except BaseException:
        engine.close()
        raise
    return engine


def target_options(config: Config, kept: KeptForPlan = NOTHING_KEPT) -> EngineOptions:
    """The options of the target's engine."""
    spec = config.spec
    return EngineOptions(
        device=config.device,
        min_batch=config.min_batch or MinBatch(),
        n_ctx=config.ctx_size,
        n_batch=config.batch_size,
        n_ubatch=config.ubatch_size,
        most_ubatch=config.most_ubatch,
        n_sequences=config.parallel,
        n_outputs=max(1 + spec.longest, 64) + config.parallel - 1,
        n_tree_leaves=TREE_LEAVES if spec.options.tree else 0,
        n_rs_seq=spec.n_rs_seq,
        device_checkpoints=spec.device_checkpoints,
        n_threads=config.threads,
        n_threads_batch=config.threads_batch,
        flash_attn=config.flash_attn,
        type_k=config.type_k,
        type_v=_type_v(config),
        swa_full=config.swa_full,
        pooling=config.pooling,
        streaming=replace(
            config.streaming,
            reserve_bytes=draft_bytes(config),
            hits=kept.hits,
            decodes=kept.decodes,
            mix=config.streaming.mix or kept.mix,
            record_routing=spec.use_profile and spec.profile_dir is not None,
        ),
        mla_crossover=config.mla_crossover,
        stream_experts=config.stream_experts,
        store=StoreOptions(keep_page_cache=config.mmap),
        numa=config.numa,
        trial_folder=spec.profile_dir,
    )


def kept_for_plan(config: Config) -> KeptForPlan:
    """The evidence that was kept of the model, as far as its plan asks for it."""
    folder = _folder(config)
    if folder is None or not may_be_kept(folder, config.model):
        return NOTHING_KEPT
    facts = read_facts(config.model)
    kept, complaint = load_kept(folder, facts)
    hits, mix = kept.hits, kept.mix_for_plan
    if hits is None or not config.streaming.plan_for_hybrid:
        return KeptForPlan(mix=mix, complaint=complaint)
    decodes: tuple[MeasuredDecode, ...] = ()
    if config.streaming.plan_for_hybrid == "auto":
        key = ProfileKey(
            model=model_hash(facts),
            threads=thread_words(config.threads, config.threads_batch),
            device=choose_device(config.device).name,
            build=library_build(),
        )
        decodes = kept_decodes(folder, facts.path.stem, key)
    return KeptForPlan(hits.curve, decodes, mix, complaint)


def _type_v(config: Config) -> str:
    if config.type_v is not None or config.type_k == "f16":
        return config.type_v or "f16"
    return type_of_values(read_facts(config.model), config.type_k)


def set_min_batch(
    config: Config, target: Engine, on_progress: Callable[[float], None] | None = None
) -> tuple[str, ...]:
    """Where no thresholds were given, measure and set them; the lines that tell of it."""
    if config.min_batch is not None or not streamed_kinds(target):
        return ()
    if target.hybrid is not None:
        target.hybrid.switch.is_active = False  # both sides are timed without it
    chosen = choose_min_batch(target, _folder(config), on_progress)
    target.set_min_batch_by_decoding(chosen.min_batch)
    return (chosen.note,)


def most_split(target: Engine) -> int:
    """Tokens of the largest batch whose layers may be split."""
    return min(MOST_TOKENS, n_most_at_once(target))


def set_hybrid(
    config: Config, target: Engine, on_progress: Callable[[float], None] | None = None
) -> tuple[str, ...]:
    """Behind `set_min_batch`: split layers, for `auto` of those sizes of batches at which decodes
    are measured faster, now or at an earlier start; the lines that tell of it."""
    chosen = config.hybrid
    if target.hybrid is None:
        return _not_split(config, target)
    switch, flag = target.hybrid.switch, f"--hybrid {chosen.toggle}"
    if not chosen.asked and _folder(config) is None:
        switch.is_active = False
        return ("--hybrid: nothing is measured, so no layer is split",)
    switch.is_active, n_most = True, most_split(target)
    try:
        split, why = _kept_or_measured(config, target, n_most, on_progress)
    except DeviceFailed as e:
        if chosen.toggle is Toggle.ON:
            raise
        switch.is_active = False  # what nobody asked for is no reason not to start
        target.sequences.rewind(0, 0)
        target.build_anew()
        return (f"{flag}: no layer is split: measuring it failed: {e}",)
    sizes: Collection[int] = range(1, n_most + 1)
    note = f"layers are split in batches of up to {n_most} tokens"
    if split.costs is not None:
        switch.splitter = ByCosts(split.costs.costs())
    if split.times is not None and chosen.toggle is Toggle.AUTO:
        old_s, split_s = split.times.old_s, split.times.split_s
        sizes = split_sizes(old_s, split_s, n_most)
        note = words(sizes, old_s, split_s)
    switch.unsplit = frozenset(range(1, MOST_TOKENS + 1)).difference(sizes)
    switch.is_active = True
    target.build_anew()
    if switch.declined:
        return (f"{flag}: {switch.declined}",)
    notes = [f"{flag}: {note}; {why}"]
    if chosen.asked and not config.streaming.prefetch:
        notes.append(f"{flag}: without prefetch no expert is copied for later")
    costs = "no layer could be timed: hits are the device's, others the CPU's"
    notes.append(f"split layers: {costs if split.costs is None else split.costs.words}")
    return tuple(notes)


def _not_split(config: Config, target: Engine) -> tuple[str, ...]:
    """The line for whoever asked for split layers, or would have them but for another flag."""
    chosen, streams = config.hybrid, "experts" in streamed_kinds(target)
    if chosen.toggle is Toggle.OFF:
        return (f"--hybrid: {chosen.why}",) if chosen.why and streams else ()
    if not chosen.asked:
        return ()
    return (f"--hybrid {chosen.toggle}: no layer is split: no experts stream",)


def _folder(config: Config) -> Path | None:
    """Where measurements are kept; None where nothing is."""
    return config.spec.profile_dir if config.spec.use_profile else None


def _kept_or_measured(
    config: Config,
    target: Engine,
    n_most: int,
    on_progress: Callable[[float], None] | None,
) -> tuple[MeasuredSplit, str]:
    """Costs of split layers, and for `auto` decodes timed both ways: as an earlier start kept them
    with the profiles, else measured now and kept; and the words for it."""
    n_compared = n_most if config.hybrid.toggle is Toggle.AUTO else 0
    folder = _folder(config)
    if folder is None:
        split, took = _measure_split(target, n_compared, on_progress)
        return split, f"{took}, not kept"
    key = key_of(target, None, with_split=False)
    path = profile_path(folder, target, None, key)
    path = path.with_stem(f"{path.stem}-split")
    found, why = load_split(path, key, n_compared)
    if found is not None:
        return found, why
    split, took = _measure_split(target, n_compared, on_progress)
    was_measured = split.costs is not None or split.times is not None
    failed = store_split(path, key, split) if was_measured else None
    return split, f"{took}, {why}" if failed is None else f"{took}, {why}; {failed}"


def _measure_split(
    target: Engine, n_compared: int, on_progress: Callable[[float], None] | None
) -> tuple[MeasuredSplit, str]:
    """Both sides of a split layer; then batches of up to `n_compared` tokens, where it is not 0 and
    layers can be split, by min-batch alone and split by those costs. And how long it took."""
    assert target.hybrid is not None
    switch, began = target.hybrid.switch, perf_counter()
    if on_progress is not None:
        on_progress(0.0)
    costs, times = target.measure_split(), None
    if costs is not None:
        switch.splitter = ByCosts(costs.costs())
    if n_compared and not switch.declined:
        times = DecodeTimes(n_compared, *_both_ways(target, n_compared, on_progress))
    assert target.plan is not None
    found = MeasuredSplit(costs, times, datetime.now(UTC).date(), target.plan.sharing)
    return found, f"measured now in {perf_counter() - began:.1f} s"


def _both_ways(
    target: Engine, n_most: int, on_progress: Callable[[float], None] | None
) -> tuple[dict[int, float], dict[int, float]]:
    """Seconds of a decode by batch size, by min-batch alone and with layers split.

    One token is always timed, further sizes while there is time. The sequence is left empty.
    """
    assert target.hybrid is not None
    switch, began = target.hybrid.switch, perf_counter()
    walk = TextWalk(target.sequences, 0, real_text(target), 0, _SPAN)
    walk.time_s(1)
    one_s = walk.time_s(1)
    most_s = budget_s(one_s)
    times: dict[bool, dict[int, float]] = {False: {}, True: {}}
    for n in dict.fromkeys(min(size, n_most) for size in _SIZES):
        spent = (perf_counter() - began) / most_s
        if spent >= 1.0 and times[True]:
            break
        for is_split, found in times.items():
            switch.is_active = target.routing.is_on = is_split  # running text, read once
            walk.time_s(1, n_logits=0)  # no timed decode is like it: each that follows is built
            n_decodes = n_to_compare(n, one_s, most_s, LEAD_TOKENS)
            walk.lead(n, n_decodes)
            found[n] = typical([walk.time_s(n) for _ in range(n_decodes)])
        target.routing.is_on = False
        if on_progress is not None:
            on_progress(min(1.0, spent))
    target.sequences.rewind(0, 0)
    return times[False], times[True]
