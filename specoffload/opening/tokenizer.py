"""Finds what is missing in a model file's tokenizer."""

from __future__ import annotations

from collections.abc import Mapping

_BPE = "gpt2"  # the file's name of byte-pair encoding


def tokenizer_complaint(metadata: Mapping[str, object]) -> str:
    """Return a sentence if the file does not say how texts are split into words, else "".

    llama.cpp warns in the same case (`missing pre-tokenizer type` in src/llama-vocab.cpp). Other
    tokenizers than byte-pair encoding need no such key.
    """
    if metadata.get("tokenizer.ggml.model") != _BPE or metadata.get("tokenizer.ggml.pre"):
        return ""
    return (
        "the file has no tokenizer.ggml.pre, so texts are split by llama.cpp's default "
        "pre-tokenizer: answers may be much worse; take a newer conversion of the model"
    )
