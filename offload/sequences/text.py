"""Converts tokens to text and back. Streams hold bytes back until a character is complete."""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from offload.ggml.model import Model

LONG_CHARS = 32_768  # characters up to which texts are tokenised whole
_PART_CHARS = 1024  # least characters of a part of a longer text


class TextStream:
    """Joins the bytes of tokens into text; invalid bytes become U+FFFD, never an error."""

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """Return the characters that this token completes, or "" if it completes none."""
        return self._decoder.decode(self._piece(token))

    def finish(self) -> str:
        """Return the text of the remaining bytes; a truncated character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)


class ModelText:
    """A model's vocabulary: a mixin for classes that open a model."""

    _model: Model

    def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Return the token ids of a text."""
        whole = self._model.tokenize
        special = self._cutter(parse_special) if len(text) > LONG_CHARS else None
        if special is None:
            return whole(text, add_special=add_special, parse_special=parse_special)
        tokens = whole("", add_special=True, parse_special=False) if add_special else []
        for part in parts_of(text, special):
            tokens += whole(part, add_special=False, parse_special=parse_special)
        return tokens

    def _cutter(self, parse_special: bool) -> re.Pattern[str] | None:
        """Return a pattern at whose matches long texts may be cut, or None if they must not be."""
        known = self.__dict__.setdefault("_cutters", {})
        if parse_special not in known:
            texts = self._model.special_texts(parse_special=parse_special)
            known[parse_special] = cutter(texts) if self._model.may_cut_texts else None
        pattern: re.Pattern[str] | None = known[parse_special]
        return pattern

    def text_stream(self, *, special: bool = False, shown: Collection[int] = ()) -> TextStream:
        """Return a detokeniser that yields whole characters.

        It shows all special tokens if `special` is set, otherwise only those in `shown`.
        """
        return TextStream(lambda token: self._model.piece(token, special=special or token in shown))

    def special_tokens(self, texts: Sequence[str]) -> frozenset[int]:
        tokenized = (self.tokenize(text, add_special=False, parse_special=True) for text in texts)
        return frozenset(tokens[0] for tokens in tokenized if len(tokens) == 1)

    def detokenize(self, tokens: Sequence[int], *, special: bool = False) -> str:
        stream = self.text_stream(special=special)
        return "".join(stream.feed(token) for token in tokens) + stream.finish()

    def is_end(self, token: int) -> bool:
        return self._model.is_end(token)

    def token_text(self, token: int) -> str:
        """Return the vocabulary's spelling of a token, for comparing vocabularies."""
        return self._model.token_text(token)

    @functools.cached_property
    def longest_token_bytes(self) -> int:
        """An upper bound for the bytes of one token's text: the longest spelling."""
        if not self._model.has_tokenizer:
            return 1
        spellings = (self._model.token_text(token) for token in range(self._model.n_vocab))
        return max((len(text.encode()) for text in spellings), default=1)

    @property
    def chat_template(self) -> str | None:
        return self._model.chat_template()

    @property
    def model(self) -> Model:
        return self._model


# libllama searches for every special token from each gap between two others to the end of the text
# (`tokenizer_st_partition` in llama-vocab.cpp). That takes minutes for a megabyte of special
# tokens. libllama first splits a text at special tokens, so cutting there changes no token.


def cutter(special: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern that matches the special tokens, or None if a text must not be cut.

    A text must not be cut if there are no special tokens, or if two of them may overlap in a text.
    In the second case it depends on the whole text which of the two is found.
    """
    texts = sorted({text for text in special if text}, key=lambda text: (-len(text), text))
    beginnings = {text[:n] for text in texts for n in range(1, len(text))} | set(texts)
    for text in texts:
        if any(text[at:] in beginnings for at in range(1, len(text))):
            return None
    return re.compile("|".join(map(re.escape, texts))) if texts else None


def parts_of(text: str, special: re.Pattern[str]) -> Iterator[str]:
    """Yield the parts of a text.

    Each part but the first begins with a special token. No blank precedes that token, because some
    tokens include the blanks before them.
    """
    start = 0
    for match in special.finditer(text):
        at = match.start()
        if at - start >= _PART_CHARS and not text[at - 1].isspace():
            yield text[start:at]
            start = at
    yield text[start:]
