"""Has image files decoded by a process of its own (`decoder.cpp`), because clients send them.

A file may be damaged on purpose, or small and yet of gigabytes once it is decoded. The process
limits its memory, and the processor time of all files together. If it dies, one image is refused.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from offload.errors import BadRequest

MOST_FILE_BYTES = 32 << 20
# llama-server's words
NO_IMAGES = (
    "image input is not supported - hint: if this is unexpected, you may need to provide the mmproj"
)
MOST_S, MOST_ALL_S = 5.0, 10.0  # of processor time, for an image and for all images of a call
_TIME_LIMIT_S = 120.0  # for a decoder that gets too little of the processor
_LENGTH = struct.Struct("<Q")

# Files that cannot be read, by a part of their beginning and its place.
_KNOWN_FILES: tuple[tuple[int, bytes, str], ...] = (
    (8, b"WEBP", "a WebP file"),
    (8, b"WAVE", "a sound file"),
    (4, b"ftypheic", "a HEIC file"),
    (4, b"ftypheix", "a HEIC file"),
    (4, b"ftypmif1", "a HEIC file"),
    (4, b"ftypavif", "an AVIF file"),
    (4, b"ftyp", "a video"),
    (0, b"II*\0", "a TIFF file"),
    (0, b"MM\0*", "a TIFF file"),
    (0, b"8BPS", "a Photoshop file"),
    (0, b"%PDF", "a PDF file"),
    (0, b"\0\0\1\0", "an icon file"),
    (0, b"<svg", "an SVG file"),
    (0, b"<?xml", "an SVG or XML file"),
    (0, b"<!DOCTYPE", "an HTML page"),
    (0, b"<html", "an HTML page"),
    (0, b"ID3", "a sound file"),
    (0, b"fLaC", "a sound file"),
    (0, b"OggS", "a sound file"),
)


@dataclass(frozen=True)
class StoredPixels:
    """The place of an image's pixels in a file that another process may open."""

    path: str
    start: int  # bytes


@dataclass(frozen=True)
class Bitmap:
    """An image: RGB pixels, row by row. `identity` is the SHA-256 of its file.

    With `pixels` None, only the size is known, which is enough to count its tokens.
    """

    width: int
    height: int
    pixels: StoredPixels | bytes | None
    identity: bytes

    @property
    def n_bytes(self) -> int:
        return 3 * self.width * self.height

    def read(self) -> NDArray[np.uint8] | None:
        """Return the pixels, mapped from their file if they are in one.

        Raises BadRequest if the file is gone or too short.
        """
        if self.pixels is None:
            return None
        if isinstance(self.pixels, bytes):
            return np.frombuffer(self.pixels, np.uint8)
        try:
            with open(self.pixels.path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            return np.frombuffer(mapped, np.uint8, self.n_bytes, self.pixels.start)
        except (OSError, ValueError) as e:
            raise BadRequest(f"the pixels of an image are gone ({e}): send it again") from e


DecodedImage = Bitmap | BadRequest
"""A decoded image, or the end of the sentence "the image cannot be read:"."""


def refusal_reason(file: bytes) -> str:
    """Return why a file is not given to the decoder, "" if it is."""
    if not file:
        return "it is empty"
    if len(file) > MOST_FILE_BYTES:
        return f"it has {len(file)} bytes, and at most {MOST_FILE_BYTES} are read"
    start = file[:64].lstrip() if file[:1].isspace() else file[:64]
    for at, mark, kind in _KNOWN_FILES:
        if start.startswith(mark, at):
            return f"it is {kind}: send a PNG, JPEG, GIF or BMP file"
    if len(file) > 1 and file[0] == 0xFF and file[1] & 0xE0 == 0xE0 and file[1] != 0xFF:
        # The beginning of an MPEG frame. JPEG files begin with FF D8.
        return "it is a sound file: send a PNG, JPEG, GIF or BMP file"
    return ""


def decoder_command(
    decoder: Path, pixels: int | None, most_s: float = MOST_S, most_all_s: float = MOST_ALL_S
) -> list[str]:
    """Return the decoder's command. `pixels` is an open descriptor; None: only sizes.

    `most_s` and `most_all_s` limit the processor time of an image and of all images. The system
    ends the decoding of an image up to a second later.
    """
    wanted = ["sizes"] if pixels is None else ["pixels", str(pixels)]
    return [str(decoder), f"{most_s:g}", f"{most_all_s:g}", *wanted]


def decoder_input(files: Iterable[bytes]) -> list[bytes]:
    """Return what the decoder reads for the files that it gets, in parts."""
    parts = []
    for file in files:
        if not refusal_reason(file):
            parts += [_LENGTH.pack(len(file)), file]
    return parts


def found_in(
    said: bytes, files: Sequence[bytes], pixels_path: str | None = None
) -> list[DecodedImage]:
    """Return what the decoder said about each of `files`.

    `pixels_path` names the file with the pixels, from another process. None: only sizes are known.
    A decoder that ended early has read no more files.
    """
    lines = iter(said.decode("utf-8", "replace").splitlines())
    images: list[DecodedImage] = []
    start = 0
    for file in files:
        reason = refusal_reason(file)
        if reason:
            images.append(BadRequest(reason))
            continue
        line = next(lines, "! its decoder failed")
        if line.startswith("! "):
            images.append(BadRequest(line.removeprefix("! ")))
            continue
        width, height = map(int, line.split())
        at = None if pixels_path is None else StoredPixels(pixels_path, start)
        bitmap = Bitmap(width, height, at, hashlib.sha256(file).digest())
        start += bitmap.n_bytes
        images.append(bitmap)
    return images


def decoded_files(files: Sequence[bytes], decoder: Path) -> list[Bitmap]:
    """Return the images of `files`. Raises BadRequest, which names the image by its number."""
    with tempfile.TemporaryFile() as pixels:
        images = found_in(_said(files, decoder, pixels), files, f"/proc/self/fd/{pixels.fileno()}")
        bitmaps = []
        for number, image in enumerate(images, 1):
            if isinstance(image, BadRequest):
                words = f"image {number} of {len(files)} cannot be read: {image}"
                raise BadRequest(words) from image
            pixels_of_image = image.read()
            assert pixels_of_image is not None
            bitmaps.append(replace(image, pixels=pixels_of_image.tobytes()))
        return bitmaps


def _said(files: Sequence[bytes], decoder: Path, pixels: BinaryIO) -> bytes:
    descriptor = pixels.fileno()
    try:
        return subprocess.run(
            decoder_command(decoder, descriptor), input=b"".join(decoder_input(files)),
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False,
            timeout=_TIME_LIMIT_S, pass_fds=(descriptor,),
        ).stdout  # fmt: skip
    except subprocess.TimeoutExpired as e:
        raise BadRequest(f"decoding the images takes over {_TIME_LIMIT_S:g} s") from e
    except OSError as e:
        raise BadRequest(f"the decoder of images does not start ({e})") from e
