"""Every option of speculation, under llama.cpp's flag names, in one table.

A flag that cannot take effect is an error, not ignored (C10): one of a drafter or policy that is
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
DRAFTER_ALIASES = {"draft-simple": "draft"}
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
ACCEPTANCES = ("match", "reject")
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
        needs=("spec:synthetic",), least=1,
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
    Option("--flash-attn", "text", None, "flash attention", ("-fa",)),
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
        return text
    try:
        value = int(text) if option.kind == "int" else float(text)
    except ValueError:
        what = "a whole number" if option.kind == "int" else "a number"
        raise BadOption(f"{name} is {text!r}; it must be {what}") from None
    low, high = option.least, option.most
    if not ((low is None or value >= low) and (high is None or value <= high)):
        between = f"at least {low}" if high is None else f"between {low} and {high}"
        raise BadOption(f"{name} is {text}; it must be {between}")
    return value


def parse_draft_params(text: str, supported: frozenset[str]) -> dict[str, Value]:
    """`--draft-params "..."`, a whole command line for the draft (C08), by full flag name.

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
    for flag in given:
        if flag not in known:
            raise BadOption(f"{flag} is no option of speculation")
    drafters = _drafters(given.get("--spec-type"), has_draft)
    policy = str(given.get("--spec-policy", "costs" if batch_costs else "throughput"))
    if policy not in POLICIES:
        raise BadOption(f"--spec-policy {policy!r} is unknown; there are {', '.join(POLICIES)}")
    values: dict[str, Value | None] = {o.flag: given.get(o.flag, o.default) for o in OPTIONS}
    if values["--spec-accept"] not in ACCEPTANCES:
        raise BadOption(f"--spec-accept must be one of {', '.join(ACCEPTANCES)}")
    if values["--spec-checkpoints"] not in CHECKPOINTS:
        raise BadOption(f"--spec-checkpoints must be one of {', '.join(CHECKPOINTS)}")
    active = {f"spec:{d}" for d in drafters} | {f"policy:{policy}"}
    if values["--spec-tree"] is True:
        active.add("tree")
        if policy != "throughput" or drafters != ("draft",):
            raise BadOption("--spec-tree needs the draft model alone and --spec-policy throughput")
    for flag in given:
        needs = known[flag].needs
        if needs and not active & set(needs):
            raise BadOption(f"{flag} takes no effect: it needs {' or '.join(map(_words, needs))}")
    if drafters == ("none",):
        inert = sorted(f for f in given if f != "--spec-type")
        if inert:
            raise BadOption(f"{inert[0]} takes no effect: nothing drafts with --spec-type none")
    return SpecOptions(drafters, policy, values, frozenset(given))


def _drafters(text: Value | None, has_draft: bool) -> tuple[str, ...]:
    if text is None:
        return ("draft",) if has_draft else ("ngram-mod", "suffix")
    names = tuple(DRAFTER_ALIASES.get(n.strip(), n.strip()) for n in str(text).split(","))
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
