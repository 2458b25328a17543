"""Flags of sampling, and the fields of requests with the same meaning."""

from __future__ import annotations

from typing import Any

from offload.sampling.options import SAMPLERS
from specoffload.config.flag import FLOAT, INT, SWITCH, TEXT, Flag, Kind, Panel, flag
from specoffload.config.values import (
    ANY_TEXT,
    BREAKER,
    CONTENTS,
    LOGIT_BIAS,
    REASONING_BUDGET,
    SAMPLER_NAMES,
    SEED,
)
from specoffload.session.generation import AskedOptions

ANSWERS = frozenset({"run", "chat", "serve"})  # commands that generate text for a user


def _sampling(field: str, spelling: str, kind: Kind, about: str, **more: object) -> Flag:
    """A sampling flag of `run`, `chat` and `serve`. Requests to `serve` may set another value."""
    more = {"commands": ANSWERS, "request": field, "rare": True} | more
    return flag(AskedOptions, field, spelling, kind, about, Panel.SAMPLING, **more)


_A_FILE: dict[str, Any] = {"request": "", "rare": False}  # requests send the text itself

SAMPLING = (
    _sampling(
        "temperature", "--temp --temperature LLAMA_ARG_TEMPERATURE", FLOAT,
        "Temperature; 0 always takes the likeliest token.", least=0, most=1000, rare=False,
    ),
    _sampling(
        "top_k", "--top-k LLAMA_ARG_TOP_K", INT, "Keep the k likeliest tokens; 0 and -1: all.",
        least=-1, rare=False,
    ),
    _sampling(
        "top_p", "--top-p LLAMA_ARG_TOP_P", FLOAT,
        "Keep the likeliest tokens up to this joint probability; 1: all.", least=0, most=1,
        rare=False,
    ),
    _sampling(
        "min_p", "--min-p LLAMA_ARG_MIN_P", FLOAT,
        "Keep tokens with at least this share of the likeliest one's probability; 0: all.",
        least=0, most=1, rare=False,
    ),
    _sampling(
        "repeat_penalty", "--repeat-penalty LLAMA_ARG_REPEAT_PENALTY", FLOAT,
        "Penalty of tokens seen lately; 1: off.", above=0, most=1000, rare=False,
    ),
    _sampling(
        "repeat_last_n", "--repeat-last-n", INT, "Last tokens that penalties look at; -1: all.",
        least=-1,
    ),
    _sampling(
        "frequency_penalty", "--frequency-penalty LLAMA_ARG_FREQUENCY_PENALTY", FLOAT,
        "Penalty of a token for each time it was seen.", least=-2, most=2,
    ),
    _sampling(
        "presence_penalty", "--presence-penalty LLAMA_ARG_PRESENCE_PENALTY", FLOAT,
        "Penalty of a token that was seen at all.", least=-2, most=2,
    ),
    _sampling(
        "typical_p", "--typical --typical-p", FLOAT,
        "Keep the tokens of most typical surprise up to this joint probability; 1: all.",
        least=0, most=1,
    ),
    _sampling(
        "top_n_sigma", "--top-nsigma --top-n-sigma", FLOAT,
        "Keep tokens whose logit is within this many standard deviations of the greatest; 0 or "
        "less: all.",
    ),
    _sampling(
        "xtc_probability", "--xtc-probability", FLOAT,
        "How often XTC leaves the likeliest tokens out; 0: never.", least=0, most=1,
    ),
    _sampling(
        "xtc_threshold", "--xtc-threshold", FLOAT,
        "Least probability of the tokens XTC leaves out, all but the last; over 0.5: none.",
        least=0, most=1,
    ),
    _sampling(
        "dynatemp_range", "--dynatemp-range", FLOAT,
        "How far the temperature follows the entropy; 0: it stays.", least=0, most=1000,
    ),
    _sampling(
        "dynatemp_exponent", "--dynatemp-exp", FLOAT,
        "Exponent by which the temperature follows the entropy.", least=0, most=1000,
    ),
    _sampling(
        "dry_multiplier", "--dry-multiplier", FLOAT,
        "Penalty of a token that would lengthen a repetition (DRY); 0: off.", least=0, most=1000,
    ),
    _sampling(
        "dry_base", "--dry-base", FLOAT, "Factor of that penalty for each further repeated token.",
        least=1, most=1000,
    ),
    _sampling(
        "dry_allowed_length", "--dry-allowed-length", INT,
        "Tokens that may repeat without that penalty.", least=0,
    ),
    _sampling(
        "dry_penalty_last_n", "--dry-penalty-last-n", INT,
        "Last tokens that DRY looks at; -1: all.", least=-1,
    ),
    _sampling(
        "dry_sequence_breakers", "--dry-sequence-breaker", BREAKER,
        "Text that ends a repetition; may be given several times; none: nothing does.",
        default_words='"\\n", ":", "\"", "*"', repeats=True,
    ),
    _sampling(
        "mirostat", "--mirostat", INT,
        "1 or 2: keep the text's surprise at a constant level; 0: off.", least=0, most=2,
        more="Other samplers than the temperature then have no effect, penalties included.",
    ),
    _sampling(
        "mirostat_eta", "--mirostat-lr", FLOAT, "Mirostat's learning rate.", least=0, most=1000,
    ),
    _sampling(
        "mirostat_tau", "--mirostat-ent", FLOAT, "Surprise that Mirostat aims at, in bits.",
        least=0, most=1000,
    ),
    _sampling(
        "adaptive_target", "--adaptive-target", FLOAT,
        "Mean probability of chosen tokens, if --samplers names adaptive_p; below 0: any.",
        most=1,
    ),
    _sampling(
        "adaptive_decay", "--adaptive-decay", FLOAT, "How slowly adaptive_p forgets.", least=0,
        most=0.99,
    ),
    _sampling(
        "min_keep", "--min-keep", INT,
        "Tokens that top-p, min-p, typical and XTC keep at least.", least=0,
    ),
    _sampling(
        "samplers", "--samplers", SAMPLER_NAMES,
        "Samplers in their order, separated by ; one that is not named is off.",
        more="[sampling.md](sampling.md) says what each does.", default_words="; ".join(SAMPLERS),
    ),
    _sampling(
        "logit_bias", "--logit-bias -l", LOGIT_BIAS,
        "Number added to a token's logit, as in 15043+1 or 15043-inf; may be given several times.",
        repeats=True,
    ),
    _sampling(
        "seed", "--seed -s", SEED, "Seed of the random numbers; -1: random.",
        default_words="random", rare=False,
    ),
    _sampling("ignore_eos", "--ignore-eos", SWITCH, "Never choose an end token."),
    _sampling(
        "reasoning_budget", "--reasoning-budget LLAMA_ARG_THINK_BUDGET", REASONING_BUDGET,
        "Tokens after which a chat's reasoning is ended; -1: none.", default_words="-1", request="",
    ),
    _sampling(
        "reasoning_budget_message",
        "--reasoning-budget-message LLAMA_ARG_THINK_BUDGET_MESSAGE", TEXT,
        "Text written before reasoning is ended by its budget.", request="",
    ),
    _sampling(
        "spm_infill", "--spm-infill", SWITCH,
        "In /infill, put the suffix before the prefix, as some models were trained.",
        commands=frozenset({"serve"}), request="",
    ),
    _sampling(
        "grammar", "--grammar", ANY_TEXT, "GBNF grammar that the answer must follow.", rare=False,
    ),
    _sampling("grammar", "--grammar-file", CONTENTS, "File with that grammar.", **_A_FILE),
    _sampling(
        "json_schema", "--json-schema -j", ANY_TEXT, "JSON schema that the answer must follow.",
        rare=False,
    ),
    _sampling(
        "json_schema", "--json-schema-file -jf", CONTENTS, "File with that schema.", **_A_FILE,
    ),
    _sampling(
        "stop", "--reverse-prompt -r", TEXT,
        "Text at which the answer ends; may be given several times.", repeats=True,
    ),
)  # fmt: skip
