"""Long texts cut where a special token begins, so that the library tokenises each part alone.

libllama looks for every special token from each place between two others to the end of the whole
text (`tokenizer_st_partition` in llama-vocab.cpp), which for a megabyte of them takes minutes. A
text is split at its special tokens before anything else, so a cut there changes no token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

LONG_CHARS = 32_768  # shorter texts are tokenised whole
_PART_CHARS = 1024  # a part ends at the next special token after so many


def cutter(special: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern of the special tokens; None where there are none, or two of them might overlap in a
    text: then it depends on the whole of it which of them is there."""
    texts = sorted({text for text in special if text}, key=lambda text: (-len(text), text))
    beginnings = {text[:n] for text in texts for n in range(1, len(text))} | set(texts)
    for text in texts:
        if any(text[at:] in beginnings for at in range(1, len(text))):
            return None
    return re.compile("|".join(map(re.escape, texts))) if texts else None


def parts_of(text: str, special: re.Pattern[str]) -> Iterator[str]:
    """The parts of a text; each but the first begins with a special token that no blank precedes
    (some tokens take the blanks before them)."""
    start = 0
    for found in special.finditer(text):
        at = found.start()
        if at - start >= _PART_CHARS and not text[at - 1].isspace():
            yield text[start:at]
            start = at
    yield text[start:]
