"""The settings of speculation: the names of drafters, policies and rules, and typed options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path


class DrafterName(StrEnum):
    """A drafter by name. Drafters that llama.cpp also has are named as in llama.cpp."""

    NONE = "none"
    DRAFT = "draft"
    MTP = "mtp"
    EAGLE3 = "eagle3"
    DFLASH = "dflash"
    DSPARK = "dspark"
    NGRAM_SIMPLE = "ngram-simple"
    NGRAM_MAP_K = "ngram-map-k"
    NGRAM_MAP_K4V = "ngram-map-k4v"
    NGRAM_MOD = "ngram-mod"
    NGRAM_CACHE = "ngram-cache"
    SUFFIX = "suffix"
    SYNTHETIC = "synthetic"


# Draft a whole block of tokens in one pass, whose price does not depend on the draft's length.
BY_BLOCK = (DrafterName.DFLASH, DrafterName.DSPARK)
# Files beside the target that draft from its hidden rows.
ROW_FILES = (DrafterName.EAGLE3, *BY_BLOCK)
FROM_ROWS = (DrafterName.MTP, *ROW_FILES)  # draft from the target's hidden rows

# The default ones of those that need no model. They read the text, at microseconds a token.
OF_TEXT = (DrafterName.NGRAM_MOD, DrafterName.SUFFIX)

# Other names in llama.cpp, whose example of ngram-cache is called lookup.
DRAFTER_ALIASES = {
    "draft-simple": DrafterName.DRAFT,
    "draft-mtp": DrafterName.MTP,
    "draft-eagle3": DrafterName.EAGLE3,
    "draft-dflash": DrafterName.DFLASH,
    "draft-dspark": DrafterName.DSPARK,
    "lookup": DrafterName.NGRAM_CACHE,
}


class PolicyName(StrEnum):
    """The policy that decides how many drafted tokens are verified."""

    THROUGHPUT = "throughput"
    FIXED = "fixed"
    P_MIN = "p-min"
    P_MIN_KEPT = "p-min-kept"
    P_MINS = "p-mins"
    RATIONAL = "rational"
    EXPONENTIAL = "exponential"
    POWER = "power"
    SPEED_A = "speed-a"
    SPEED_B = "speed-b"
    COSTS = "costs"
    RATIO = "ratio"
    RATIO_FLAT = "ratio-flat"
    BANDIT = "bandit"


class AcceptRule(StrEnum):
    """The rule that keeps a drafted token: if the sampler chooses it, or by rejection sampling."""

    MATCH = "match"
    REJECT = "reject"


# Policies that read T(n). The others decide without it.
PRICED = frozenset(
    {
        PolicyName.THROUGHPUT,
        PolicyName.P_MINS,
        PolicyName.RATIONAL,
        PolicyName.EXPONENTIAL,
        PolicyName.POWER,
        PolicyName.SPEED_A,
        PolicyName.SPEED_B,
        PolicyName.COSTS,
    }
)
# Published rules that read a draft's probabilities. `throughput` calibrates those over all tokens.
BY_P = (PRICED - {PolicyName.THROUGHPUT}) | {PolicyName.P_MIN, PolicyName.P_MIN_KEPT}
P_TOP_K = 10  # candidates in llama.cpp's draft sampler, for which the published rules were tuned
MOST_DRAFTED = 63  # most tokens of a draft; its verification batch has one more (offload/decode.py)
LONGEST = 16  # default most drafted tokens, as in llama.cpp; `throughput` has its own


@dataclass(frozen=True)
class SpecOptions:
    """Drafters, policy and acceptance.

    `given` maps each field that the user set to the flag or variable that set it.
    """

    drafters: tuple[DrafterName, ...] = ()  # empty: none was named, and nothing drafts
    policy: PolicyName = PolicyName.THROUGHPUT
    n_max: int | None = None  # most tokens of a draft; None: the policy's default
    n_min: int = 0
    p_min: float = 0.75
    look_ahead: int = 0  # batch sizes that `costs` tries beyond the best one
    p_top_k: int = P_TOP_K  # candidates that probabilities of `BY_P` are shares of; 0: all
    accept: AcceptRule = AcceptRule.MATCH
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
    # (target's text, draft's text) pairs; None: both models have one vocabulary
    replacements: tuple[tuple[str, str], ...] | None = None
    synth_len: float | None = None
    synth_rates: tuple[float, ...] | None = None
    given: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_on(self) -> bool:
        """True if a drafter other than `none` is named."""
        return self.drafters not in ((), (DrafterName.NONE,))

    @property
    def from_rows(self) -> DrafterName | None:
        """The named drafter that drafts from the target's hidden rows. There is at most one."""
        return next((name for name in self.drafters if name in FROM_ROWS), None)

    @property
    def from_file(self) -> DrafterName | None:
        """The named drafter of a file that drafts from the target's hidden rows, or None."""
        return next((name for name in self.drafters if name in ROW_FILES), None)

    def name(self, option: str) -> str:
        """The name by which a field was set, for messages, or the field's own name."""
        return self.given.get(option, option)
