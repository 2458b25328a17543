"""libllama's sampler chain over a row of logits: temperature, top-k, top-p, penalties, grammar.

For sampled-token verification the target's own chain chooses at every position; a drafted token is
accepted while it equals the choice, so any chain keeps its distribution.
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offload.errors import BadRequest
from offload.ggml.lib import library
from offload.ggml.llama import Model


@dataclass(frozen=True)
class SamplingOptions:
    """llama.cpp's sampling parameters and their defaults; temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    seed: int = 0xFFFFFFFF  # libllama draws one
    grammar: str | None = None


class _TokenData(C.Structure):
    _fields_ = [("id", C.c_int32), ("logit", C.c_float), ("p", C.c_float)]


class _TokenArray(C.Structure):
    _fields_ = [
        ("data", C.c_void_p),
        ("size", C.c_size_t),
        ("selected", C.c_int64),
        ("sorted", C.c_bool),
    ]


class SamplerChain:
    """Chooses tokens for one sequence; `choose` is followed by `accepted` for what was kept."""

    def __init__(self, model: Model, options: SamplingOptions) -> None:
        """Raises BadRequest when the grammar does not parse."""
        self._lib = lib = library()
        self._options = options
        self._chain: int | None = lib.llama_sampler_chain_init(
            lib.llama_sampler_chain_default_params()
        )
        try:
            self._build(model, options)
        except BaseException:
            self.close()
            raise
        self._row = np.zeros(
            model.n_vocab, np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])
        )
        self._ids = np.arange(model.n_vocab, dtype=np.int32)

    def _build(self, model: Model, o: SamplingOptions) -> None:
        lib = self._lib
        if o.grammar is not None:
            grammar = self._grammar(model, o.grammar)
            lib.llama_sampler_chain_add(self._chain, grammar)
        if o.repeat_penalty != 1.0:
            penalties = lib.llama_sampler_init_penalties(
                model.n_vocab, o.repeat_last_n, o.repeat_penalty, 0.0, 0.0
            )
            lib.llama_sampler_chain_add(self._chain, penalties)
        if o.temperature <= 0:
            lib.llama_sampler_chain_add(self._chain, lib.llama_sampler_init_greedy())
            return
        for sampler in (
            lib.llama_sampler_init_top_k(o.top_k),
            lib.llama_sampler_init_top_p(o.top_p, 1),
            lib.llama_sampler_init_min_p(o.min_p, 1),
            lib.llama_sampler_init_temp(o.temperature),
            lib.llama_sampler_init_dist(o.seed & 0xFFFFFFFF),
        ):
            lib.llama_sampler_chain_add(self._chain, sampler)

    def _grammar(self, model: Model, text: str) -> int:
        grammar: int | None = self._lib.llama_sampler_init_grammar(
            model.vocab, text.encode(), b"root"
        )
        if not grammar:
            raise BadRequest("the grammar does not parse; it needs a rule named root (GBNF)")
        return grammar

    @property
    def is_plain_greedy(self) -> bool:
        """Whether `choose` is the argmax of the logits whatever came before."""
        o = self._options
        return o.temperature <= 0 and o.repeat_penalty == 1.0 and o.grammar is None

    def choose(self, logits: NDArray[np.float32], history: Sequence[int]) -> int:
        """The token this chain samples from logits [n_vocab]; the chain's state is unchanged
        but for its random numbers. What came before it knows from `accepted`."""
        if self.is_plain_greedy:
            return int(np.argmax(logits))
        row = self._row
        row["id"], row["logit"], row["p"] = self._ids, logits, 0.0
        array = _TokenArray(row.ctypes.data, len(row), -1, False)
        self._lib.llama_sampler_apply(self._chain, C.addressof(array))
        if array.selected < 0 or array.size == 0:
            raise BadRequest("the sampler chain left no token to choose; relax the grammar")
        # A sampler may have pointed the array elsewhere, so read through it.
        return int(_TokenData.from_address(array.data + 12 * array.selected).id)

    def accepted(self, token: int) -> None:
        """Tell penalties and grammar which token was kept."""
        if not self.is_plain_greedy:
            self._lib.llama_sampler_accept(self._chain, token)

    def reset(self) -> None:
        self._lib.llama_sampler_reset(self._chain)

    def close(self) -> None:
        chain, self._chain = self._chain, None
        if chain:
            self._lib.llama_sampler_free(chain)
