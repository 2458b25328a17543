"""Makes the prompt for filling in the middle of a text, for models that were trained on it. Pure.

The layout is as in llama-server's /infill: other files, the prefix, the suffix, and a marker. The
model writes the middle after the marker (https://arxiv.org/abs/2207.14255).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offload.errors import NotSupported

_SUFFIX_SHARE = 4  # 1 / (share of the room that the suffix may always take)


@dataclass(frozen=True)
class FillMarkers:
    """Ids of the tokens that precede each part of the prompt; -1 if the vocabulary lacks one."""

    prefix: int
    suffix: int
    middle: int
    repository: int = -1
    file: int = -1


@dataclass(frozen=True)
class Fill:
    """The text around the part to fill in. `prompt` is the beginning of that part.

    `extra` has the name and the text of other files.
    """

    prefix: str
    suffix: str
    prompt: str = ""
    extra: tuple[tuple[str, str], ...] = ()


def fill_prompt(
    fill: Fill,
    markers: FillMarkers,
    tokenize: Callable[[str], list[int]],
    *,
    beginning: Sequence[int],
    n_room: int,
    suffix_first: bool = False,
) -> list[int]:
    """The tokens of the prompt. Text far from the part to fill in is cut to fit `n_room` tokens.

    `beginning` has the tokens with which every prompt of the model begins. `suffix_first` puts the
    suffix before the prefix, for models trained that way (llama-server's --spm-infill). Raises
    NotSupported for a model without the markers.
    """
    for name in ("prefix", "suffix", "middle"):
        if getattr(markers, name) < 0:
            raise NotSupported(
                f"this model cannot fill in text: its vocabulary has no token before the {name}"
            )
    prompt = tokenize(fill.prompt)
    before, after = tokenize(fill.prefix), tokenize(fill.suffix)
    room = n_room - len(beginning) - 3 - len(prompt)
    after = after[: max(0, room // _SUFFIX_SHARE, room - len(before))]
    before = _last(before, room - len(after))
    extra = _extra(fill, markers, tokenize)
    extra = _last(extra, room - len(before) - len(after))
    parts = [[markers.prefix, *before, *prompt], [markers.suffix, *after]]
    first, second = reversed(parts) if suffix_first else parts
    return [*beginning, *extra, *first, *second, markers.middle]


def _last(tokens: list[int], n: int) -> list[int]:
    return tokens[-n:] if n > 0 else []


def _extra(fill: Fill, markers: FillMarkers, tokenize: Callable[[str], list[int]]) -> list[int]:
    """Tokens of the other files. Each follows its name if the vocabulary has a marker for files."""
    if not fill.extra:
        return []
    tokens = [markers.repository, *tokenize("project\n")] if markers.repository >= 0 else []
    for name, text in fill.extra:
        if markers.file >= 0:
            tokens += [markers.file, *tokenize(f"{name}\n")]
        else:
            tokens += tokenize("\n\n--- snippet ---\n\n")
        tokens += tokenize(text)
    if markers.file >= 0:
        tokens += [markers.file, *tokenize("filename\n")]
    return tokens
