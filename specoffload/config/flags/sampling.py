"""Flags of sampling: of `run` and `chat`, and of `serve` where a request does not say."""

from __future__ import annotations

from specoffload.config.flags.flag import FLOAT, INT, PATH, SWITCH, TEXT, Flag, Panel
from specoffload.config.flags.reading import SEED
from specoffload.config.options import AnswerFiles
from specoffload.session.generation import GenerateOptions

_P = Panel.SAMPLING
_ANSWERS = frozenset({"run", "chat", "serve"})

FLAGS = (
    Flag(
        GenerateOptions, "temperature", ("--temp", "--temperature"), FLOAT, "0 is greedy.", _P,
        variables=("LLAMA_ARG_TEMPERATURE",), least=0, most=1000, commands=_ANSWERS,
        request="temperature",
    ),
    Flag(
        GenerateOptions, "top_k", ("--top-k",), INT, "The k likeliest tokens; 0 and -1: all.", _P,
        variables=("LLAMA_ARG_TOP_K",), least=-1, commands=_ANSWERS, request="top_k",
    ),
    Flag(
        GenerateOptions, "top_p", ("--top-p",), FLOAT,
        "The likeliest tokens of that joint probability; 1: all.", _P,
        variables=("LLAMA_ARG_TOP_P",), least=0, most=1, commands=_ANSWERS, request="top_p",
    ),
    Flag(
        GenerateOptions, "min_p", ("--min-p",), FLOAT,
        "Tokens of at least that share of the likeliest one's probability; 0: all.", _P,
        variables=("LLAMA_ARG_MIN_P",), least=0, most=1, commands=_ANSWERS, request="min_p",
    ),
    Flag(
        GenerateOptions, "repeat_penalty", ("--repeat-penalty",), FLOAT,
        "Penalty of tokens seen lately; 1: off.", _P, variables=("LLAMA_ARG_REPEAT_PENALTY",),
        above=0, most=1000, commands=_ANSWERS, request="repeat_penalty",
    ),
    Flag(
        GenerateOptions, "repeat_last_n", ("--repeat-last-n",), INT,
        "Tokens that penalties look at; -1: all.", _P, least=-1, commands=_ANSWERS,
        request="repeat_last_n", rare=True,
    ),
    Flag(
        GenerateOptions, "frequency_penalty", ("--frequency-penalty",), FLOAT,
        "Penalty of a token per time it was seen.", _P, variables=("LLAMA_ARG_FREQUENCY_PENALTY",),
        least=-2, most=2, commands=_ANSWERS, request="frequency_penalty", rare=True,
    ),
    Flag(
        GenerateOptions, "presence_penalty", ("--presence-penalty",), FLOAT,
        "Penalty of a token that was seen at all.", _P, variables=("LLAMA_ARG_PRESENCE_PENALTY",),
        least=-2, most=2, commands=_ANSWERS, request="presence_penalty", rare=True,
    ),
    Flag(
        GenerateOptions, "seed", ("--seed", "-s"), SEED, "Of the random numbers; -1: random.", _P,
        default_words="random", commands=_ANSWERS, request="seed",
    ),
    Flag(
        GenerateOptions, "ignore_eos", ("--ignore-eos",), SWITCH, "Go on after an end token.", _P,
        commands=_ANSWERS, request="ignore_eos", rare=True,
    ),
    Flag(
        GenerateOptions, "grammar", ("--grammar",), TEXT, "GBNF that the answer must follow.", _P,
        commands=_ANSWERS, request="grammar",
    ),
    Flag(
        AnswerFiles, "grammar", ("--grammar-file",), PATH, "File with that grammar.", _P,
        commands=_ANSWERS,
    ),
    Flag(
        GenerateOptions, "json_schema", ("--json-schema", "-j"), TEXT,
        "JSON schema of the answer.", _P, commands=_ANSWERS, request="json_schema",
    ),
    Flag(
        AnswerFiles, "json_schema", ("--json-schema-file", "-jf"), PATH, "File with that schema.",
        _P, commands=_ANSWERS,
    ),
    Flag(
        GenerateOptions, "stop", ("--reverse-prompt", "-r"), TEXT,
        "Text at which the answer ends; may be given several times.", _P, commands=_ANSWERS,
        request="stop", repeats=True, rare=True,
    ),
)  # fmt: skip
