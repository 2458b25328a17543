"""Defines the options of a sampler, and checks them. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from offload.errors import BadRequest

LEAST_TEMPERATURE = 1e-4  # lower temperatures mean greedy, since dividing logits by them overflows
SAMPLERS = (  # in llama.cpp's order
    *("penalties", "dry", "top_n_sigma", "top_k", "typ_p"),
    *("top_p", "min_p", "xtc", "temperature"),
)
ADAPTIVE = "adaptive_p"  # draws the token itself, so it always comes last
_LETTERS = dict(zip("edskypmxta", (*SAMPLERS, ADAPTIVE), strict=True))
_ALIASES = {
    **{name.replace("_", ""): name for name in (*SAMPLERS, ADAPTIVE)},
    **{"nucleus": "top_p", "temp": "temperature", "typ": "typ_p", "typicalp": "typ_p"},
    **{"typical": "typ_p", "topnsigma": "top_n_sigma"},
}
MOST_BREAKERS = 32  # most breakers, as each is searched for in every token of the vocabulary
MOST_BIASES = 4096
_LARGEST = 1000.0


@dataclass(frozen=True)
class SamplingOptions:
    """llama.cpp's sampling parameters, by its names, with its defaults."""

    temperature: float = 0.8  # 0 is greedy
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64  # last tokens that the penalties look at; -1: all
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    grammar: str | None = None  # GBNF
    grammar_root: str = "root"  # the rule from which the grammar is read
    json_schema: str | None = None  # JSON text, given instead of a grammar
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64  # -1: all tokens
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    mirostat: int = 0  # 1 or 2
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
    min_keep: int = 0
    samplers: tuple[str, ...] = SAMPLERS  # applied in this order
    logit_bias: tuple[tuple[int | str, float], ...] = ()  # -inf: never; a text: each of its tokens
    n_probs: int = 0  # above 0: report logprobs of each token and of the `n_probs` likeliest
    post_sampling_probs: bool = False  # probabilities after the samplers, not of the raw logits
    seed: int | None = None  # None: libllama draws one
    ignore_eos: bool = False  # True: tokens that end a generation are never chosen

    @property
    def has_penalties(self) -> bool:
        penalties = (self.repeat_penalty, self.frequency_penalty, self.presence_penalty)
        return self.repeat_last_n != 0 and penalties != (1.0, 0.0, 0.0)

    @property
    def has_dry(self) -> bool:
        return self.dry_multiplier != 0 and self.dry_base >= 1 and self.dry_penalty_last_n != 0

    @property
    def n_looked_back(self) -> int:
        """Number of past tokens that can change a choice."""
        penalties = self.repeat_last_n if self.has_penalties else 0
        return max(penalties, self.dry_penalty_last_n if self.has_dry else 0)

    def is_on(self, sampler: str) -> bool:
        """Return False for a sampler that changes nothing with these options."""
        return {
            "penalties": self.has_penalties,
            "dry": self.has_dry,
            "top_n_sigma": self.top_n_sigma > 0,
            "top_k": self.top_k > 0,
            "typ_p": self.typical_p < 1,
            "top_p": self.top_p < 1,
            "min_p": self.min_p > 0,
            "xtc": self.xtc_probability > 0 and self.xtc_threshold <= 0.5,
            "temperature": self.temperature != 1 or self.dynatemp_range > 0,
        }[sampler]

    @property
    def order(self) -> tuple[str, ...]:
        """The samplers that have an effect, in order. Mirostat allows only the temperature."""
        if self.mirostat:
            return ("temperature",)
        named = (name for name in self.samplers if name != ADAPTIVE)
        return tuple(name for name in named if self.is_on(name))

    @property
    def is_greedy(self) -> bool:
        """True if the likeliest remaining token is always chosen."""
        cold = self.temperature < LEAST_TEMPERATURE
        if self.mirostat:
            return cold
        drawn = {"xtc", "typ_p"} & set(self.order)  # these may remove the likeliest token
        adapts = ADAPTIVE in self.samplers
        return (
            cold
            and "temperature" in self.order
            and not (drawn or adapts or self.dynatemp_range > 0)
        )


SomeOptions = TypeVar("SomeOptions", bound=SamplingOptions)


def sampler_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return the samplers of these names, in any of llama.cpp's spellings. Raises BadRequest."""
    samplers = []
    for name in names:
        plain = re.sub("[-_ ]", "", name.lower())
        if plain not in _ALIASES:
            known = ", ".join((*SAMPLERS, ADAPTIVE))
            raise BadRequest(f"{name[:40]!r} is no sampler; there are {known}")
        samplers.append(_ALIASES[plain])
    return tuple(samplers)


def sampler_letters(letters: str) -> tuple[str, ...]:
    """Return the samplers of llama.cpp's letters, for example kpt. Raises BadRequest."""
    for letter in letters:
        if letter not in _LETTERS:
            known = ", ".join(f"{a} {b}" for a, b in _LETTERS.items())
            raise BadRequest(f"{letter!r} is no sampler's letter; there are {known}")
    return tuple(_LETTERS[letter] for letter in letters)


def checked(options: SomeOptions, n_ctx: int) -> SomeOptions:
    """Return the options with canonical names of samplers, and counts of tokens up to `n_ctx`.

    Raises BadRequest for a parameter out of range, or a grammar beside a schema.
    """
    _check(options)
    last_n, dry_last_n = (
        n_ctx if n < 0 else min(n, n_ctx)
        for n in (options.repeat_last_n, options.dry_penalty_last_n)
    )
    return replace(
        options,
        samplers=sampler_names(options.samplers),
        repeat_last_n=last_n,
        dry_penalty_last_n=dry_last_n,
    )


def _check(options: SamplingOptions) -> None:
    for field in fields(SamplingOptions):
        name, value = field.name, getattr(options, field.name)
        if field.type != "float":
            continue
        if not math.isfinite(value) or abs(value) > _LARGEST:
            raise BadRequest(f"{name} {value}: must be a number up to {_LARGEST:g}")
    if options.repeat_penalty <= 0:
        raise BadRequest(f"repeat_penalty {options.repeat_penalty}: must be over 0, 1 is off")
    if options.mirostat not in (0, 1, 2):
        raise BadRequest(f"mirostat {options.mirostat}: must be 0 (off), 1 or 2")
    for name in ("min_keep", "dry_allowed_length", "n_probs"):
        value = getattr(options, name)
        if not 0 <= value <= 2**31 - 1:
            raise BadRequest(f"{name} {value}: must be at least 0 and below 2147483648")
    if options.grammar is not None and options.json_schema is not None:
        raise BadRequest("a grammar and a JSON schema exclude each other: send one of them")
    if len(options.dry_sequence_breakers) > MOST_BREAKERS:
        raise BadRequest(
            f"{len(options.dry_sequence_breakers)} dry_sequence_breakers: at most {MOST_BREAKERS}"
        )
    if any("\0" in text for text in options.dry_sequence_breakers):
        raise BadRequest("dry_sequence_breakers hold a NUL character")
    if len(options.logit_bias) > MOST_BIASES:
        raise BadRequest(f"logit_bias has {len(options.logit_bias)} entries: at most {MOST_BIASES}")
    for key, bias in options.logit_bias:
        if math.isnan(bias) or bias == math.inf:
            raise BadRequest(f"logit_bias of {str(key)[:40]!r} is {bias}: must be a number")


def read_logit_bias(value: object) -> tuple[tuple[int | str, float], ...]:
    """Return the biases in a request's `logit_bias`, in any form of OpenAI and llama-server.

    `value` is an object or a list of pairs. Keys are token ids or texts. Values are numbers, or
    false to exclude a token. Raises BadRequest.
    """
    if isinstance(value, Mapping):
        pairs: list[object] = [[_id_or_text(key), bias] for key, bias in value.items()]
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        pairs = list(value)
    else:
        raise BadRequest("logit_bias must be an object, or a list of [token, bias]")
    return tuple(_pair(pair) for pair in pairs)


def _id_or_text(key: object) -> object:
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key


def _pair(pair: object) -> tuple[int | str, float]:
    if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
        raise BadRequest("logit_bias: each entry must be [token, bias]")
    key, bias = pair
    if isinstance(key, bool) or not isinstance(key, int | str) or key == "":
        raise BadRequest("logit_bias: a token must be its id or a text")
    if bias is False:
        return key, -math.inf
    if isinstance(bias, bool) or not isinstance(bias, int | float):
        raise BadRequest("logit_bias: a bias must be a number, or false for never")
    return key, float(bias)
