"""Sets values of a header in place of the file's (`--override-kv`), if the library would. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from offload.errors import BadModel
from offload.header_check import check_header, value_reasons
from offload.kv_overrides import FLAG, KvOverride, Scalar, kind_of, words_of
from offload.model import Header, ModelFacts

# Keys by which the file itself is read, before the library looks at what the user sets.
_OF_THE_FILE = re.compile(r"general\.(architecture|alignment)|split\..*|tokenizer\.ggml\.model")
# Numbers that the library can keep: it reads whole numbers and floats of 32 bits.
_LEAST_INT, _MOST_INT = -(1 << 31), (1 << 32) - 1
_MOST_FLOAT = 3.4028234663852886e38
_ARTICLES = {"int": "an int", "float": "a float", "bool": "a bool", "str": "a str"}
_DAMAGED = "; the file is damaged"


def overriding(facts: ModelFacts, overrides: Sequence[KvOverride]) -> ModelFacts:
    """Return `facts` with the overrides' values. Raises BadModel with one sentence.

    `facts` are the file's own. A header that is wrong with these values is refused, as a file with
    them would be. A key that the file lacks may still be one that the library reads: only the
    library can tell, when it loads the model (offload/ggml/model.py).
    """
    for what in _reasons(facts.header, overrides):
        raise BadModel(f"{FLAG} {words_of(overrides)}: {what}")
    metadata = facts.header.metadata | {override.key: override.value for override in overrides}
    header = replace(facts.header, metadata=metadata)
    changed = replace(facts, header=header, overrides=tuple(overrides))
    try:
        for what in value_reasons(header):
            raise BadModel(what)
        check_header(changed)
    except BadModel as e:
        reason = str(e).removeprefix(f"{facts.path}: ").removesuffix(_DAMAGED)
        raise BadModel(f"{FLAG} {words_of(overrides)}: {reason}") from None
    return changed


def _reasons(header: Header, overrides: Sequence[KvOverride]) -> Iterator[str]:
    """Yield a sentence for each override that is wrong, or that the library would ignore or cut.

    The library ignores a value of another type than the file's with a warning, and one in place of
    a list without a word (`get_key_or_arr` in src/llama-model-loader.cpp).
    """
    keys = [override.key for override in overrides]
    for key in sorted({key for key in keys if keys.count(key) > 1}):
        yield f"sets {key} twice: leave one out"
    for override in overrides:
        key, kind, old = override.key, override.kind, header.metadata.get(override.key)
        if _OF_THE_FILE.fullmatch(key):
            yield f"sets {key}, by which the file itself is read: leave it out"
        elif key in header.lengths:
            yield (
                f"sets {key}, which is a list of {header.lengths[key]} values in this file, and "
                "the library would ignore one value in its place: leave it out"
            )
        elif old is not None and not isinstance(old, tuple) and kind_of(old) != kind:
            theirs = kind_of(old)
            yield (
                f"{key} is {_ARTICLES[theirs]} in this file, and the library would ignore "
                f"{_ARTICLES[kind]}: write {key}={theirs}:VALUE"
            )
        elif not _fits(override.value):
            yield (
                f"sets {key} to {override.shown_value}, and the library keeps only 32 bits of it: "
                "give one that fits"
            )


def _fits(value: Scalar) -> bool:
    """True unless the library would cut off a part of the number."""
    if isinstance(value, float):
        return abs(value) <= _MOST_FLOAT
    return not isinstance(value, int) or _LEAST_INT <= value <= _MOST_INT
