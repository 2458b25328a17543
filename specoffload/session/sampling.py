"""A request's sampling in libllama's terms, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields

from offload.errors import BadRequest
from offload.sampling.options import (
    MOST_BIASES,
    MOST_BREAKERS,
    SamplerParameters,
    SamplingOptions,
    sampler_names,
)
from specoffload.session.generation import GenerateOptions

_HOTTEST = 1000.0
_NUMBERS = tuple(f.name for f in fields(SamplingOptions) if f.type == "float")
_SAID = ("samplers", "repeat_last_n", "dry_penalty_last_n")  # in other words than libllama's
_SAME = tuple(f.name for f in fields(SamplerParameters) if f.name not in _SAID)


def sampling_of(options: GenerateOptions, n_ctx: int) -> SamplingOptions:
    """Raises BadRequest for a parameter out of range, or a grammar beside a schema."""
    _check(options)
    return SamplingOptions(
        **{name: getattr(options, name) for name in _SAME},
        samplers=sampler_names(options.samplers),
        repeat_last_n=_of_context(options.repeat_last_n, n_ctx),
        dry_penalty_last_n=_of_context(options.dry_penalty_last_n, n_ctx),
        seed=0xFFFFFFFF if options.seed is None else options.seed,
    )


def _of_context(n_tokens: int, n_ctx: int) -> int:
    """-1 is all of them."""
    return n_ctx if n_tokens < 0 else min(n_tokens, n_ctx)


def _check(options: GenerateOptions) -> None:
    for name in _NUMBERS:
        value = getattr(options, name)
        if not math.isfinite(value) or abs(value) > _HOTTEST:
            raise BadRequest(f"{name} {value}: must be a number up to {_HOTTEST:g}")
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
    """`logit_bias` of a request, in each form that OpenAI and llama-server take: an object or a
    list of pairs; keys are ids or texts, values numbers, or false for never. Raises BadRequest."""
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
