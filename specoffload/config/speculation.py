"""How drafts are made and decided, resolved once: drafters, policy, where the profile lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specdec.errors import BadOption
from specdec.options import (
    MOST_DRAFTED,
    PRICED,
    CheckpointPlace,
    PolicyName,
    SpecOptions,
    Value,
    inert_flags,
    parse_draft_params,
    parse_words,
)
from specdec.options import resolve as resolve_options
from specoffload.config.environment import LLAMA_SPEC_ARGS, Environment
from specoffload.errors import UsageError

_ENGINE_NAMES = {
    "--batch-size": "n_batch",
    "--ubatch-size": "n_ubatch",
    "--ctx-size": "n_ctx",
    "--threads": "n_threads",
    "--threads-batch": "n_threads_batch",
    "--device": "device",
    "--flash-attn": "flash_attn",
}
DRAFT_PARAMS = frozenset(_ENGINE_NAMES)
NO_DRAFTS = SpecOptions()


@dataclass(frozen=True)
class SpecConfig:
    """What a session needs to speculate. `batch_costs` is GGML_BATCH_COSTS where `costs` reads it;
    `draft_params` is the draft's own command line by llama.cpp's flag names."""

    options: SpecOptions = NO_DRAFTS
    use_profile: bool = True
    profile_dir: Path | None = None
    batch_costs: str | None = None
    draft_params: Mapping[str, Value] = field(default_factory=dict)
    record_trace: Path | None = None
    reasons: tuple[str, ...] = ()

    @property
    def draft_options(self) -> dict[str, Any]:
        """`draft_params` under the names of EngineOptions."""
        return {_ENGINE_NAMES[flag]: value for flag, value in self.draft_params.items()}

    @property
    def needs_profile(self) -> bool:
        return self.options.policy in PRICED and self.batch_costs is None

    @property
    def longest(self) -> int:
        """The longest draft that a verification batch must have room for."""
        return MOST_DRAFTED if self.options.n_max is None else self.options.n_max

    def n_rs_seq(self, n_ubatch: int) -> int:
        """Snapshots of recurrent state; all of them must come out of one ubatch."""
        if not self.options.is_on:
            return 0
        return min(self.options.rs_snapshots, self.longest, n_ubatch - 1)

    @property
    def device_checkpoints(self) -> bool:
        return self.options.checkpoints is CheckpointPlace.DEVICE


def resolve_speculation(
    given: Mapping[str, Value],
    *,
    has_draft: bool,
    use_profile: bool,
    draft_params: str | None,
    record_trace: Path | None,
    environment: Environment,
) -> SpecConfig:
    """Check what was typed against what there is; a flag without effect is an error.

    Without a draft and without --spec nothing drafts. Raises BadOption or UsageError.
    """
    given, inherited = _with_environment(given, environment, has_draft=has_draft)
    if draft_params is not None and not has_draft:
        raise UsageError("--draft-params takes no effect without a draft: add --draft DRAFT.gguf")
    spec = SpecConfig(
        use_profile=use_profile,
        profile_dir=environment.profile_folder,
        record_trace=record_trace,
        draft_params=_draft_params(draft_params),
    )
    from_environment = environment.batch_costs is not None or environment.max_look_ahead is not None
    if not has_draft and "--spec-type" not in given:
        inert = [*sorted(given), *(["--record-trace"] if record_trace else [])]
        inert += [] if use_profile else ["--no-profile"]
        if inert:
            raise UsageError(
                f"{_typed(inert[0])} has no effect without a draft: add --draft DRAFT.gguf or "
                "--spec ngram-mod"
            )
        if from_environment:
            unused = "GGML_BATCH_COSTS and GGML_MAX_LOOK_AHEAD have no effect: nothing drafts"
            return replace(spec, reasons=(*inherited, unused))
        return replace(spec, reasons=inherited)
    reasons = list(inherited)
    if from_environment and "--spec-policy" in given:
        from_environment = given["--spec-policy"] == "costs"
        if not from_environment:
            reasons.append(
                f"GGML_BATCH_COSTS and GGML_MAX_LOOK_AHEAD have no effect: "
                f"--spec-policy {given['--spec-policy']} was asked for"
            )
    if from_environment and given.get("--spec-type") != "none":
        if environment.max_look_ahead is not None and "--spec-look-ahead" not in given:
            given["--spec-look-ahead"] = environment.max_look_ahead
        reasons.append(
            "GGML_BATCH_COSTS or GGML_MAX_LOOK_AHEAD is set: the policy is costs, not throughput"
        )
    measured = use_profile or (from_environment and environment.batch_costs is not None)
    given, why = _without_profile(given, measured, from_environment)
    options = resolve_options(given, has_draft=has_draft, batch_costs=from_environment)
    if record_trace is not None and not options.is_on:
        raise UsageError("--record-trace takes no effect: nothing drafts with --spec none")
    costs = environment.batch_costs if options.policy is PolicyName.COSTS else None
    return replace(spec, options=options, batch_costs=costs, reasons=(*reasons, *why))


def _with_environment(
    given: Mapping[str, Value], environment: Environment, *, has_draft: bool
) -> tuple[dict[str, Value], tuple[str, ...]]:
    """`given` and what llama.cpp's variables say beside it; one that takes no effect is noted.

    Raises UsageError naming the variable whose value is none.
    """
    out = dict(given)
    for flag, text in environment.spec.items():
        if flag not in given:
            try:
                out |= parse_words([f"{flag}={text}"])
            except BadOption as e:
                raise UsageError(f"{LLAMA_SPEC_ARGS[flag]}={text}: {e}") from e
    mine = [flag for flag in out if flag not in given]
    if not has_draft and "--spec-type" not in out:
        inert = dict.fromkeys(mine, "nothing drafts")
    else:
        try:
            inert = inert_flags(out, has_draft=has_draft)
        except BadOption as e:
            if "--spec-type" in given:
                raise
            name = LLAMA_SPEC_ARGS["--spec-type"]
            raise UsageError(f"{name}={environment.spec['--spec-type']}: {e}") from e
    dropped = [flag for flag in mine if flag in inert]
    kept = {flag: value for flag, value in out.items() if flag not in dropped}
    return kept, tuple(f"{LLAMA_SPEC_ARGS[f]} has no effect: {inert[f]}" for f in dropped)


def _without_profile(
    given: dict[str, Value], use_profile: bool, from_environment: bool
) -> tuple[dict[str, Value], tuple[str, ...]]:
    """--no-profile: blocks of 4, unless another policy was asked for that needs none."""
    policy = given.get("--spec-policy")
    if use_profile:
        return given, ()
    if given.get("--spec-type") == "none":
        raise UsageError("--no-profile takes no effect: nothing drafts with --spec none")
    if from_environment:
        raise UsageError(
            "--no-profile and GGML_MAX_LOOK_AHEAD exclude each other: it selects the policy costs, "
            "which needs a profile (or GGML_BATCH_COSTS); unset it, or choose a --spec-policy"
        )
    if policy is None:
        why = "--no-profile: nothing is measured, so drafts are fixed blocks of 4"
        return {**given, "--spec-policy": "fixed"}, (why,)
    if policy in PRICED:
        raise UsageError(
            f"--spec-policy {policy} needs a profile: drop --no-profile, or choose fixed, p-min, "
            "ratio or bandit"
        )
    return given, ()


def _draft_params(text: str | None) -> Mapping[str, Value]:
    return {} if text is None else parse_draft_params(text, DRAFT_PARAMS)


def _typed(flag: str) -> str:
    """The name under which a flag is best known."""
    return {"--spec-draft-n-max": "--draft-max"}.get(flag, flag)
