"""Tokenizers for random models: a small byte-level BPE, a copy of another file's, or none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFReader, GGUFValueType

from lab.synth.shape import ImpossibleShape
from offload.errors import BadRequest

_NORMAL, _CONTROL = 1, 3
_SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>")
# Words are merged letter by letter from the left, so that all parts of merges are tokens too.
_WORDS = ("ĠĠĠĠ", "Ġthe", "Ġto", "Ġof", "Ġand", "Ġin", "Ġis", "ing", "er", "on", "re", "Ġdef")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Entry:
    """One metadata value whose key begins with `tokenizer.`"""

    key: str
    value: Any
    kind: GGUFValueType
    element: GGUFValueType | None = None


def no_tokenizer() -> list[Entry]:
    """Metadata of a model without tokenizer, which takes token ids only."""
    return [Entry("tokenizer.ggml.model", "no_vocab", GGUFValueType.STRING)]


def _byte_letters() -> list[str]:
    """GPT-2's printable letters for bytes 0 to 255."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters, n_moved = [], 0
    for byte in range(256):
        if byte in visible:
            letters.append(chr(byte))
        else:
            letters.append(chr(256 + n_moved))
            n_moved += 1
    return letters


def byte_level(n_vocab: int) -> list[Entry]:
    """A GPT-2 style vocabulary of `n_vocab` tokens that can spell every byte.

    It has 256 bytes, some merges, words that no text is split into, and special tokens at the end.
    Raises ImpossibleShape if `n_vocab` is too small for these.
    """
    merges: dict[tuple[str, str], str] = {}
    for word in _WORDS:
        for end in range(1, len(word)):
            merges[word[:end], word[end]] = word[: end + 1]
    words = [*_byte_letters(), *dict.fromkeys(merges.values())]
    least = len(words) + len(_SPECIAL)
    if n_vocab < least:
        raise ImpossibleShape(
            f"{n_vocab} tokens are fewer than the {least} of the built-in byte vocabulary "
            "(--n-vocab, or --vocab none)"
        )
    fill = [f"Ġw{i}" for i in range(n_vocab - least)]
    tokens = [*words, *fill, *_SPECIAL]
    types = [_NORMAL] * (len(words) + len(fill)) + [_CONTROL] * len(_SPECIAL)
    first_special = len(words) + len(fill)
    string, integer = GGUFValueType.STRING, GGUFValueType.INT32
    pairs = [f"{a} {b}" for a, b in merges]
    return [
        Entry("tokenizer.ggml.model", "gpt2", string),
        Entry("tokenizer.ggml.pre", "gpt-2", string),
        Entry("tokenizer.ggml.tokens", tokens, GGUFValueType.ARRAY, string),
        Entry("tokenizer.ggml.token_type", types, GGUFValueType.ARRAY, integer),
        Entry("tokenizer.ggml.merges", pairs, GGUFValueType.ARRAY, string),
        Entry("tokenizer.ggml.bos_token_id", first_special, GGUFValueType.UINT32),
        Entry("tokenizer.ggml.eos_token_id", first_special + 1, GGUFValueType.UINT32),
        Entry("tokenizer.ggml.eot_token_id", first_special + 3, GGUFValueType.UINT32),
        Entry("tokenizer.ggml.add_bos_token", True, GGUFValueType.BOOL),
        Entry("tokenizer.chat_template", _CHAT_TEMPLATE, string),
    ]


def copied(path: Path) -> list[Entry]:
    """The tokenizer of another GGUF file. Raises BadRequest when it has none or is no GGUF."""
    try:
        fields = GGUFReader(path).fields
        entries = [
            Entry(f.name, f.contents(), f.types[0], f.types[-1] if len(f.types) > 1 else None)
            for f in fields.values()
            if f.name.startswith("tokenizer.")
        ]
    except (OSError, ValueError, IndexError, KeyError) as e:
        raise BadRequest(f"--vocab {path}: cannot be read as GGUF ({e})") from e
    if not any(e.key == "tokenizer.ggml.tokens" for e in entries):
        raise BadRequest(f"--vocab {path}: holds no list of tokens to copy")
    return entries


def size_of(entries: list[Entry]) -> int | None:
    """Number of listed tokens; None without a tokenizer."""
    listed = [e.value for e in entries if e.key == "tokenizer.ggml.tokens"]
    return len(listed[0]) if listed else None
