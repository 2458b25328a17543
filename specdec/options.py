"""Every option of speculation, under llama.cpp's flag names, in one table.

A flag that cannot take effect is an error, not ignored: one of a drafter or policy that is
not in use, one of a draft model without a draft model, one this runtime cannot honour.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from specdec.errors import BadOption

Kind = Literal["int", "float", "text", "flag"]
Value = int | float | str | bool

DRAFTERS = (
    "none",
    "draft",
    "ngram-simple",
    "ngram-map-k",
    "ngram-map-k4v",
    "ngram-mod",
    "ngram-cache",
    "suffix",
    "synthetic",
)
# llama.cpp's names: its example of ngram-cache is called lookup.
DRAFTER_ALIASES = {"draft-simple": "draft", "lookup": "ngram-cache"}
POLICIES = (
    "throughput",
    "fixed",
    "p-min",
    "p-mins",
    "rational",
    "speed-a",
    "speed-b",
    "costs",
    "ratio",
    "bandit",
)
# Policies that read T(n); the others decide without it.
PRICED = frozenset({"throughput", "p-mins", "rational", "speed-a", "speed-b", "costs"})
MOST_DRAFTED = 63  # a verification batch holds one token more
LONGEST = 16  # llama.cpp's --draft-max; throughput has the profile's
ACCEPTANCES = ("match", "reject")
SWITCH = ("auto", "on", "off")
CHECKPOINTS = ("device", "host")


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
    Option("--spec-accept", "text", "match", "acceptance: " + ", ".join(ACCEPTANCES)),
    Option(
        "--spec-rs-snapshots", "int", 8,
        "recurrent models: drafted tokens that roll back by snapshots (n_rs_seq)", least=0, most=63,
    ),
    Option(
        "--spec-checkpoints", "text", "device",
        "recurrent models: where checkpoints lie: " + ", ".join(CHECKPOINTS),
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
    """Resolved options: `values` by flag, defaults filled in; `given` are those typed."""

    drafters: tuple[str, ...]
    policy: str
    values: Mapping[str, Value | None]
    given: frozenset[str]

    def integer(self, flag: str) -> int:
        value = self.values[flag]
        assert isinstance(value, int), flag
        return value

    def number(self, flag: str) -> float:
        value = self.values[flag]
        assert isinstance(value, int | float), flag
        return float(value)

    def text(self, flag: str) -> str | None:
        value = self.values[flag]
        assert value is None or isinstance(value, str), flag
        return value

    @property
    def tree(self) -> bool:
        return self.values["--spec-tree"] is True


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
    if values["--spec-accept"] not in ACCEPTANCES:
        raise BadOption(f"--spec-accept must be one of {', '.join(ACCEPTANCES)}")
    if values["--spec-checkpoints"] not in CHECKPOINTS:
        raise BadOption(f"--spec-checkpoints must be one of {', '.join(CHECKPOINTS)}")
    if values["--spec-tree"] is True and (policy != "throughput" or drafters != ("draft",)):
        raise BadOption("--spec-tree needs the draft model alone and --spec-policy throughput")
    for flag, why in _inert(given, drafters, policy).items():
        raise BadOption(f"{flag} takes no effect: {why}")
    _check_ranges(values, drafters, policy)
    return SpecOptions(drafters, policy, values, frozenset(given))


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


def _drafters(text: Value | None, has_draft: bool) -> tuple[str, ...]:
    if text is None:
        return ("draft",) if has_draft else ("ngram-mod", "suffix")
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
    return names


def _words(need: str) -> str:
    kind, _, name = need.partition(":")
    flags = {"spec": "--spec-type", "policy": "--spec-policy", "tree": "--spec-tree"}
    return f"{flags[kind]} {name}".strip()
