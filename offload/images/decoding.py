"""Decodes image files in a process of its own, because clients send them.

A file may be damaged on purpose, or small and yet of gigabytes once it is decoded. The program
(decoder.cpp) limits its own memory and time. If it dies, one request is refused.
"""

from __future__ import annotations

import hashlib
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from offload.errors import BadRequest

MOST_FILE_BYTES = 32 << 20
# llama-server's words
NO_IMAGES = (
    "image input is not supported - hint: if this is unexpected, you may need to provide the mmproj"
)
# The images of a prompt may have this many pixels together. A pixel takes 3 bytes.
_MOST_PIXELS = 200_000_000
_TIME_LIMIT_S = 30.0


@dataclass(frozen=True)
class Bitmap:
    """The pixels of an image, RGB, row by row. `identity` is the SHA-256 of its file."""

    width: int
    height: int
    pixels: bytes
    identity: bytes


def decoded_files(files: Sequence[bytes], decoder: Path) -> list[Bitmap]:
    """Return the images of `files`. Raises BadRequest, which names the image by its number."""
    bitmaps: list[Bitmap] = []
    n_pixels = 0
    for number, file in enumerate(files, 1):
        try:
            bitmap = _decoded(file, decoder)
        except BadRequest as e:
            raise BadRequest(f"image {number} of {len(files)} cannot be read: {e}") from e
        n_pixels += bitmap.width * bitmap.height
        if n_pixels > _MOST_PIXELS:
            raise BadRequest(
                f"the {len(files)} images have more than {_MOST_PIXELS} pixels together: send "
                "fewer or smaller ones"
            )
        bitmaps.append(bitmap)
    return bitmaps


def _is_sound(file: bytes) -> bool:
    """True for the beginning of a WAV, MP3 or FLAC file, as libmtmd tells them."""
    is_wav = file[:4] == b"RIFF" and file[8:12] == b"WAVE"
    has_sync = len(file) > 1 and file[0] == 0xFF and file[1] & 0xE0 == 0xE0  # of an MPEG frame
    return is_wav or has_sync or file.startswith((b"ID3", b"fLaC"))


def _decoded(file: bytes, decoder: Path) -> Bitmap:
    if not file:
        raise BadRequest("it is empty")
    if len(file) > MOST_FILE_BYTES:
        raise BadRequest(f"it has {len(file)} bytes, and at most {MOST_FILE_BYTES} are read")
    if file[:4] == b"RIFF" and file[8:12] == b"WEBP":
        raise BadRequest("it is a WebP file: send a PNG, JPEG, GIF or BMP file")
    if _is_sound(file):
        raise BadRequest("it is a sound file, and this server reads only images")
    try:
        done = subprocess.run(
            [str(decoder)], input=file, capture_output=True, check=False, timeout=_TIME_LIMIT_S
        )
    except subprocess.TimeoutExpired as e:
        raise BadRequest(f"decoding it takes over {_TIME_LIMIT_S:g} s") from e
    except OSError as e:
        raise BadRequest(f"its decoder does not start ({e})") from e
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        raise BadRequest(f"its decoder died of {name}, as the file is damaged or too large")
    head, _, pixels = done.stdout.partition(b"\n")
    if done.returncode != 0:
        reason = done.stderr.decode("utf-8", "replace").strip() or "its decoder failed"
        raise BadRequest(reason)
    width, height = map(int, head.split())
    if len(pixels) != 3 * width * height:
        raise BadRequest("its decoder gave fewer pixels than it has")
    return Bitmap(width, height, pixels, hashlib.sha256(file).digest())
