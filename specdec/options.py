"""Every option of speculation, under llama.cpp's flag names, in one table.

A flag that cannot take effect is an error, not ignored: one of a drafter or policy that is
not in use, one of a draft model without a draft model, one this runtime cannot honour.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from specdec.errors import BadOption

Kind = Literal["int", "float", "text", "flag"]
Value = int | float | str | bool


class DrafterName(StrEnum):
    """What proposes tokens; llama.cpp's names where it has the drafter."""

    NONE = "none"
    DRAFT = "draft"
    NGRAM_SIMPLE = "ngram-simple"
    NGRAM_MAP_K = "ngram-map-k"
    NGRAM_MAP_K4V = "ngram-map-k4v"
    NGRAM_MOD = "ngram-mod"
    NGRAM_CACHE = "ngram-cache"
    SUFFIX = "suffix"
    SYNTHETIC = "synthetic"


# llama.cpp's names: its example of ngram-cache is called lookup.
DRAFTER_ALIASES = {"draft-simple": DrafterName.DRAFT, "lookup": DrafterName.NGRAM_CACHE}


class PolicyName(StrEnum):
    """What decides how many drafted tokens are verified."""

    THROUGHPUT = "throughput"
    FIXED = "fixed"
    P_MIN = "p-min"
    P_MINS = "p-mins"
    RATIONAL = "rational"
    SPEED_A = "speed-a"
    SPEED_B = "speed-b"
    COSTS = "costs"
    RATIO = "ratio"
    BANDIT = "bandit"


class AcceptRule(StrEnum):
    """When a drafted token is kept: it is the one chosen, or by rejection sampling."""

    MATCH = "match"
    REJECT = "reject"


class CheckpointPlace(StrEnum):
    """Where the state of a recurrent memory is kept while a draft is verified."""

    DEVICE = "device"
    HOST = "host"


DRAFTERS = tuple(DrafterName)
POLICIES = tuple(PolicyName)
# Policies that read T(n); the others decide without it.
PRICED = frozenset(
    {
        PolicyName.THROUGHPUT,
        PolicyName.P_MINS,
        PolicyName.RATIONAL,
        PolicyName.SPEED_A,
        PolicyName.SPEED_B,
        PolicyName.COSTS,
    }
)
MOST_DRAFTED = 63  # a verification batch holds one token more
LONGEST = 16  # llama.cpp's --draft-max; throughput has the profile's
SWITCH = ("auto", "on", "off")


@dataclass(frozen=True)
class Option:
    """One flag. `needs` says when it takes effect: "" always, "spec:NAME" with that drafter,
    "policy:NAME" with that policy, "tree" with tree drafts; several are alternatives."""

    flag: str
    kind: Kind
    default: Value | None
    help: str
    aliases: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()


def _sizes(drafter: str, n: int, m: int) -> tuple[Option, ...]:
    needs = (f"spec:{drafter}",)
    flag = f"--spec-{drafter}-size"
    return (
        Option(f"{flag}-n", "int", n, "tokens looked up", needs=needs, least=1),
        Option(f"{flag}-m", "int", m, "tokens drafted", needs=needs, least=1),
    )


OPTIONS: tuple[Option, ...] = (
    Option("--spec-type", "text", None, "drafters, comma separated", ("--spec",)),
    Option("--spec-policy", "text", None, "how draft lengths are decided: " + ", ".join(POLICIES)),
    Option(
        "--spec-draft-n-max", "int", None, "longest draft", ("--draft-max", "--draft", "--draft-n"),
        least=0, most=1023,
    ),
    Option(
        "--spec-draft-n-min", "int", 0, "drafts shorter than this are dropped", ("--draft-min",),
        needs=("policy:p-min",), least=0,
    ),
    Option(
        "--spec-draft-p-min", "float", 0.75, "least probability of a drafted token",
        ("--draft-p-min",), needs=("policy:p-min",), least=0, most=1,
    ),
    Option("--spec-tree", "flag", False, "draft trees", needs=("spec:draft",)),
    Option(
        "--spec-draft-p-split", "float", 0.1, "least probability of a second branch",
        ("--draft-p-split",), needs=("tree",), least=0, most=1,
    ),
    Option("--spec-accept", "text", "match", "acceptance: " + ", ".join(AcceptRule)),
    Option(
        "--spec-rs-snapshots", "int", 8,
        "recurrent models: drafted tokens that roll back by snapshots (n_rs_seq)", least=0, most=63,
    ),
    Option(
        "--spec-checkpoints", "text", "device",
        "recurrent models: where checkpoints lie: " + ", ".join(CheckpointPlace),
    ),
    *_sizes("ngram-simple", 12, 48),
    *_sizes("ngram-map-k", 12, 48),
    Option(
        "--spec-ngram-map-k-min-hits", "int", 1, "occurrences before a key drafts",
        needs=("spec:ngram-map-k",), least=1,
    ),
    *_sizes("ngram-map-k4v", 8, 8),
    Option(
        "--spec-ngram-map-k4v-min-hits", "int", 2, "occurrences before a key drafts",
        needs=("spec:ngram-map-k4v",), least=1,
    ),
    Option(
        "--spec-ngram-mod-n-match", "int", 24, "tokens hashed", needs=("spec:ngram-mod",), least=1
    ),
    Option(
        "--spec-ngram-mod-n-min", "int", 1, "shorter drafts are dropped",
        needs=("spec:ngram-mod",), least=0,
    ),
    Option(
        "--spec-ngram-mod-n-max", "int", 64, "longest draft", needs=("spec:ngram-mod",), least=1
    ),
    Option(
        "--lookup-cache-static", "text", None, "lookup cache file, read only", ("-lcs",),
        needs=("spec:ngram-cache",),
    ),
    Option(
        "--lookup-cache-dynamic", "text", None, "lookup cache file, updated", ("-lcd",),
        needs=("spec:ngram-cache",),
    ),
    Option("--spec-suffix-corpus", "text", None, "text file to draft from", needs=("spec:suffix",)),
    Option(
        "--spec-suffix-min-match", "int", 2, "least match", needs=("spec:suffix",), least=1
    ),
    Option(
        "--spec-replace", "text", None, "TARGET=DRAFT text pairs, comma separated, for a draft of "
        "another vocabulary", needs=("spec:draft",),
    ),
    Option(
        "--spec-look-ahead", "int", 0, "sizes tried past the best (GGML_MAX_LOOK_AHEAD)",
        needs=("policy:costs",), least=0,
    ),
    Option(
        "--spec-synth-len", "float", None, "mean accepted length, own token included",
        needs=("spec:synthetic",), least=1, most=64,
    ),
    Option(
        "--spec-synth-rates", "text", None, "rates of the first 1, 2, ... tokens being accepted",
        needs=("spec:synthetic",),
    ),
)  # fmt: skip

# What may stand in --draft-params: llama.cpp's names, and whether a value follows.
DRAFT_PARAMS: tuple[Option, ...] = (
    Option("--batch-size", "int", None, "logical batch", ("-b",), least=1),
    Option("--ubatch-size", "int", None, "physical batch", ("-ub",), least=1),
    Option("--ctx-size", "int", None, "context, 0: the draft's own", ("-c",), least=0),
    Option("--threads", "int", None, "threads", ("-t",), least=1),
    Option("--threads-batch", "int", None, "threads of batches", ("-tb",), least=1),
    Option("--gpu-layers", "int", None, "layers on the GPU", ("-ngl", "--n-gpu-layers"), least=0),
    Option("--device", "text", None, "device", ("-dev",)),
    Option("--seed", "int", None, "seed", ("-s",)),
    Option("--flash-attn", "text", None, "flash attention", ("-fa",), choices=SWITCH),
    Option("--cache-type-k", "text", None, "type of K", ("-ctk",)),
    Option("--cache-type-v", "text", None, "type of V", ("-ctv",)),
    Option("--split-mode", "text", None, "split over devices", ("-sm",)),
    Option("--tensor-split", "text", None, "shares of devices", ("-ts",)),
    Option("--main-gpu", "int", None, "main device", ("-mg",), least=0),
    Option("--override-tensor", "text", None, "placement by name", ("-ot",)),
    Option("--cpu-moe", "flag", None, "experts on the CPU", ("-cmoe",)),
    Option("--n-cpu-moe", "int", None, "layers with experts on the CPU", ("-ncmoe",), least=0),
    Option("--mlock", "flag", None, "lock memory"),
    Option("--no-mmap", "flag", None, "read instead of mapping"),
)


@dataclass(frozen=True)
class SpecOptions:
    """How drafts are made, decided and judged. `given` are the fields somebody set, each under the
    name it was set by: a flag, a variable."""

    drafters: tuple[DrafterName, ...] = (DrafterName.NONE,)
    policy: PolicyName = PolicyName.THROUGHPUT
    n_max: int | None = None  # the longest draft; None: the policy's own
    n_min: int = 0
    p_min: float = 0.75
    tree: bool = False
    p_split: float = 0.1
    accept: AcceptRule = AcceptRule.MATCH
    rs_snapshots: int = 8
    checkpoints: CheckpointPlace = CheckpointPlace.DEVICE
    ngram_simple_size_n: int = 12
    ngram_simple_size_m: int = 48
    ngram_map_k_size_n: int = 12
    ngram_map_k_size_m: int = 48
    ngram_map_k_min_hits: int = 1
    ngram_map_k4v_size_n: int = 8
    ngram_map_k4v_size_m: int = 8
    ngram_map_k4v_min_hits: int = 2
    ngram_mod_n_match: int = 24
    ngram_mod_n_min: int = 1
    ngram_mod_n_max: int = 64
    lookup_static: Path | None = None
    lookup_dynamic: Path | None = None
    suffix_corpus: Path | None = None
    suffix_min_match: int = 2
    replacements: tuple[tuple[str, str], ...] | None = (
        None  # (target's, draft's); None: one vocabulary
    )
    look_ahead: int = 0
    synth_len: float | None = None
    synth_rates: tuple[float, ...] | None = None
    given: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_on(self) -> bool:
        return self.drafters != (DrafterName.NONE,)

    def name(self, option: str) -> str:
        """What whoever set this field called it, for messages; else the field's own name."""
        return self.given.get(option, option)


def parse_words(
    words: Sequence[str], table: Sequence[Option] = OPTIONS, named: Sequence[str] = ()
) -> dict[str, Value]:
    """Flags and values of a command line, by full flag name. Raises BadOption, which names those
    that there are: `named`, or all of the table."""
    by_name = {name: o for o in table for name in (o.flag, *o.aliases)}
    out: dict[str, Value] = {}
    at = 0
    while at < len(words):
        name, equals, inline = words[at].partition("=")
        option = by_name.get(name)
        if option is None:
            known = ", ".join(named or [o.flag for o in table])
            raise BadOption(f"{words[at]!r} is no option here; there are {known}")
        at += 1
        if option.kind == "flag":
            if equals:
                raise BadOption(f"{name} takes no value")
            out[option.flag] = True
            continue
        if not equals:
            if at >= len(words):
                raise BadOption(f"{name} needs a value: {option.help}")
            inline = words[at]
            at += 1
        out[option.flag] = _value(option, name, inline)
    return out


def _value(option: Option, name: str, text: str) -> Value:
    if option.kind == "text":
        if option.choices and text not in option.choices:
            raise BadOption(f"{name} is {text!r}; it must be one of {', '.join(option.choices)}")
        return text
    try:
        value = int(text) if option.kind == "int" else float(text)
    except ValueError:
        what = "a whole number" if option.kind == "int" else "a number"
        raise BadOption(f"{name} is {text!r}; it must be {what}") from None
    check_bounds(option, name, value)
    return value


def check_bounds(option: Option, name: str, value: Value) -> None:
    """Raises BadOption for a number out of the option's range, or that is none (NaN)."""
    if isinstance(value, str | bool):
        return
    low, high = option.least, option.most
    if not ((low is None or value >= low) and (high is None or value <= high)):
        between = f"at least {low}" if high is None else f"between {low} and {high}"
        raise BadOption(f"{name} is {value}; it must be {between}")


def parse_draft_params(text: str, supported: frozenset[str]) -> dict[str, Value]:
    """`--draft-params "..."`, a whole command line for the draft, by full flag name.

    `supported` are the flags the engine honours; any other is refused. Raises BadOption.
    """
    try:
        words = shlex.split(text)
    except ValueError as e:
        raise BadOption(f"--draft-params {text!r}: {e}") from e
    try:
        given = parse_words(words, DRAFT_PARAMS, sorted(supported))
    except BadOption as e:
        raise BadOption(f"--draft-params: {e}") from e
    for flag in given:
        if flag not in supported:
            raise BadOption(
                f"--draft-params: {flag} is llama.cpp's, but takes no effect on a draft here; "
                f"these do: {', '.join(sorted(supported))}"
            )
    return given


def resolve(
    given: Mapping[str, Value], *, has_draft: bool, batch_costs: bool = False
) -> SpecOptions:
    """Check `given` (full flag names) and fill in the rest.

    Drafters default to the draft model where there is one, else to n-grams; `batch_costs` (the
    environment gives GGML_BATCH_COSTS) makes `costs` the policy. Raises BadOption.
    """
    known = {o.flag: o for o in OPTIONS}
    for flag, value in given.items():
        if flag not in known:
            raise BadOption(f"{flag} is no option of speculation")
        check_bounds(known[flag], flag, value)
    drafters = _drafters(given.get("--spec-type"), has_draft)
    policy = str(given.get("--spec-policy", "costs" if batch_costs else "throughput"))
    if policy not in POLICIES:
        raise BadOption(f"--spec-policy {policy!r} is unknown; there are {', '.join(POLICIES)}")
    values: dict[str, Value | None] = {o.flag: given.get(o.flag, o.default) for o in OPTIONS}
    if values["--spec-accept"] not in tuple(AcceptRule):
        raise BadOption(f"--spec-accept must be one of {', '.join(AcceptRule)}")
    if values["--spec-checkpoints"] not in tuple(CheckpointPlace):
        raise BadOption(f"--spec-checkpoints must be one of {', '.join(CheckpointPlace)}")
    if values["--spec-tree"] is True and (policy != "throughput" or drafters != ("draft",)):
        raise BadOption("--spec-tree needs the draft model alone and --spec-policy throughput")
    for flag, why in _inert(given, drafters, policy).items():
        raise BadOption(f"{flag} takes no effect: {why}")
    _check_ranges(values, drafters, policy)
    return _typed(given, drafters, PolicyName(policy))


_FIELDS = {
    "--spec-type": "drafters",
    "--spec-replace": "replacements",
    "--lookup-cache-static": "lookup_static",
    "--lookup-cache-dynamic": "lookup_dynamic",
}


def field_of(flag: str) -> str:
    """The field of SpecOptions that a flag sets."""
    short = flag.removeprefix("--spec-").removeprefix("draft-").replace("-", "_")
    return _FIELDS.get(flag, short)


def _typed(
    given: Mapping[str, Value], drafters: tuple[DrafterName, ...], policy: PolicyName
) -> SpecOptions:
    readers: dict[str, Callable[[str], object]] = {
        "accept": AcceptRule,
        "checkpoints": CheckpointPlace,
        "lookup_static": Path,
        "lookup_dynamic": Path,
        "suffix_corpus": Path,
        "replacements": replace_pairs,
        "synth_rates": _rates,
    }
    fields: dict[str, Any] = {}
    for flag, value in given.items():
        name = field_of(flag)
        fields[name] = readers[name](str(value)) if name in readers else value
    fields |= {"drafters": drafters, "policy": policy}
    return SpecOptions(**fields, given={field_of(flag): flag for flag in given})


def replace_pairs(text: str) -> tuple[tuple[str, str], ...]:
    """`TARGET=DRAFT,...` as pairs. Raises BadOption for a part without `=`."""
    pairs = []
    for part in filter(None, text.split(",")):
        target, equals, draft = part.partition("=")
        if not equals or not target:
            raise BadOption(f"--spec-replace {text}: {part!r} is not TARGET=DRAFT")
        pairs.append((target, draft))
    return tuple(pairs)


def _rates(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(rate) for rate in text.split(","))
    except ValueError as e:
        raise BadOption(f"--spec-synth-rates {text}: {e}") from None


def inert_flags(given: Mapping[str, Value], *, has_draft: bool) -> dict[str, str]:
    """Those of `given` that cannot take effect among the others, and why not.

    Raises BadOption for drafters that `resolve` refuses.
    """
    policy = str(given.get("--spec-policy", "throughput"))
    return _inert(given, _drafters(given.get("--spec-type"), has_draft), policy)


def _inert(given: Mapping[str, Value], drafters: tuple[str, ...], policy: str) -> dict[str, str]:
    active = {f"spec:{d}" for d in drafters} | {f"policy:{policy}"}
    active |= {"tree"} if given.get("--spec-tree") is True else set()
    out: dict[str, str] = {}
    for option in OPTIONS:
        if option.flag not in given:
            continue
        if option.needs and not active & set(option.needs):
            out[option.flag] = f"it needs {' or '.join(map(_words, option.needs))}"
        elif drafters == ("none",) and option.flag != "--spec-type":
            out[option.flag] = "nothing drafts with --spec-type none"
    return out


def _check_ranges(
    values: Mapping[str, Value | None], drafters: tuple[str, ...], policy: str
) -> None:
    """Raises BadOption where no draft is long enough and short enough at once."""
    pairs = []
    if policy == "p-min":
        pairs.append(("--spec-draft-n-min", "--spec-draft-n-max"))
    if "ngram-mod" in drafters:
        pairs.append(("--spec-ngram-mod-n-min", "--spec-ngram-mod-n-max"))
    for least, most in pairs:
        low, high = values[least], values[most]
        high = LONGEST if high is None else high
        assert isinstance(low, int)
        assert isinstance(high, int)
        if 0 < high < low:
            raise BadOption(f"{least} {low} is above {most} {high}: no draft could be verified")


def drafter_names(text: str) -> tuple[str, ...]:
    """The names in `--spec-type`, aliases replaced."""
    return tuple(DRAFTER_ALIASES.get(n.strip(), n.strip()) for n in text.split(","))


def _drafters(text: Value | None, has_draft: bool) -> tuple[DrafterName, ...]:
    if text is None:
        one, free = (DrafterName.DRAFT,), (DrafterName.NGRAM_MOD, DrafterName.SUFFIX)
        return one if has_draft else free
    names = drafter_names(str(text))
    for name in names:
        if name not in DRAFTERS:
            raise BadOption(f"--spec-type {name!r} is unknown; there are {', '.join(DRAFTERS)}")
    if len(set(names)) != len(names):
        raise BadOption(f"--spec-type {text} names a drafter twice")
    if "draft" in names and not has_draft:
        raise BadOption("--spec-type draft needs a draft model: give --model-draft")
    if has_draft and "draft" not in names:
        raise BadOption(f"--model-draft takes no effect with --spec-type {text}; add draft to it")
    for alone in ("none", "synthetic"):
        if alone in names and len(names) > 1:
            raise BadOption(f"--spec-type {alone} stands alone")
    return tuple(DrafterName(name) for name in names)


def _words(need: str) -> str:
    kind, _, name = need.partition(":")
    flags = {"spec": "--spec-type", "policy": "--spec-policy", "tree": "--spec-tree"}
    return f"{flags[kind]} {name}".strip()
