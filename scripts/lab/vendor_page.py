"""Fetches the JavaScript libraries of the page at `/` into specoffload/server/page/static/vendor.

    scripts/lab/run vendor-page           fetch the versions below with npm, write the files
    scripts/lab/run vendor-page --check   exit 1 if a file differs; write nothing

npm compares each archive with the registry's checksum. The files are the published ones, without
references to source maps, and without references to fonts in formats for older browsers.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lab import ROOT

VENDOR = ROOT / "specoffload/server/page/static/vendor"
_OLDER_FONT = re.compile(rb',url\([^)]*\.(?:woff|ttf)\) format\("[^"]*"\)')
_FONTS = (
    *("AMS-Regular", "Caligraphic-Bold", "Caligraphic-Regular", "Fraktur-Bold", "Fraktur-Regular"),
    *("Main-Bold", "Main-BoldItalic", "Main-Italic", "Main-Regular", "Math-BoldItalic"),
    *("Math-Italic", "SansSerif-Bold", "SansSerif-Italic", "SansSerif-Regular", "Script-Regular"),
    *("Size1-Regular", "Size2-Regular", "Size3-Regular", "Size4-Regular", "Typewriter-Regular"),
)


@dataclass(frozen=True)
class Library:
    """A package, and `files` as (path in the package, our name)."""

    package: str
    version: str
    files: tuple[tuple[str, str], ...]


LIBRARIES = (
    Library(
        "marked", "18.2.1", (("lib/marked.esm.js", "marked.js"), ("LICENSE", "marked.LICENSE"))
    ),
    Library(
        "dompurify",
        "3.4.18",
        (("dist/purify.es.mjs", "purify.js"), ("LICENSE", "purify.LICENSE")),
    ),
    Library(
        "@highlightjs/cdn-assets",
        "11.12.0",
        (("es/highlight.min.js", "highlight.js"), ("LICENSE", "highlight.LICENSE")),
    ),
    Library(
        "katex",
        "0.19.1",
        (
            ("dist/katex.min.js", "katex.js"),
            ("dist/katex.min.css", "katex.css"),
            ("LICENSE", "katex.LICENSE"),
            *(
                (f"dist/fonts/{name}", f"fonts/{name}")
                for name in map("KaTeX_{}.woff2".format, _FONTS)
            ),
        ),
    ),
)


def fetch(library: Library, folder: Path) -> dict[str, bytes]:
    """The bytes of each file by our name. Raises CalledProcessError if npm fails."""
    packing = ["npm", "pack", "--silent", f"{library.package}@{library.version}"]
    done = subprocess.run(packing, cwd=folder, check=True, capture_output=True, text=True)
    found = {}
    with tarfile.open(folder / done.stdout.split()[-1]) as archive:
        for theirs, ours in library.files:
            file = archive.extractfile(f"package/{theirs}")
            assert file is not None, f"{library.package} has no {theirs}"
            found[ours] = file.read() if ours.endswith(".woff2") else _shipped(file.read())
    return found


def _shipped(text: bytes) -> bytes:
    """Return a file's text without references to files that are not shipped."""
    # A reference to a source map would cause warnings in browsers.
    kept = [line for line in text.splitlines() if not line.startswith(b"//# sourceMappingURL=")]
    return _OLDER_FONT.sub(b"", b"\n".join(kept) + b"\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    with tempfile.TemporaryDirectory() as folder:
        for library in LIBRARIES:
            for name, content in fetch(library, Path(folder)).items():
                path = VENDOR / name
                if check and not (path.is_file() and path.read_bytes() == content):
                    stale.append(name)
                elif not check:
                    path.parent.mkdir(exist_ok=True)
                    path.write_bytes(content)
    if stale:
        print(
            f"{', '.join(stale)}: not what npm gives; run vendor-page",
            file=sys.stderr,
        )
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
