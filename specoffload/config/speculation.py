"""Resolves speculation: drafters, policy, the folder of profiles, and which flags take effect."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from specdec.errors import BadOption
from specdec.options import (
    LONGEST,
    MOST_DRAFTED,
    OF_TEXT,
    PRICED,
    ROW_FILES,
    AcceptRule,
    DrafterName,
    PolicyName,
    SpecOptions,
)
from specoffload.config.environment import Environment
from specoffload.config.flag import Flag, Need, need_words
from specoffload.config.options import DraftEngine, DraftOptions, Options, of_draft
from specoffload.config.table import TABLE
from specoffload.errors import UsageError

NO_DRAFTS = SpecOptions(drafters=(DrafterName.NONE,))

_SNAPSHOTS = 8  # most tokens that snapshots let a recurrent memory rewind

_CONTEXT_NAMES = {
    "batch_size": "n_batch",
    "ubatch_size": "n_ubatch",
    "ctx_size": "n_ctx",
    "threads": "n_threads",
    "threads_batch": "n_threads_batch",
    "flash_attn": "flash_attn",
    "type_k": "type_k",
    "type_v": "type_v",
}

# Settings of a draft model that only libllama reads.
_LLAMA_ALONE = frozenset(
    {
        "batch_size",
        "ubatch_size",
        "threads_batch",
        "flash_attn",
        "type_k",
        "type_v",
        "cpu_mask",
        "cpu_range",
        "cpu_strict",
        "cpu_mask_batch",
        "cpu_range_batch",
        "cpu_strict_batch",
    }
)


@dataclass(frozen=True)
class SpecConfig:
    """A session's settings of speculation.

    `draft` is the file of a draft model, or one that drafts from rows (`row_file`). `batch_costs`
    is T(n) in the form of GGML_BATCH_COSTS, or None if it is measured, and `costs_from` its source.
    """

    options: SpecOptions = SpecOptions()
    draft: Path | None = None
    use_profile: bool = True
    profile_dir: Path | None = None
    measure_s: float | None = None  # most seconds of a first start's measurement; None: chosen
    batch_costs: str | None = None
    costs_from: str = "GGML_BATCH_COSTS"
    of_draft: DraftOptions = DraftOptions()
    reasons: tuple[str, ...] = ()

    @property
    def kept_folder(self) -> Path | None:
        """The folder of kept measurements; None if nothing is kept."""
        return self.profile_dir if self.use_profile else None

    @property
    def draft_options(self) -> dict[str, Any]:
        """The options given for the draft's context, under the names of ContextOptions."""
        said = {name: getattr(self.of_draft, field) for field, name in _CONTEXT_NAMES.items()}
        return {name: value for name, value in said.items() if value is not None}

    @property
    def row_file(self) -> Path | None:
        """The file that drafts from the target's rows, if `draft` is one that drafts."""
        return None if self.options.from_file is None else self.draft

    @property
    def draft_model(self) -> Path | None:
        """The file of the draft model, if there is one."""
        return self.draft if self.row_file is None else None

    @property
    def has_steps(self) -> bool:
        """True if a draft model, a file that drafts from rows, or the model's own layers draft."""
        return self.draft is not None or DrafterName.MTP in self.options.drafters

    @property
    def without_drafts(self) -> SpecConfig:
        """The same settings, but nothing drafts."""
        options = replace(self.options, drafters=NO_DRAFTS.drafters)
        return replace(self, draft=None, options=options)

    @property
    def without_rows(self) -> SpecConfig:
        """The same settings, but nothing drafts from the target's hidden rows."""
        return replace(self, draft=self.draft_model, options=without_rows(self.options))

    @property
    def needs_profile(self) -> bool:
        return self.options.policy in PRICED and self.batch_costs is None

    @property
    def longest(self) -> int:
        """The longest draft that a verification batch must have room for."""
        return MOST_DRAFTED if self.options.n_max is None else self.options.n_max

    @property
    def n_rs_seq(self) -> int:
        """Number of snapshots of recurrent state. Each takes the memory of one state."""
        return min(_SNAPSHOTS, self.longest) if self.options.is_on else 0


def uses_draft_model(spec: SpecOptions) -> bool:
    """True if a draft model is used, provided that there is one."""
    return spec.drafters == () or DrafterName.DRAFT in spec.drafters


_FILE_WORDS = {
    DrafterName.EAGLE3: "an EAGLE-3 file",
    DrafterName.DFLASH: "a DFlash file",
    DrafterName.DSPARK: "a DSpark file",
}


def with_file(
    spec: SpecOptions, draft: str, by_rows: DrafterName | None, reasons: list[str]
) -> SpecOptions:
    """Returns `spec` with the drafter for the file `draft`, which is "" if there is none.

    `by_rows` is the drafter of a file that drafts from the target's rows; None: it is a model.
    Raises UsageError for drafters that exclude each other.
    """
    named, flag = spec.drafters, spec.name("drafters")
    asked = [name for name in named if name in ROW_FILES]
    if asked:
        _check_row_drafters(named, asked, flag, draft)
        if by_rows is None or by_rows is asked[0]:
            return spec  # a file of another kind is refused when its header is read
    elif by_rows is None or not uses_draft_model(spec):
        return spec
    reasons.append(f"{draft} names {_FILE_WORDS[by_rows]}, which drafts as --spec-type {by_rows}")
    left = tuple(name for name in named if name not in (DrafterName.DRAFT, *ROW_FILES))
    return replace(spec, drafters=(*left, by_rows))


def _check_row_drafters(
    named: Sequence[DrafterName], asked: Sequence[DrafterName], flag: str, draft: str
) -> None:
    """Raise UsageError if drafters `named` beside a row drafter exclude it, or it has no file."""
    own = asked[0]
    if not draft:
        raise UsageError(f"{flag} {own} needs {_FILE_WORDS[own]}: add --draft FILE.gguf")
    for other, reason in (
        (DrafterName.DRAFT, "there is one file for both"),
        (DrafterName.MTP, "one of them can follow the target's rows"),
        *((name, "there is one file for both") for name in asked[1:]),
    ):
        if other in named:
            raise UsageError(f"{flag}: {other} and {own} exclude each other, as {reason}")


def may_use_own_layers(spec: SpecOptions) -> bool:
    """True if the model's own layers draft, provided that it has usable ones."""
    return DrafterName.MTP in spec.drafters or not spec.drafters


def drafts_by_text_alone(spec: SpecOptions) -> bool:
    """True if only drafters of the text draft, and the user named none of them."""
    return spec.drafters == OF_TEXT and "drafters" not in spec.given


def without_rows(spec: SpecOptions) -> SpecOptions:
    """Returns `spec` without the drafter that drafts from the target's hidden rows."""
    if spec.from_rows is None:
        return spec
    left = tuple(name for name in spec.drafters if name is not spec.from_rows)
    return replace(spec, drafters=left or (DrafterName.NONE,))


def without_rows_note(spec: SpecOptions, reason: str) -> str:
    """The sentence that reports why this drafter does not draft, and what drafts."""
    left = [name for name in spec.drafters if name is not spec.from_rows]
    does = f"{' and '.join(left)} draft{'s' * (len(left) == 1)} alone" if left else "nothing drafts"
    return f"{spec.given.get('drafters', '--spec-type')} {spec.from_rows}: {reason}, so {does}"


class Ignored(str):
    """A sentence that reports a flag or variable without effect. Every command prints it."""

    __slots__ = ()


def ignored(name: str, reason: str) -> Ignored:
    """The sentence that reports a flag or variable without effect."""
    return Ignored(f"{name} ignored: {reason}")


def inactive(sentences: Iterable[str]) -> tuple[str, ...]:
    """Those of `sentences` that report something that was asked for and is not active."""
    return tuple(words for words in sentences if isinstance(words, Ignored))


def measuring_only(options: Options, variables: Iterable[str] = (), *, reason: str) -> Options:
    """Returns `options` for a command that verifies no drafts, because of `reason`.

    Flags of speculation without effect there, and the environment's `variables` on drafts, become
    notes.
    """
    spec = options.spec
    kept = ("drafters", "replacements")
    quiet = SpecOptions(
        drafters=spec.drafters,
        replacements=spec.replacements,
        given={field: name for field, name in spec.given.items() if field in kept},
    )
    idle = [name for field, name in spec.given.items() if field not in kept]
    return noted(replace(options, spec=quiet), (*idle, *variables), reason)


def noted(options: Options, names: Iterable[str], reason: str) -> Options:
    """Returns `options` with notes that the flags `names` change nothing, because of `reason`."""
    return replace(options, notes=(*options.notes, *(ignored(name, reason) for name in names)))


def resolve_speculation(
    options: Options,
    draft: Path | None,
    *,
    no_mtp_reason: str,
    environment: Environment,
    is_named: bool,
) -> SpecConfig:
    """Check the options of speculation. Flags without effect are dropped with a note.

    `draft` is the file of a draft model, or one that drafts from rows. If no drafter is named, the
    file and the model's own layers draft. So do drafters of the text alone, unless `is_named` or
    the policy does not price drafts by measured costs. `no_mtp_reason` says why own layers cannot
    draft, and is "" if they can. If nothing may be measured, drafts have 4 tokens, unless the user
    chose a policy that needs no measurements. Raises BadOption or UsageError for options that
    exclude each other.
    """
    reasons: list[str] = []
    has_draft = draft is not None and options.spec.from_file is None
    spec = _with_drafters(options.spec, has_draft, no_mtp_reason, reasons)
    spec = _with_look_ahead(spec, environment, reasons)
    if not is_named and (options.use_profile or environment.batch_costs is not None):
        spec = _with_text(spec)
    costs = _costs_given(spec, environment, reasons)
    if spec.is_on and costs is None and not options.use_profile:
        if "policy" not in spec.given and spec.policy is SpecOptions.policy:
            reasons.append("nothing is measured, so drafts have 4 tokens")
            spec = replace(spec, policy=PolicyName.FIXED)
        elif spec.policy in PRICED:
            free = ", ".join(name for name in PolicyName if name not in PRICED)
            raise UsageError(
                f"{spec.name('policy')} {spec.policy} needs measurements, which "
                f"SPECOFFLOAD_WITHOUT=profile leaves out; these policies do not: {free}"
            )
    spec, of_draft = _effective(options, spec, has_draft, reasons)
    _check(spec)
    return SpecConfig(
        options=spec,
        draft=draft,
        use_profile=options.use_profile,
        profile_dir=environment.profile_folder,
        measure_s=environment.measure_s,
        batch_costs=costs,
        of_draft=of_draft,
        reasons=tuple(dict.fromkeys(reasons)),
    )


def _with_drafters(
    spec: SpecOptions, has_draft: bool, no_mtp_reason: str, reasons: list[str]
) -> SpecOptions:
    if DrafterName.DRAFT in spec.drafters and not has_draft:
        raise UsageError(
            f"{spec.name('drafters')} draft needs a draft model: add --draft DRAFT.gguf"
        )
    if DrafterName.MTP in spec.drafters and no_mtp_reason:
        reasons.append(without_rows_note(spec, no_mtp_reason))
        return without_rows(spec)
    if spec.drafters:
        return spec
    own = () if no_mtp_reason else (DrafterName.MTP,)
    every = (*own, *((DrafterName.DRAFT,) if has_draft else ()))
    return replace(spec, drafters=every[-1:] if spec.accept is AcceptRule.REJECT else every)


def _with_text(spec: SpecOptions) -> SpecOptions:
    """Add the drafters of the text alone, unless the user named a published policy.

    Their drafts cost microseconds, and `throughput` verifies none that do not pay. Other policies
    take the first draft that there is, so with them they would replace a model's better drafts.
    Times decide which drafter of several is asked. With rejection sampling the text depends on the
    draft, so a seed would no longer repeat a text.
    """
    if spec.policy is not PolicyName.THROUGHPUT or spec.accept is AcceptRule.REJECT:
        return spec
    return replace(spec, drafters=(*OF_TEXT, *spec.drafters))


def _with_look_ahead(
    spec: SpecOptions, environment: Environment, reasons: list[str]
) -> SpecOptions:
    """Returns `spec` with GGML_MAX_LOOK_AHEAD, which chooses the policy `costs` if none is named.

    The variable means nothing to other policies (llama.cpp #17034).
    """
    name, sizes = "GGML_MAX_LOOK_AHEAD", environment.max_look_ahead
    if sizes is None or "look_ahead" in spec.given:
        return spec
    if not spec.is_on:
        reasons.append(ignored(name, "nothing drafts"))
        return spec
    if "policy" in spec.given and spec.policy is not PolicyName.COSTS:
        reasons.append(ignored(name, f"{spec.name('policy')} {spec.policy} does not read it"))
        return spec
    if "policy" not in spec.given:
        reasons.append(f"{name} is set, so --spec-policy is costs, not throughput")
    return replace(spec, policy=PolicyName.COSTS, look_ahead=sizes)


def _costs_given(spec: SpecOptions, environment: Environment, reasons: list[str]) -> str | None:
    """GGML_BATCH_COSTS, unless nothing reads it."""
    if environment.batch_costs is None:
        return None
    if not spec.is_on:
        reason = "nothing drafts"
    elif spec.policy not in PRICED:
        reason = f"{spec.name('policy')} {spec.policy} does not read it"
    else:
        return environment.batch_costs
    reasons.append(ignored("GGML_BATCH_COSTS", reason))
    return None


# -- what takes effect


def _effective(
    options: Options, spec: SpecOptions, has_draft: bool, reasons: list[str]
) -> tuple[SpecOptions, DraftOptions]:
    """The options without flags that have no effect. Each such flag is added to `reasons`."""
    active: set[Enum] = {*spec.drafters}
    if has_draft:
        active.add(Need.DRAFT_MODEL)
    if spec.is_on:
        active |= {Need.DRAFTS, spec.policy}
    idle: dict[type, dict[str, Any]] = {SpecOptions: {}, DraftOptions: {}}
    for flag in TABLE:
        if flag.section is SpecOptions:
            name = spec.given.get(flag.field)
        else:
            is_draft = flag.section is DraftOptions
            name = options.given.get(of_draft(flag.field) if is_draft else flag.field)
        if not flag.needs or name is None:
            continue
        if reason := _idle_reason(flag, spec, active) or _other_engine(flag, options):
            reasons.append(ignored(name, reason))
            idle[flag.section][flag.field] = flag.default
    left = {name: used for name, used in spec.given.items() if name not in idle[SpecOptions]}
    return (
        replace(spec, **idle[SpecOptions], given=left),
        replace(options.of_draft, **idle[DraftOptions]),
    )


def _idle_reason(flag: Flag, spec: SpecOptions, active: set[Enum]) -> str:
    """Why the flag has no effect; "" if it has one."""
    if active & set(flag.needs):
        if flag.field == "n_min" and spec.accept is AcceptRule.REJECT:
            return "rejection sampling has to verify every drafted token"
        if flag.field == "accept" and DrafterName.SYNTHETIC in spec.drafters:
            return "synthetic drafts are accepted at the rates that were given"
        return ""
    if spec.drafters == (DrafterName.NONE,):
        return f"nothing drafts with {spec.name('drafters')}"
    if not spec.is_on:
        return "nothing drafts: add --draft DRAFT.gguf or --spec ngram-mod"
    return f"it needs {' or '.join(map(need_words, flag.needs))}"


def _other_engine(flag: Flag, options: Options) -> str:
    """Why the chosen draft engine does not read this flag; "" if it does."""
    engine, name = options.of_draft.engine, options.name(of_draft("engine"))
    if flag.section is not DraftOptions:
        return ""
    if engine is DraftEngine.TORCH and flag.field in _LLAMA_ALONE:
        return f"torch computes the draft ({name} torch)"
    if engine is DraftEngine.LLAMA and flag.field == "vocab":
        return f"libllama computes the draft ({name} llama)"
    return ""


def _check(spec: SpecOptions) -> None:
    """Raises BadOption for options that exclude each other."""
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
