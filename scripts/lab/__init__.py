"""Makes models, measurements and pages. Not installed, and not imported by the packages."""

import re
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # the repository


def filled(page: Path, parts: Mapping[str, str]) -> str:
    """The page's text with new parts. Part `x` is the text from `<!-- x -->` to `<!-- end -->`.

    Raises ValueError if the page lacks a part.
    """
    text = page.read_text(encoding="utf-8")
    for name, part in parts.items():
        place = re.compile(rf"(?<=<!-- {re.escape(name)} -->\n).*?(?=<!-- end -->)", re.DOTALL)
        text, n = place.subn(lambda _, part=part: f"\n{part}\n\n", text)  # type: ignore[misc]
        if n != 1:
            raise ValueError(f"{page} has {n} parts named {name!r}")
    return text
