"""libllama's sampler chain over a row of logits: temperature, top-k, top-p, penalties, grammar.

For sampled-token verification the target's own chain chooses at every position; a drafted token is
accepted while it equals the choice, so any chain keeps its distribution.
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from offload.errors import BadRequest, DeviceFailed
from offload.ggml.library import log
from offload.ggml.library.lib import library
from offload.ggml.llama import Model
from offload.sampling import SamplingOptions, check_grammar


class _TokenData(C.Structure):
    _fields_ = [("id", C.c_int32), ("logit", C.c_float), ("p", C.c_float)]


class _TokenArray(C.Structure):
    _fields_ = [
        ("data", C.c_void_p),
        ("size", C.c_size_t),
        ("selected", C.c_int64),
        ("sorted", C.c_bool),
    ]


_LEAST_TEMPERATURE = 1e-4  # below it is greedy: dividing logits by less overflows
_TOKEN = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])


class SamplerChain:
    """Chooses tokens for one sequence; `choose` is followed by `accepted` for what was kept.

    Penalties, then the grammar's mask, then what narrows (top-k, top-p, min-p, temperature), then
    the draw: llama.cpp's order with the grammar first.
    """

    def __init__(self, model: Model, options: SamplingOptions) -> None:
        """Raises BadRequest when the grammar does not parse."""
        self._lib = library()
        self._options = options
        self._owned: list[int] = []
        self._penalties = self._grammar = self._narrow = self._draw = 0
        try:
            self._build(model, options)
        except BaseException:
            self.close()
            raise
        self._row = np.zeros(model.n_vocab, _TOKEN)
        self._one = np.zeros(1, _TOKEN)
        self._ids = np.arange(model.n_vocab, dtype=np.int32)

    def _build(self, model: Model, o: SamplingOptions) -> None:
        lib = self._lib
        if o.has_penalties:
            self._penalties = self._own(
                lib.llama_sampler_init_penalties(
                    model.n_vocab,
                    o.repeat_last_n,
                    o.repeat_penalty,
                    o.frequency_penalty,
                    o.presence_penalty,
                )
            )
        if o.grammar is not None:
            check_grammar(o.grammar)
            log.take_errors()
            grammar = lib.llama_sampler_init_grammar(model.vocab, o.grammar.encode(), b"root")
            if not grammar:
                raise BadRequest(
                    "the grammar does not parse; GBNF needs a rule named root "
                    f"({log.take_reason()})"
                )
            self._grammar = self._own(grammar)
        if o.temperature < _LEAST_TEMPERATURE:
            return
        self._narrow = self._own(
            lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        )
        for sampler in (
            lib.llama_sampler_init_top_k(o.top_k),
            lib.llama_sampler_init_top_p(o.top_p, 1),
            lib.llama_sampler_init_min_p(o.min_p, 1),
            lib.llama_sampler_init_temp(o.temperature),
        ):
            lib.llama_sampler_chain_add(self._narrow, sampler)  # which owns it from now on
        self._draw = self._own(lib.llama_sampler_init_dist(o.seed & 0xFFFFFFFF))

    def _own(self, sampler: int) -> int:
        self._owned.append(sampler)
        return sampler

    @property
    def is_plain_greedy(self) -> bool:
        """True if `choose` is the argmax of the logits whatever came before."""
        return not (self._draw or self._penalties or self._grammar)

    def choose(self, logits: NDArray[np.float32], history: Sequence[int]) -> int:
        """The token this chain samples from logits [n_vocab]; the chain's state is unchanged
        but for its random numbers. What came before it knows from `accepted`.

        Raises BadRequest when the grammar leaves no token.
        """
        if self.is_plain_greedy:
            return int(np.argmax(logits))
        array = self._penalised(logits)
        if not self._draw:
            return self._most_likely(array)
        self._narrowed(array)
        self._lib.llama_sampler_apply(self._draw, C.addressof(array))
        # A sampler may have pointed the array elsewhere, so read through it.
        return int(_TokenData.from_address(array.data + 12 * array.selected).id)

    def probabilities(
        self, logits: NDArray[np.float32], history: Sequence[int]
    ) -> NDArray[np.float64]:
        """The distribution that `choose` draws from, [n_vocab], sum 1; a greedy chain is certain.

        Raises BadRequest when the grammar leaves no token.
        """
        out = np.zeros(len(self._ids))
        if not self._draw:
            out[self.choose(logits, history)] = 1.0
            return out
        array = self._penalised(logits)
        self._narrowed(array)
        memory = (C.c_char * (_TOKEN.itemsize * array.size)).from_address(array.data)
        left = np.frombuffer(memory, _TOKEN)
        p = np.exp(left["logit"].astype(np.float64) - left["logit"].max())
        total = p.sum()
        if not np.isfinite(total):
            raise DeviceFailed("the model's logits are not numbers: nothing can be sampled")
        out[left["id"]] = p / total
        return out

    def _penalised(self, logits: NDArray[np.float32]) -> _TokenArray:
        row = self._row
        row["id"], row["logit"], row["p"] = self._ids, logits, 0.0
        array = _TokenArray(row.ctypes.data, len(row), -1, False)
        if self._penalties:
            self._lib.llama_sampler_apply(self._penalties, C.addressof(array))
        return array

    def _most_likely(self, array: _TokenArray) -> int:
        """A mask does not change which of the allowed tokens is the greatest, so the greatest of
        all is tried alone first: masking a large vocabulary takes milliseconds."""
        best = int(self._row["logit"].argmax())
        if self._grammar and not self._allows(best):
            self._masked(array)
            best = int(self._row["logit"].argmax())
        return best

    def _allows(self, token: int) -> bool:
        self._one[0] = token, 0.0, 0.0
        one = _TokenArray(self._one.ctypes.data, 1, -1, False)
        self._lib.llama_sampler_apply(self._grammar, C.addressof(one))
        return bool(self._one[0]["logit"] != -np.inf)

    def _narrowed(self, array: _TokenArray) -> None:
        if self._grammar:
            self._masked(array)
        self._lib.llama_sampler_apply(self._narrow, C.addressof(array))

    def _masked(self, array: _TokenArray) -> None:
        self._lib.llama_sampler_apply(self._grammar, C.addressof(array))
        # Accepting a token that the grammar refuses would abort the process.
        if self._row["logit"].max() == -np.inf:
            raise BadRequest(
                "the grammar leaves no token of this model's vocabulary to go on with; relax it"
            )

    def accepted(self, token: int) -> None:
        """Tell penalties and grammar which token was kept.

        Raises BadRequest for one that the grammar refuses: libllama would abort the process.
        """
        if self._grammar and not self._allows(token):
            raise BadRequest(f"token {token} was chosen, and the grammar refuses it")
        for sampler in (self._penalties, self._grammar):
            if sampler:
                self._lib.llama_sampler_accept(sampler, token)

    def reset(self) -> None:
        """Forget what was accepted, and start the random numbers anew."""
        for sampler in self._owned:
            self._lib.llama_sampler_reset(sampler)

    def close(self) -> None:
        owned, self._owned = self._owned, []
        self._penalties = self._grammar = self._narrow = self._draw = 0
        for sampler in owned:
            self._lib.llama_sampler_free(sampler)
