"""Runs libllama's samplers over rows of logits, in the options' order, after a grammar's mask.

The target's own chain chooses at every position. A drafted token is accepted if it equals that
choice, so drafts do not change the distribution of any chain. The chain chooses once per position
and keeps each choice. Samplers with state (mirostat, the random numbers of XTC, penalties, DRY)
therefore have the same state as without drafts.
"""

from __future__ import annotations

import ctypes as C
import math
import threading
from collections.abc import Sequence
from time import perf_counter
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from offload.errors import BadRequest, DeviceFailed
from offload.ggml.compiled_grammars import CompiledGrammars, GivenGrammar
from offload.ggml.library.lib import library
from offload.ggml.model import Model
from offload.sampling.answers import ChosenLogprob
from offload.sampling.grammar import Grammar, GrammarTokens, grammar_of
from offload.sampling.logprobs import left_logprobs, raw_logprobs
from offload.sampling.options import ADAPTIVE, LEAST_TEMPERATURE, SamplingOptions


class _TokenArray(C.Structure):
    _fields_ = [
        ("data", C.c_void_p),
        ("size", C.c_size_t),
        ("selected", C.c_int64),
        ("sorted", C.c_bool),
    ]


_TOKEN = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])
_NARROWING = frozenset({"top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc"})
_MIROSTAT_TOKENS = 100  # tokens from which mirostat 1 estimates a distribution's slope
# Limits on the time for masks, in seconds and in seconds per token. A mask takes milliseconds. A
# malicious grammar takes longer, and delays all other requests.
_GRAMMAR_S = 10.0
_GRAMMAR_S_PER_TOKEN = 0.02

_grammar_tokens: WeakKeyDictionary[Model, tuple[GrammarTokens, CompiledGrammars]]
_grammar_tokens = WeakKeyDictionary()
_preparing = threading.Lock()


def grammar_tokens(model: Model) -> GrammarTokens:
    """Return the model's vocabulary for grammars, which is prepared once. Raises BadRequest."""
    return _prepared(model)[0]


def _prepared(model: Model) -> tuple[GrammarTokens, CompiledGrammars]:
    with _preparing:
        prepared = _grammar_tokens.get(model)
        if prepared is None:
            prepared = _grammar_tokens[model] = GrammarTokens(model), CompiledGrammars()
        return prepared


def is_compiled(model: Model, options: SamplingOptions) -> bool:
    """True if a chain of these options has nothing to compile."""
    if options.grammar is None and options.json_schema is None:
        return True
    prepared = _grammar_tokens.get(model)
    return prepared is not None and _given(options) in prepared[1]


def grammar_for(model: Model, options: SamplingOptions) -> Grammar | None:
    """Return the grammar of these options, None if they have none. Raises BadRequest.

    Compiling one may take a second. llguidance does not hold Python's lock meanwhile, so another
    thread may compile it ahead of the chain.
    """
    given = _given(options)
    if given.gbnf is None and given.json_schema is None:
        return None

    def compiled() -> Grammar:
        made = grammar_of(lambda: grammar_tokens(model), *given)
        assert made is not None
        return made

    return _prepared(model)[1].of(given, compiled)


def _given(options: SamplingOptions) -> GivenGrammar:
    return GivenGrammar(options.grammar, options.json_schema, options.grammar_root)


class SamplerChain:
    """Chooses tokens for one sequence. After `choose`, call `accepted` with the kept token.

    The order is: biases and the grammar's mask, then the samplers, then the draw.
    """

    def __init__(self, model: Model, options: SamplingOptions, prompt: Sequence[int] = ()) -> None:
        """`prompt`: earlier tokens, which penalties look back at.

        Raises BadRequest for a grammar or schema that cannot be followed, and for a bias of a token
        that does not exist.
        """
        self._lib = library()
        self._model, self._options = model, options
        self._owned: list[int] = []
        self._chain = self._draw = 0
        self._narrows = False  # True if the chain may leave tokens out
        self._biases = self._banned = _NO_TOKENS
        self._bias_values = np.zeros(0, np.float32)
        self._grammar_s = 0.0
        self._n_accepted = 0
        self._logprobs: list[ChosenLogprob] = []
        self._told: tuple[NDArray[np.float32], _TokenArray | None] | None = None
        self._grammar = grammar_for(model, options)
        try:
            self._build()
            self._read_biases()
            self._see(prompt)
        except BaseException:
            self.close()
            raise
        changes = self._draw or self._chain or self._grammar
        self._is_plain_greedy = not (changes or len(self._biases))
        self._row = np.zeros(model.n_vocab, _TOKEN)
        self._ids = np.arange(model.n_vocab, dtype=np.int32)
        # Without a grammar, the last allowed tokens take the places of banned ones in the row.
        self._n_left = model.n_vocab - len(self._banned)
        self._gaps = self._banned[self._banned < self._n_left]
        self._moved = np.setdiff1d(self._ids[self._n_left :], self._banned)

    # -- building --------------------------------------------------------------------------------

    def _build(self) -> None:
        o = self._options
        names = list(o.order)
        if o.is_greedy:
            # Samplers that only remove tokens do not change which token is the likeliest.
            names = names[: names.index("temperature")] if "temperature" in names else []
            while names and names[-1] in _NARROWING:
                names.pop()
        self._narrows = not _NARROWING.isdisjoint(names)
        if names:
            params = self._lib.llama_sampler_chain_default_params()
            self._chain = self._own(self._lib.llama_sampler_chain_init(params))
            for name in names:
                # The chain owns it from now on.
                self._lib.llama_sampler_chain_add(self._chain, self._made(name))
        if not o.is_greedy:
            self._draw = self._own(self._made_draw())

    def _made(self, name: str) -> int:
        lib, o, keep = self._lib, self._options, self._options.min_keep
        match name:
            case "penalties":
                penalties = o.repeat_penalty, o.frequency_penalty, o.presence_penalty
                n_vocab = self._model.n_vocab
                made = lib.llama_sampler_init_penalties(n_vocab, o.repeat_last_n, *penalties)
            case "dry":
                made = self._made_dry()
            case "top_n_sigma":
                made = lib.llama_sampler_init_top_n_sigma(o.top_n_sigma)
            case "top_k":
                made = lib.llama_sampler_init_top_k(o.top_k)
            case "typ_p":
                made = lib.llama_sampler_init_typical(o.typical_p, keep)
            case "top_p":
                made = lib.llama_sampler_init_top_p(o.top_p, keep)
            case "min_p":
                made = lib.llama_sampler_init_min_p(o.min_p, keep)
            case "xtc":
                made = lib.llama_sampler_init_xtc(
                    o.xtc_probability, o.xtc_threshold, keep, self._seed
                )
            case _:
                temperature = 0.0 if o.temperature < LEAST_TEMPERATURE else o.temperature
                delta = 0.0 if o.mirostat else o.dynatemp_range
                made = lib.llama_sampler_init_temp_ext(temperature, delta, o.dynatemp_exponent)
        return int(made)

    def _made_dry(self) -> int:
        o = self._options
        texts = [text.encode("utf-8", "replace") for text in o.dry_sequence_breakers if text]
        breakers = (C.c_char_p * max(1, len(texts)))(*texts)
        numbers = o.dry_multiplier, o.dry_base, o.dry_allowed_length, o.dry_penalty_last_n
        vocab = self._model.vocab
        return int(self._lib.llama_sampler_init_dry(vocab, *numbers, breakers, len(texts)))

    def _made_draw(self) -> int:
        lib, o, seed, n_vocab = self._lib, self._options, self._seed, self._model.n_vocab
        mirostat = o.mirostat_tau, o.mirostat_eta
        if o.mirostat == 1:
            made = lib.llama_sampler_init_mirostat(n_vocab, seed, *mirostat, _MIROSTAT_TOKENS)
        elif o.mirostat == 2:
            made = lib.llama_sampler_init_mirostat_v2(seed, *mirostat)
        elif ADAPTIVE in o.samplers:
            made = lib.llama_sampler_init_adaptive_p(o.adaptive_target, o.adaptive_decay, seed)
        else:
            made = lib.llama_sampler_init_dist(seed)
        return int(made)

    @property
    def _seed(self) -> int:
        seed = self._options.seed
        return 0xFFFFFFFF if seed is None else seed & 0xFFFFFFFF

    def _own(self, sampler: int) -> int:
        self._owned.append(sampler)
        return sampler

    def _read_biases(self) -> None:
        """Read biases of tokens and texts; ban suppressed tokens, and end tokens if asked to."""
        n_vocab = self._model.n_vocab
        never = (*self._model.suppressed, *(self._model.ends if self._options.ignore_eos else ()))
        biases: dict[int, float] = dict.fromkeys(never, -np.inf)
        for key, bias in self._options.logit_bias:
            tokens = [key] if isinstance(key, int) else self._model.tokenize(
                key, add_special=False, parse_special=False
            )  # fmt: skip
            for token in tokens:
                if not 0 <= token < n_vocab:
                    raise BadRequest(
                        f"logit_bias names token {token}: the vocabulary has tokens 0 to "
                        f"{n_vocab - 1}"
                    )
                biases[token] = biases.get(token, 0.0) + bias
        banned = [token for token, bias in biases.items() if bias == -np.inf]
        finite = {token: bias for token, bias in biases.items() if bias != -np.inf}
        self._banned = np.array(banned, np.intp)
        self._biases = np.array(list(finite), np.intp)
        self._bias_values = np.array(list(finite.values()), np.float32)

    def _see(self, prompt: Sequence[int]) -> None:
        n = self._options.n_looked_back
        if self._chain and n:
            for token in prompt[-n:]:
                self._lib.llama_sampler_accept(self._chain, token)

    # -- choosing --------------------------------------------------------------------------------

    @property
    def has_distribution(self) -> bool:
        """True if the next distribution is known before the draw.

        False for mirostat and adaptive-p, whose draws change the next distribution.
        """
        return not (self._options.mirostat or ADAPTIVE in self._options.samplers)

    def choose(self, logits: NDArray[np.float32], history: Sequence[int]) -> int:
        """Sample a token from logits [n_vocab]. `accepted` reports earlier tokens to the chain.

        Raises BadRequest when grammar and biases leave no token, and DeviceFailed for logits that
        are not numbers.
        """
        # The greatest logit and the logit at argmax are NaN if any logit is. Finding them is cheap.
        best = int(logits.argmax()) if self._is_plain_greedy else None
        if not math.isfinite(logits.max() if best is None else logits[best]):
            raise _not_numbers()
        if self._options.n_probs:
            self._told = logits, None
        if best is not None:
            return best if best not in self._banned else self._likeliest(logits)
        if not self._draw:
            return self._likeliest(logits)
        array = self._candidates(logits)
        self._apply(self._chain, array)
        self._apply(self._draw, array)
        if self._told is not None:
            self._told = logits, array
        # A sampler may have replaced the array's data pointer, so read through the array.
        return int(_tokens(array)["id"][array.selected])

    def probabilities(
        self, logits: NDArray[np.float32], history: Sequence[int]
    ) -> NDArray[np.float64]:
        """Return the distribution that `choose` draws from: [n_vocab], sum 1.

        A greedy chain gives its choice probability 1. Raises BadRequest when grammar and biases
        leave no token, and DeviceFailed for logits that are not numbers.
        """
        assert self.has_distribution
        out = np.zeros(len(self._ids))
        if not self._draw:
            out[self.choose(logits, history)] = 1.0
            return out
        array = self._candidates(logits)
        self._apply(self._chain, array)
        left = _tokens(array)
        p = np.exp(left["logit"].astype(np.float64) - left["logit"].max())
        total = p.sum()
        if not np.isfinite(total):
            raise _not_numbers()
        left["p"] = p / total
        out[left["id"]] = p / total
        if self._options.n_probs:
            self._told = logits, array
        return out

    def allows(self, token: int) -> bool:
        """True if the grammar allows `token` next, or there is none. Raises BadRequest."""
        return self._grammar is None or self._timed_allows(token)

    def _likeliest(self, logits: NDArray[np.float32]) -> int:
        """Return the likeliest allowed token.

        Tries the likeliest token of all first, because masking all tokens takes a thousand times as
        long.
        """
        if self._narrows:
            array = self._candidates(logits)
            self._apply(self._chain, array)
            return self._likeliest_of(array)
        array = self._filled(logits)
        self._row["logit"][self._banned] = -np.inf
        self._apply(self._chain, array)
        best = self._likeliest_of(array)
        if self._row["logit"][best] == -np.inf:
            raise _nothing_left()
        if self._grammar is None or self._timed_allows(best):
            return best
        return self._likeliest_of_allowed()

    def _likeliest_of(self, array: _TokenArray) -> int:
        left = _tokens(array)
        return int(left["id"][left["logit"].argmax()])

    def _likeliest_of_allowed(self) -> int:
        """Return the likeliest allowed token of the row, after penalties."""
        at = np.flatnonzero(self._allowed())
        if not len(at):
            raise _nothing_left()
        return int(at[self._row["logit"][at].argmax()])

    # -- what may be chosen ----------------------------------------------------------------------

    def _candidates(self, logits: NDArray[np.float32]) -> _TokenArray:
        """Return the tokens that grammar and biases leave.

        Forbidden tokens are removed rather than set to probability 0, because some samplers take
        logarithms of probabilities.
        """
        if self._grammar is None:
            array = self._filled(logits)
            self._row[self._gaps] = self._row[self._moved]
            array.size = self._n_left
        else:
            array = self._filled(logits, np.flatnonzero(self._allowed()))
        if not array.size:
            raise _nothing_left()
        return array

    def _allowed(self) -> NDArray[np.bool_]:
        """Return a mask [n_vocab], True for tokens that the grammar allows and no ban excludes."""
        assert self._grammar is not None
        began = perf_counter()
        allowed = self._grammar.allowed()
        self._count(began)
        allowed[self._banned] = False
        return allowed

    def _timed_allows(self, token: int) -> bool:
        assert self._grammar is not None
        began = perf_counter()
        is_allowed = self._grammar.allows(token)
        self._count(began)
        return is_allowed

    def _count(self, began_s: float) -> None:
        self._grammar_s += perf_counter() - began_s
        limit_s = _GRAMMAR_S + _GRAMMAR_S_PER_TOKEN * self._n_accepted
        if self._grammar_s > limit_s:
            raise BadRequest(
                f"the grammar takes too long to follow: {self._grammar_s:.0f} s for "
                f"{self._n_accepted} tokens; make it simpler"
            )

    def _filled(
        self, logits: NDArray[np.float32], ids: NDArray[np.intp] | None = None
    ) -> _TokenArray:
        """Fill the row with tokens and biased logits. `ids`: the tokens; None: all, even banned."""
        if len(self._biases):
            logits = logits.copy()
            logits[self._biases] += self._bias_values
        part = self._row if ids is None else self._row[: len(ids)]
        part["id"], part["p"] = self._ids if ids is None else ids, 0.0
        part["logit"] = logits if ids is None else logits[ids]
        return _TokenArray(part.ctypes.data, len(part), -1, False)

    def _apply(self, sampler: int, array: _TokenArray) -> None:
        if sampler:
            self._lib.llama_sampler_apply(sampler, C.addressof(array))

    # -- afterwards ------------------------------------------------------------------------------

    def accepted(self, token: int) -> None:
        """Tell samplers and grammar which token was kept.

        Raises BadRequest for a token that the grammar refuses.
        """
        if self._grammar is not None:
            self._grammar.accept(token)
        if self._chain:
            self._lib.llama_sampler_accept(self._chain, token)
        if self._draw and ADAPTIVE in self._options.samplers and not self._options.mirostat:
            self._lib.llama_sampler_accept(self._draw, token)
        self._n_accepted += 1
        if self._told is not None:
            self._logprobs.append(self._told_of(token, *self._told))
            self._told = None

    def _told_of(
        self, token: int, logits: NDArray[np.float32], array: _TokenArray | None
    ) -> ChosenLogprob:
        n = self._options.n_probs
        if not self._options.post_sampling_probs:
            return raw_logprobs(logits, token, n, self._piece)
        if array is None:  # greedy: the token was certain
            return left_logprobs(np.array([token]), np.ones(1), token, n, self._piece)
        left = _tokens(array)
        return left_logprobs(left["id"], left["p"].astype(np.float64), token, n, self._piece)

    def _piece(self, token: int) -> bytes:
        return self._model.piece(token, special=True)

    def take_logprobs(self) -> tuple[ChosenLogprob, ...]:
        """Return log probabilities of tokens accepted since the last call; empty if not wanted."""
        if not self._logprobs:
            return ()
        logprobs, self._logprobs = tuple(self._logprobs), []
        return logprobs

    def close(self) -> None:
        owned, self._owned = self._owned, []
        self._chain = self._draw = 0
        self._grammar = None
        for sampler in owned:
            self._lib.llama_sampler_free(sampler)


def _not_numbers() -> DeviceFailed:
    return DeviceFailed(
        "the model's logits are not numbers, so no token can be chosen: its weights may be "
        "damaged, or the device may have failed"
    )


_NO_TOKENS: NDArray[np.intp] = np.zeros(0, np.intp)


def _tokens(array: _TokenArray) -> NDArray[np.void]:
    memory = (C.c_char * (_TOKEN.itemsize * array.size)).from_address(array.data)
    return np.frombuffer(memory, _TOKEN)


def _nothing_left() -> BadRequest:
    return BadRequest(
        "grammar, logit_bias and ignore_eos leave no token of this model's vocabulary to go on "
        "with; relax them"
    )
