"""Counts the bytes of media in a body while it arrives.

A text model reads no media, and a session's screenshots may have more bytes than its context has
room for in text. So these bytes do not count towards the limit of a body.
"""

from __future__ import annotations

import re

_START = re.compile(
    rb';base64,|"(?:data|url|image_url|file_data)"[ \t\r\n]{0,4}:[ \t\r\n]{0,4}"', re.IGNORECASE
)
_BASE64 = re.compile(rb"[A-Za-z0-9+/=_\\-]*")  # with line feeds as JSON escapes them
_LONGEST_START = 64  # bytes


class MediaBytes:
    """Finds base64 behind the names and prefixes that it has in requests. Takes linear time."""

    def __init__(self) -> None:
        self.n_bytes = 0
        self._is_inside = False
        self._before = b""  # the last bytes of the part before, in which a prefix may begin

    def add(self, part: bytes) -> None:
        """Count the next part of the body."""
        data, at = self._before + part, 0
        self._before = b""
        while True:
            if self._is_inside:
                match = _BASE64.match(data, at)
                assert match is not None  # the expression matches everywhere
                self.n_bytes += match.end() - at
                at = match.end()
                if at == len(data):
                    return
                self._is_inside = False
            start = _START.search(data, at)
            if start is None:
                self._before = data[max(at, len(data) - _LONGEST_START) :]
                return
            at, self._is_inside = start.end(), True
