"""The options of a sampler. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from offload.errors import BadRequest

LEAST_TEMPERATURE = 1e-4  # below it is greedy: dividing logits by less overflows
SAMPLERS = (  # in llama.cpp's order
    *("penalties", "dry", "top_n_sigma", "top_k", "typ_p"),
    *("top_p", "min_p", "xtc", "temperature"),
)
ADAPTIVE = "adaptive_p"  # draws the token itself, so it stands at the end wherever it is named
_LETTERS = dict(zip("edskypmxta", (*SAMPLERS, ADAPTIVE), strict=True))
_ALIASES = {
    **{name.replace("_", ""): name for name in (*SAMPLERS, ADAPTIVE)},
    **{"nucleus": "top_p", "temp": "temperature", "typ": "typ_p", "typicalp": "typ_p"},
    **{"typical": "typ_p", "topnsigma": "top_n_sigma"},
}
MOST_BREAKERS = 32  # each is looked for in every token of the vocabulary
MOST_BIASES = 4096


@dataclass(frozen=True)
class SamplerParameters:
    """llama.cpp's sampling parameters, by its names, with its defaults: what a request says and a
    sampler is built of."""

    temperature: float = 0.8  # 0 is greedy
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64  # tokens that the penalties look at
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    grammar: str | None = None  # GBNF, from its rule root
    json_schema: str | None = None  # JSON text; instead of a grammar
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    mirostat: int = 0  # 1 or 2
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
    min_keep: int = 0
    samplers: tuple[str, ...] = SAMPLERS  # in this order
    logit_bias: tuple[tuple[int | str, float], ...] = ()  # -inf: never; a text: each of its tokens
    n_probs: int = 0  # over 0: logprobs of each token, and of so many of the likeliest ones
    post_sampling_probs: bool = False  # of what the samplers left, not of the raw logits


@dataclass(frozen=True)
class SamplingOptions(SamplerParameters):
    """The parameters of a sampler, checked, with every count of tokens said."""

    seed: int = 0xFFFFFFFF  # libllama draws one

    @property
    def has_penalties(self) -> bool:
        penalties = (self.repeat_penalty, self.frequency_penalty, self.presence_penalty)
        return self.repeat_last_n != 0 and penalties != (1.0, 0.0, 0.0)

    @property
    def has_dry(self) -> bool:
        return self.dry_multiplier != 0 and self.dry_base >= 1 and self.dry_penalty_last_n != 0

    @property
    def n_looked_back(self) -> int:
        """The most tokens of the past that change a choice."""
        penalties = self.repeat_last_n if self.has_penalties else 0
        return max(penalties, self.dry_penalty_last_n if self.has_dry else 0)

    def is_on(self, sampler: str) -> bool:
        """False for a sampler that changes nothing with these numbers."""
        match sampler:
            case "penalties":
                return self.has_penalties
            case "dry":
                return self.has_dry
            case "top_n_sigma":
                return self.top_n_sigma > 0
            case "top_k":
                return self.top_k > 0
            case "typ_p":
                return self.typical_p < 1
            case "top_p":
                return self.top_p < 1
            case "min_p":
                return self.min_p > 0
            case "xtc":
                return self.xtc_probability > 0 and self.xtc_threshold <= 0.5
        return self.temperature != 1 or self.dynatemp_range > 0

    @property
    def order(self) -> tuple[str, ...]:
        """The samplers that change anything, as they follow each other. Mirostat has none of them
        before it but the temperature, as in llama.cpp."""
        if self.mirostat:
            return ("temperature",)
        named = (name for name in self.samplers if name != ADAPTIVE)
        return tuple(name for name in named if self.is_on(name))

    @property
    def is_greedy(self) -> bool:
        """True if the likeliest token that is left is always chosen."""
        cold = self.temperature < LEAST_TEMPERATURE
        if self.mirostat:
            return cold
        drawn = {"xtc", "typ_p"} & set(self.order)  # these may take the likeliest away
        adapts = ADAPTIVE in self.samplers
        return (
            cold
            and "temperature" in self.order
            and not (drawn or adapts or self.dynatemp_range > 0)
        )


def sampler_names(names: Sequence[str]) -> tuple[str, ...]:
    """The samplers of these names, which llama.cpp spells in several ways.

    Raises BadRequest for a name that is none.
    """
    found = []
    for name in names:
        plain = re.sub("[-_ ]", "", name.lower())
        if plain not in _ALIASES:
            known = ", ".join((*SAMPLERS, ADAPTIVE))
            raise BadRequest(f"{name[:40]!r} is no sampler; there are {known}")
        found.append(_ALIASES[plain])
    return tuple(found)


def sampler_letters(letters: str) -> tuple[str, ...]:
    """The samplers of llama.cpp's letters, for instance kpt. Raises BadRequest."""
    for letter in letters:
        if letter not in _LETTERS:
            known = ", ".join(f"{a} {b}" for a, b in _LETTERS.items())
            raise BadRequest(f"{letter!r} is no sampler's letter; there are {known}")
    return tuple(_LETTERS[letter] for letter in letters)
