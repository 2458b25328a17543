"""Speculation resolved: drafters, policy, where the profile lies, and which flags take effect."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any

from specdec.errors import BadOption
from specdec.options import (
    LONGEST,
    MOST_DRAFTED,
    AcceptRule,
    CheckpointPlace,
    DrafterName,
    PolicyName,
    SpecOptions,
)
from specoffload.config.environment import Environment
from specoffload.config.flags.flag import Flag, Need, need_words
from specoffload.config.flags.table import TABLE
from specoffload.config.options import DraftEngine, DraftOptions, Options, of_draft
from specoffload.config.remarks import Remarks
from specoffload.errors import UsageError

NO_DRAFTS = SpecOptions(drafters=(DrafterName.NONE,))

_ENGINE_NAMES = {
    "batch_size": "n_batch",
    "ubatch_size": "n_ubatch",
    "ctx_size": "n_ctx",
    "threads": "n_threads",
    "threads_batch": "n_threads_batch",
    "device": "device",
    "flash_attn": "flash_attn",
    "type_k": "type_k",
    "type_v": "type_v",
}

# Settings of a draft that one engine reads and the other does not.
_TORCH_ALONE = frozenset({"matrices", "vocab", "graphs"})
_LLAMA_ALONE = frozenset(
    {"batch_size", "ubatch_size", "threads_batch", "flash_attn", "type_k", "type_v"}
)


@dataclass(frozen=True)
class SpecConfig:
    """A session's settings of speculation. `batch_costs` is GGML_BATCH_COSTS, if it is read."""

    options: SpecOptions = SpecOptions()
    use_profile: bool = True
    profile_dir: Path | None = None
    batch_costs: str | None = None
    of_draft: DraftOptions = DraftOptions()
    record_trace: Path | None = None
    reasons: tuple[str, ...] = ()

    @property
    def draft_options(self) -> dict[str, Any]:
        """The options given for the draft, under the names of EngineOptions."""
        said = {f.name: getattr(self.of_draft, f.name) for f in fields(self.of_draft)}
        named = {_ENGINE_NAMES[name]: v for name, v in said.items() if name in _ENGINE_NAMES}
        return {name: value for name, value in named.items() if value is not None}

    @property
    def needs_profile(self) -> bool:
        return self.options.policy is PolicyName.THROUGHPUT and self.batch_costs is None

    @property
    def longest(self) -> int:
        """The longest draft that a verification batch must have room for."""
        return MOST_DRAFTED if self.options.n_max is None else self.options.n_max

    @property
    def n_rs_seq(self) -> int:
        """Snapshots of recurrent state."""
        return min(self.options.rs_snapshots, self.longest) if self.options.is_on else 0

    @property
    def device_checkpoints(self) -> bool:
        return self.options.checkpoints is CheckpointPlace.DEVICE


def uses_draft_model(spec: SpecOptions) -> bool:
    """True if a draft model would be used where there is one."""
    return spec.drafters == () or DrafterName.DRAFT in spec.drafters


def measuring_only(options: Options) -> Options:
    """`options` for a command that measures T(n) and drafts nothing of its own."""
    spec = options.spec
    kept = ("drafters", "replacements")
    idle = [name for field, name in spec.given.items() if field not in kept]
    idle += [options.given[f] for f in ("use_profile", "record_trace") if f in options.given]
    quiet = SpecOptions(
        drafters=spec.drafters,
        replacements=spec.replacements,
        given={field: name for field, name in spec.given.items() if field in kept},
    )
    options = replace(options, spec=quiet, use_profile=True, record_trace=None)
    return remark(options, idle, "profile only measures")


def remark(options: Options, idle: Iterable[str], why: str) -> Options:
    """`options` with it noted that those flags change nothing."""
    return replace(options, idle=(*options.idle, *((name, why) for name in idle)))


def resolve_speculation(
    options: Options, *, has_draft: bool, environment: Environment, strict: bool = False
) -> SpecConfig:
    """Check what was said against what there is. Without a draft model and drafters named nothing
    drafts. A flag that changes nothing is dropped with a remark, an error if `strict`.

    Raises BadOption or UsageError for what cannot be taken together.
    """
    remarks = Remarks(strict)
    spec = _with_drafters(options.spec, has_draft)
    costs = _costs_given(spec, environment, remarks)
    spec = _without_profile(spec, options, costs, remarks)
    spec, said = _effective(options, spec, has_draft, remarks)
    _check_lengths(spec)
    return SpecConfig(
        options=spec,
        use_profile=said.use_profile,
        profile_dir=environment.profile_folder,
        batch_costs=costs,
        of_draft=said.of_draft,
        record_trace=said.record_trace,
        reasons=remarks.lines,
    )


def _with_drafters(spec: SpecOptions, has_draft: bool) -> SpecOptions:
    if DrafterName.DRAFT in spec.drafters and not has_draft:
        raise UsageError(
            f"{spec.name('drafters')} draft needs a draft model: add --draft DRAFT.gguf"
        )
    if spec.drafters or not has_draft:
        return spec
    return replace(spec, drafters=(DrafterName.DRAFT,))


def _costs_given(spec: SpecOptions, environment: Environment, remarks: Remarks) -> str | None:
    """GGML_BATCH_COSTS, unless nothing reads it. GGML_MAX_LOOK_AHEAD has no effect here."""
    if environment.max_look_ahead is not None:
        why = "throughput looks ahead over all batch sizes by itself"
        remarks.no_effect("GGML_MAX_LOOK_AHEAD", why)
    if environment.batch_costs is None:
        return None
    if not spec.is_on:
        remarks.no_effect("GGML_BATCH_COSTS", "nothing drafts")
    elif spec.policy is not PolicyName.THROUGHPUT:
        why = f"{spec.name('policy')} {spec.policy} does not read costs"
        remarks.no_effect("GGML_BATCH_COSTS", why)
    else:
        return environment.batch_costs
    return None


def _names_policy(spec: SpecOptions) -> bool:
    return "policy" in spec.given or spec.policy is not SpecOptions.policy


def _without_profile(
    spec: SpecOptions, options: Options, costs: str | None, remarks: Remarks
) -> SpecOptions:
    """Blocks of 4 where nothing may be measured, unless another policy was asked for that needs
    nothing measured."""
    if options.use_profile or not spec.is_on or costs is not None:
        return spec
    name = options.name("use_profile")
    if not _names_policy(spec):
        remarks.reason(f"{name}: nothing is measured, so drafts are fixed blocks of 4")
        return replace(spec, policy=PolicyName.FIXED)
    if spec.policy is PolicyName.THROUGHPUT:
        raise UsageError(
            f"{spec.name('policy')} throughput needs a profile: drop {name}, or choose fixed or "
            "p-min"
        )
    return spec


# -- what takes effect


def _effective(
    options: Options, spec: SpecOptions, has_draft: bool, remarks: Remarks
) -> tuple[SpecOptions, Options]:
    """Both without what changes nothing; each such flag is remarked on."""
    active = _active(spec, has_draft)
    idle: dict[type, dict[str, Any]] = {SpecOptions: {}, Options: {}, DraftOptions: {}}
    working: set[str] = set()  # names of flags that do something, perhaps in one of several fields
    why_not: list[tuple[str, str]] = []
    for flag in TABLE:
        name = _used_name(flag, options, spec)
        if not flag.needs or name is None:
            continue
        why = _excluded(flag, spec) or _other_engines(flag, options)
        if not why and not active & set(flag.needs):
            why = _why_idle(flag, spec)
        if not why:
            working.add(name)
            continue
        why_not.append((name, why))
        idle[flag.section][flag.field] = flag.default
    for name, why in dict(why_not).items():
        if name not in working:
            remarks.no_effect(name, why)
    if idle[DraftOptions]:
        idle[Options]["of_draft"] = replace(options.of_draft, **idle[DraftOptions])
    left = {name: used for name, used in spec.given.items() if name not in idle[SpecOptions]}
    return replace(spec, **idle[SpecOptions], given=left), replace(options, **idle[Options])


def _used_name(flag: Flag, options: Options, spec: SpecOptions) -> str | None:
    """The name by which the flag's field was set, if it was."""
    if flag.section is SpecOptions:
        return spec.given.get(flag.field)
    field = of_draft(flag.field) if flag.section is DraftOptions else flag.field
    return options.given.get(field)


def _active(spec: SpecOptions, has_draft: bool) -> set[Enum]:
    active: set[Enum] = {*spec.drafters}
    if has_draft:
        active.add(Need.DRAFT_MODEL)
    if spec.is_on:
        active |= {Need.DRAFTS, spec.policy}
    if spec.tree and _tree_fits(spec):
        active.add(Need.TREE)
    return active


def _tree_fits(spec: SpecOptions) -> bool:
    return spec.policy is PolicyName.THROUGHPUT and spec.drafters == (DrafterName.DRAFT,)


def _excluded(flag: Flag, spec: SpecOptions) -> str:
    """Why another flag leaves this one nothing to do, "" if none does."""
    tree = spec.tree and _tree_fits(spec)
    rejects = spec.accept is AcceptRule.REJECT and not tree
    match flag.field:
        case "tree" if spec.is_on and not _tree_fits(spec):
            return "it needs the draft model alone and the policy throughput"
        case "accept" | "replacements" | "record_trace" if tree:
            return f"{spec.name('tree')} excludes it"
        case "accept" if rejects and DrafterName.SYNTHETIC in spec.drafters:
            return "synthetic drafts are judged by the rates that were given"
        case "n_min" if rejects:
            return (
                "a token that was drawn has to be verified, or the answer's distribution would "
                f"change ({spec.name('accept')} reject)"
            )
    return ""


def _other_engines(flag: Flag, options: Options) -> str:
    """Why the engine that was named for the draft does not read this flag, "" if it does."""
    if flag.section is not DraftOptions:
        return ""
    engine, name = options.of_draft.engine, options.name(of_draft("engine"))
    if engine is DraftEngine.LLAMA and flag.field in _TORCH_ALONE:
        return f"libllama computes the draft ({name} {engine})"
    if engine is DraftEngine.TORCH and flag.field in _LLAMA_ALONE:
        return f"torch computes the draft ({name} {engine})"
    return ""


def _why_idle(flag: Flag, spec: SpecOptions) -> str:
    if spec.drafters == (DrafterName.NONE,):
        return f"nothing drafts with {spec.name('drafters')}"
    if not spec.is_on:
        return "nothing drafts: add --draft DRAFT.gguf or --spec ngram-mod"
    return f"it needs {' or '.join(map(need_words, flag.needs))}"


def _check_lengths(spec: SpecOptions) -> None:
    """Raises BadOption where no draft is long enough and short enough at once."""
    pairs: list[tuple[str, int, str, int]] = []
    if spec.policy is PolicyName.P_MIN and spec.is_on:
        pairs.append(("n_min", spec.n_min, "n_max", LONGEST if spec.n_max is None else spec.n_max))
    if DrafterName.NGRAM_MOD in spec.drafters:
        pairs.append(
            ("ngram_mod_n_min", spec.ngram_mod_n_min, "ngram_mod_n_max", spec.ngram_mod_n_max)
        )
    for least, low, most, high in pairs:
        if 0 < high < low:
            raise BadOption(
                f"{spec.name(least)} {low} is above {spec.name(most)} {high}: no draft could be "
                "verified"
            )
