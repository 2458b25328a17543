"""Flags of sampling, and the fields of requests with the same meaning."""

from __future__ import annotations

from typing import Any

from offload.sampling.options import SAMPLERS
from specoffload.config.flag import FLOAT, INT, MODEL_TEXT, SWITCH, Flag, Panel, ValueKind, flag
from specoffload.config.values import (
    ANY_TEXT,
    BREAKER,
    CONTENTS,
    LOGIT_BIAS,
    REASONING_BUDGET,
    SAMPLER_NAMES,
    SEED,
)
from specoffload.generation.generation import AskedOptions

ANSWERS = frozenset({"run", "chat", "serve"})  # commands that generate text for a user


def _sampling(field: str, spelling: str, kind: ValueKind, about: str, **more: object) -> Flag:
    """A sampling flag of `run`, `chat` and `serve`. Requests to `serve` may set another value."""
    more = {"commands": ANSWERS, "request": field, "rare": True} | more
    return flag(AskedOptions, field, spelling, kind, about, Panel.SAMPLING, **more)


_A_FILE: dict[str, Any] = {"request": "", "rare": False}  # requests send the text itself

SAMPLING = (
    _sampling(
        "temperature", "--temp --temperature LLAMA_ARG_TEMPERATURE", FLOAT,
        "Temperature. 0 always takes the likeliest token.", least=0, most=1000, rare=False,
    ),
    _sampling(
        "top_k", "--top-k LLAMA_ARG_TOP_K", INT,
        "Keep only this many of the likeliest tokens. 0 and -1 keep all.", least=-1, rare=False,
    ),
    _sampling(
        "top_p", "--top-p LLAMA_ARG_TOP_P", FLOAT,
        "Keep only the likeliest tokens that together have this probability. 1 keeps all.",
        least=0, most=1, rare=False,
    ),
    _sampling(
        "min_p", "--min-p LLAMA_ARG_MIN_P", FLOAT,
        "Drop tokens with less than this share of the likeliest token's probability. 0 drops none.",
        least=0, most=1, rare=False,
    ),
    _sampling(
        "repeat_penalty", "--repeat-penalty LLAMA_ARG_REPEAT_PENALTY", FLOAT,
        "Factor that makes recently seen tokens less likely. 1 turns it off.", above=0, most=1000,
        rare=False,
    ),
    _sampling(
        "repeat_last_n", "--repeat-last-n", INT,
        "Number of last tokens in which penalties count repetitions. -1 takes all.", least=-1,
    ),
    _sampling(
        "frequency_penalty", "--frequency-penalty LLAMA_ARG_FREQUENCY_PENALTY", FLOAT,
        "Number subtracted from a token's logit for each time the token was seen.", least=-2,
        most=2,
    ),
    _sampling(
        "presence_penalty", "--presence-penalty LLAMA_ARG_PRESENCE_PENALTY", FLOAT,
        "Number subtracted from the logit of every token that was seen.", least=-2, most=2,
    ),
    _sampling(
        "typical_p", "--typical --typical-p", FLOAT,
        "Keep only the tokens nearest to the mean surprise that together have this probability.",
        least=0, most=1, more="1 keeps all.",
    ),
    _sampling(
        "top_n_sigma", "--top-nsigma --top-n-sigma", FLOAT,
        "Keep only tokens whose logit is within this many standard deviations of the greatest one.",
        more="0 or less keeps all.",
    ),
    _sampling(
        "xtc_probability", "--xtc-probability", FLOAT,
        "Probability that XTC drops the likeliest tokens of a step. 0 turns XTC off.",
        least=0, most=1,
    ),
    _sampling(
        "xtc_threshold", "--xtc-threshold", FLOAT,
        "XTC drops tokens from this probability on, except the least likely of them.",
        least=0, most=1,
        more="Over 0.5 it drops nothing, because only one token can be as likely as that.",
    ),
    _sampling(
        "dynatemp_range", "--dynatemp-range", FLOAT,
        "How far the entropy may move the temperature up or down. 0 keeps it fixed.", least=0,
        most=1000,
    ),
    _sampling(
        "dynatemp_exponent", "--dynatemp-exp", FLOAT,
        "Exponent of the curve by which the temperature follows the entropy.",
        least=0, most=1000,
    ),
    _sampling(
        "dry_multiplier", "--dry-multiplier", FLOAT,
        "Penalty of a token that would lengthen a repetition (DRY). 0 turns DRY off.",
        least=0, most=1000,
    ),
    _sampling(
        "dry_base", "--dry-base", FLOAT,
        "Factor by which DRY's penalty grows with each further repeated token.", least=1, most=1000,
    ),
    _sampling(
        "dry_allowed_length", "--dry-allowed-length", INT,
        "Tokens that may repeat without DRY's penalty.", least=0,
    ),
    _sampling(
        "dry_penalty_last_n", "--dry-penalty-last-n", INT,
        "Number of last tokens in which DRY looks for repetitions. -1 takes all.", least=-1,
    ),
    _sampling(
        "dry_sequence_breakers", "--dry-sequence-breaker", BREAKER,
        "Text at which DRY stops counting a repetition. May be given several times.",
        more="The word none stands for no such text.",
        default_words='"\\n", ":", "\"", "*"', repeats=True,
    ),
    _sampling(
        "mirostat", "--mirostat", INT,
        "Version of Mirostat (1 or 2), which keeps the text's surprise constant. 0 turns it off.",
        least=0, most=2,
        more="It replaces all samplers except the temperature, penalties included.",
    ),
    _sampling(
        "mirostat_eta", "--mirostat-lr", FLOAT, "Mirostat's learning rate.", least=0, most=1000,
    ),
    _sampling(
        "mirostat_tau", "--mirostat-ent", FLOAT,
        "Surprise at which Mirostat keeps the text, in bits.", least=0, most=1000,
    ),
    _sampling(
        "adaptive_target", "--adaptive-target", FLOAT,
        "Probability near which adaptive_p chooses tokens. Below 0 it chooses as usual.",
        most=1, more="It has an effect only if --samplers names adaptive_p.",
    ),
    _sampling(
        "adaptive_decay", "--adaptive-decay", FLOAT,
        "Weight of earlier tokens in the mean probability that adaptive_p follows.",
        least=0, most=0.99, more="With a larger number it forgets more slowly.",
    ),
    _sampling(
        "min_keep", "--min-keep", INT,
        "Least number of tokens that top-p, min-p, typical and XTC keep.", least=0,
    ),
    _sampling(
        "samplers", "--samplers", SAMPLER_NAMES,
        "Samplers in the order in which they run, separated by semicolons.",
        more="A sampler that is not named is off. [sampling.md](sampling.md) says what each does.",
        default_words="; ".join(SAMPLERS),
    ),
    _sampling(
        "logit_bias", "--logit-bias -l", LOGIT_BIAS,
        "Number added to a token's logit, as in 15043+1 or 15043-inf. May be given several times.",
        repeats=True,
    ),
    _sampling(
        "seed", "--seed -s", SEED, "Seed of the random numbers. -1 takes a random one.",
        default_words="random", rare=False,
    ),
    _sampling("ignore_eos", "--ignore-eos", SWITCH, "Never choose an end token."),
    _sampling(
        "reasoning_budget", "--reasoning-budget LLAMA_ARG_THINK_BUDGET", REASONING_BUDGET,
        "Most tokens of a chat's reasoning before it is ended. -1 sets no limit.",
        default_words="-1", request="",
    ),
    _sampling(
        "reasoning_budget_message",
        "--reasoning-budget-message LLAMA_ARG_THINK_BUDGET_MESSAGE", MODEL_TEXT,
        "Text that is written when the budget ends the reasoning.", request="",
    ),
    _sampling(
        "spm_infill", "--spm-infill", SWITCH,
        "Put the suffix before the prefix in /infill, for models that were trained so.",
        commands=frozenset({"serve"}), request="",
    ),
    _sampling(
        "grammar", "--grammar", ANY_TEXT, "GBNF grammar that the answer must follow.", rare=False,
    ),
    _sampling(
        "grammar", "--grammar-file", CONTENTS, "File with a grammar, as for --grammar.", **_A_FILE,
    ),
    _sampling(
        "json_schema", "--json-schema -j", ANY_TEXT, "JSON schema that the answer must follow.",
        rare=False,
    ),
    _sampling(
        "json_schema", "--json-schema-file -jf", CONTENTS,
        "File with a schema, as for --json-schema.", **_A_FILE,
    ),
    _sampling(
        "stop", "--reverse-prompt -r", MODEL_TEXT,
        "Text at which the answer ends. May be given several times.", repeats=True,
    ),
)  # fmt: skip
