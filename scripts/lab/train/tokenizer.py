"""Trains a byte-level BPE with GPT-2's pre-tokeniser, which llama.cpp reads as type `gpt-2`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lab.train.corpus import SourceFile
from lab.train.shapes import EOS_ID, IM_END_ID, IM_START_ID, N_VOCAB, SEED, SPECIAL_TOKENS

# One of every CHAT_EVERY training files is written as a chat: its first lines are the user's turn,
# the others the assistant's. This teaches the places of chat tokens, not how to converse.
CHAT_EVERY = 8


def train_tokenizer(sources: tuple[SourceFile, ...]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=N_VOCAB,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((source.text for source in sources), trainer)
    if tokenizer.get_vocab_size() != N_VOCAB:
        raise ValueError(f"the text gave {tokenizer.get_vocab_size()} tokens, not {N_VOCAB}")
    return tokenizer


def tokenizer_of(tokens: Sequence[str], merges: Sequence[str]) -> Tokenizer:
    """The tokeniser of an exported model: `tokens` by id, `merges` "left right" by rank."""
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path))


def encode_plain(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of source text. Raises ValueError if the text spells a special token.

    CPython's sources spell none. `tokenizers` would read one as the token, and llama.cpp as text.
    """
    if any(token in text for token in SPECIAL_TOKENS):
        raise ValueError("the text spells a special token")
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def encode_stream(tokenizer: Tokenizer, sources: tuple[SourceFile, ...]) -> np.ndarray:
    """Token ids uint16 [n] of all files in a shuffled order, each after EOS. One file in
    `CHAT_EVERY` is written as a chat."""
    order = random.Random(SEED)
    files = list(sources)
    order.shuffle(files)
    stream: list[int] = []
    for i, source in enumerate(files):
        stream.append(EOS_ID)
        if i % CHAT_EVERY == 0 and source.text.count("\n") > 8:
            stream.extend(_as_chat(tokenizer, source.text, order))
        else:
            stream.extend(encode_plain(tokenizer, source.text))
    return np.array(stream, dtype=np.uint16)


def _as_chat(tokenizer: Tokenizer, text: str, order: random.Random) -> list[int]:
    lines = text.splitlines(keepends=True)
    cut = order.randint(1, min(40, len(lines) - 1))
    user, assistant = "".join(lines[:cut]).rstrip("\n"), "".join(lines[cut:]).rstrip("\n")
    newline = encode_plain(tokenizer, "\n")
    return [
        IM_START_ID,
        *encode_plain(tokenizer, "user\n" + user),
        IM_END_ID,
        *newline,
        IM_START_ID,
        *encode_plain(tokenizer, "assistant\n" + assistant),
        IM_END_ID,
        *newline,
    ]
