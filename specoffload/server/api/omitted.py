"""Names the parts of tool results that a text model cannot read, and what it reads in their place.

An agent sends the results of its tools with every later request. If one image were refused, the
whole session would end.
"""

from __future__ import annotations

_KINDS = frozenset({"image", "document", "file", "audio", "video"})


def omitted_kind(part_type: str) -> str | None:
    """Return the kind of a part that may be left out, such as "image", or None for other parts.

    OpenAI's types are image_url, input_image, input_file and the like; Anthropic's are the kinds.
    """
    kind = part_type.removeprefix("input_").removesuffix("_url")
    return kind if kind in _KINDS else None


def placeholder(part_type: str) -> str:
    """Return what the model reads in place of a part that is left out."""
    return f"[{omitted_kind(part_type)} omitted]"
