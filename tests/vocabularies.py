"""Tiny models of every kind of tokenizer, which write one text over and over.

A model's next token depends on its last one alone, and is the one with which its tokenizer goes on
in `CYCLE`. Characters of the text do not repeat, so a token's place in it is known. Models of
different tokenizers write the same text, as a good draft of another family would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter, TokenType

from lab.synth.vocabulary import _byte_letters
from offload.sequences.vocabulary_file import VocabularyFile
from specdec.drafters.vocabulary import Vocabulary
from specoffload.opening.translation import vocabulary_of

CYCLE = " quickfjord-waltz:nymph_BEG\né"
assert len(set(CYCLE)) == len(CYCLE)
_WIDTH, _HIDDEN, _HEAD = 512, 32, 32
_NORMAL, _UNKNOWN = TokenType.NORMAL, TokenType.UNKNOWN
_CONTROL, _BYTE = TokenType.CONTROL, TokenType.BYTE

Token = tuple[str, TokenType, float]


@dataclass(frozen=True)
class Tokenizer:
    """Metadata of a tokenizer: its kind, tokens with types and scores, and other keys."""

    kind: str
    tokens: tuple[Token, ...]
    merges: tuple[str, ...] = ()
    more: tuple[tuple[str, object], ...] = ()


def byte_pairs(pre: str, words: Sequence[str], special: Sequence[str]) -> Tokenizer:
    """Byte-pair encoding that merges the letters of `words`. `special` are BOS, EOS and EOT."""
    letters = _byte_letters()
    spelled = [["".join(letters[b] for b in c.encode()) for c in word] for word in words]
    merges: dict[str, str] = {}
    for word in spelled:
        flat = list("".join(word))
        for end in range(1, len(flat)):
            merges[f"{''.join(flat[:end])} {flat[end]}"] = "".join(flat[: end + 1])
    tokens = [*letters, *dict.fromkeys(merges.values())]
    rows = [(t, _NORMAL, 0.0) for t in tokens] + [(s, _CONTROL, 0.0) for s in special]
    bos, eos, eot = range(len(tokens), len(rows))
    ids = (("bos_token_id", bos), ("eos_token_id", eos), ("eot_token_id", eot))
    return Tokenizer(
        "gpt2", tuple(rows), tuple(merges), (("pre", pre), ("add_bos_token", True), *ids)
    )


def sentence_pieces(words: Sequence[str], *, adds_space: bool) -> Tokenizer:
    """SentencePiece with bytes for unknown characters."""
    rows: list[Token] = [("<unk>", _UNKNOWN, 0.0), ("<s>", _CONTROL, 0.0), ("</s>", _CONTROL, 0.0)]
    rows += [(f"<0x{byte:02X}>", _BYTE, 0.0) for byte in range(256)]
    spelled = [word.replace(" ", "▁") for word in words]
    pieces = dict.fromkeys(w[:end] for w in spelled for end in range(2, len(w) + 1))
    chars = dict.fromkeys("▁" + "".join(c for c in CYCLE if c not in " \né"))
    rows += [(text, _NORMAL, -float(i)) for i, text in enumerate((*pieces, *chars))]
    more = (("bos_token_id", 1), ("eos_token_id", 2), ("unknown_token_id", 0))
    return Tokenizer(
        "llama", tuple(rows), (), (*more, ("add_bos_token", True), ("add_space_prefix", adds_space))
    )


def unigrams(words: Sequence[str]) -> Tokenizer:
    """Unigram SentencePiece, as in T5, without bytes."""
    rows: list[Token] = [
        ("<pad>", _CONTROL, 0.0),
        ("</s>", _CONTROL, 0.0),
        ("<unk>", _UNKNOWN, 0.0),
    ]
    spelled = [word.replace(" ", "▁") for word in words]
    pieces = dict.fromkeys(w[:end] for w in spelled for end in range(2, len(w) + 1))
    chars = dict.fromkeys("▁" + "".join(c for c in CYCLE if c not in " \n"))
    rows += [(text, _NORMAL, -2.0) for text in pieces] + [(text, _NORMAL, -5.0) for text in chars]
    more = (("eos_token_id", 1), ("padding_token_id", 0), ("unknown_token_id", 2))
    return Tokenizer("t5", tuple(rows), (), (*more, ("add_eos_token", False)))


def word_pieces(words: Sequence[str]) -> Tokenizer:
    """WordPiece, as in BERT: it writes small letters, and nothing of blanks but that there are."""
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
    rows: list[Token] = [(s, _UNKNOWN if s == "[UNK]" else _CONTROL, 0.0) for s in special]
    chars = [c for c in CYCLE.lower() if not c.isspace()]
    starts = dict.fromkeys((*("▁" + w.strip().lower() for w in words), *("▁" + c for c in chars)))
    rows += [(text, _NORMAL, 0.0) for text in (*starts, *dict.fromkeys(chars))]
    ids = ("padding_token_id", 0), ("unknown_token_id", 1), ("bos_token_id", 2), ("eos_token_id", 3)
    more = (*ids, ("seperator_token_id", 3), ("cls_token_id", 2))
    return Tokenizer("bert", tuple(rows), (), (*more, ("add_bos_token", True)))


def trie(words: Sequence[str]) -> Tokenizer:
    """RWKV's greedy tokenizer of bytes, whose spellings are escaped."""
    rows: list[Token] = [("<s>", _CONTROL, 0.0)]
    rows += [(f"\\x{byte:02x}", _NORMAL, 0.0) for byte in range(256)]
    rows += [(text.replace("\n", "\\n"), _NORMAL, 0.0) for text in dict.fromkeys(words)]
    return Tokenizer("rwkv", tuple(rows), (), (("eos_token_id", 0),))


_LLAMA = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>")
_QWEN = ("<|endoftext|>", "<|endoftext2|>", "<|im_end|>")
_TEKKEN = ("<s>", "</s>", "<|user|>")
TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "gpt-2": lambda: byte_pairs("gpt-2", (" quic", "kfj", "ord", "waltz"), _QWEN),
    "llama-bpe": lambda: byte_pairs("llama-bpe", (" quickfjord", "nymph", "BEG"), _LLAMA),
    "qwen2": lambda: byte_pairs("qwen2", (" qu", "ick", "fjord", "nym", "é"), _QWEN),
    "deepseek-coder": lambda: byte_pairs("deepseek-coder", ("uick", "jord", "altz", "ph"), _LLAMA),
    "tekken": lambda: byte_pairs("tekken", ("qui", "fj", "wa", "tz", "mph", "EG"), _TEKKEN),
    "spm": lambda: sentence_pieces((" quick", "fjord", "waltz", "nymph"), adds_space=True),
    "spm-plain": lambda: sentence_pieces((" qui", "ckf", "jor", "nym"), adds_space=False),
    "ugm": lambda: unigrams((" quick", "fjo", "waltz", "nymph")),
    "wpm": lambda: word_pieces((" quick", "fjord", "waltz", "nymph")),
    "none": lambda: Tokenizer("no_vocab", (("", _NORMAL, 0.0),) * 300),
    "rwkv": lambda: trie((" qui", "ckfj", "waltz", ":nym", "G\n")),
}


def write(path: Path, name: str) -> Path:
    """Write the model with the tokenizer `name` to `path`. Returns `path`."""
    made = TOKENIZERS[name]()
    if name == "none":
        _write(path, name, made, np.eye(len(made.tokens), _WIDTH, dtype=np.float32))
        return path
    _write(path, name, made, np.zeros((len(made.tokens), _WIDTH), np.float32))
    with VocabularyFile(path) as text:
        successors = _successors(vocabulary_of(text), len(made.tokens))
    output = np.zeros((len(made.tokens), _WIDTH), np.float32)
    for token, after in successors.items():
        output[after, token] = 1.0
    _write(path, name, made, output)
    return path


def _successors(vocabulary: Vocabulary, n_vocab: int) -> dict[int, int]:
    """The token that follows each one. One that is no part of the text is followed by its start.

    If the tokenizer loses characters, the text is the one that is left.
    """
    cycle = vocabulary.continuation(CYCLE)
    text = vocabulary.text_of(cycle)
    found = dict.fromkeys(range(n_vocab), cycle[0])
    for token in range(n_vocab):
        piece = vocabulary.text_of([token])
        at = (text * 2).find(piece)
        if not piece or at < 0 or at >= len(text) or "\ufffd" in piece:
            continue
        after = vocabulary.continuation((text * 2)[at + len(piece) :])
        found[token] = after[0]
    return found | dict(pairwise(vocabulary.continuation(CYCLE * 2)))


def _write(path: Path, name: str, made: Tokenizer, output: np.ndarray[Any, Any]) -> None:
    n = len(made.tokens)
    assert n <= _WIDTH
    writer = GGUFWriter(path, "llama")
    writer.add_name(name)
    writer.add_context_length(2048)
    writer.add_embedding_length(_WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(_HIDDEN)
    writer.add_head_count(1)
    writer.add_key_length(_HEAD)
    writer.add_value_length(_HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(_HEAD)
    writer.add_vocab_size(n)
    writer.add_tokenizer_model(made.kind)
    if made.kind != "no_vocab":
        writer.add_token_list([text for text, _, _ in made.tokens])
        writer.add_token_types([kind for _, kind, _ in made.tokens])
        writer.add_token_scores([score for _, _, score in made.tokens])
    if made.merges:
        writer.add_token_merges(list(made.merges))
    for key, value in made.more:
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}[type(value)]
        add(f"tokenizer.ggml.{key}", value)  # type: ignore[operator]
    zeros = {
        "attn_q": (_HEAD, _WIDTH), "attn_k": (_HEAD, _WIDTH), "attn_v": (_HEAD, _WIDTH),
        "attn_output": (_WIDTH, _HEAD), "ffn_gate": (_HIDDEN, _WIDTH),
        "ffn_up": (_HIDDEN, _WIDTH), "ffn_down": (_WIDTH, _HIDDEN),
    }  # fmt: skip
    writer.add_tensor("token_embd.weight", np.eye(n, _WIDTH, dtype=np.float32))
    writer.add_tensor("output.weight", output)
    ones = np.ones(_WIDTH, np.float32)
    for norm in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{norm}.weight", ones)
    for tensor, shape in zeros.items():
        writer.add_tensor(f"blk.0.{tensor}.weight", np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
