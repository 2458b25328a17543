"""Takes the images out of a conversation. A marker in the text stands for each of them.

Files are only collected here. The engine's process has them decoded (`offload/images/decoding.py`).
"""

from __future__ import annotations

import base64
import binascii
import secrets
from pathlib import Path

from offload.errors import BadRequest
from offload.images.decoding import MOST_FILE_BYTES, NO_IMAGES
from specoffload.session.images import PromptImages

MOST_IMAGES = 64  # in one request


class ConversationImages:
    """The images of one conversation, in the order in which its messages have them."""

    def __init__(self, *, are_read: bool, media_path: Path | None) -> None:
        """`are_read`: the model has a projector. `media_path`: folder of file:// addresses."""
        self.are_read, self._media_path = are_read, media_path
        # A text cannot contain the marker, because nobody can guess it.
        self._marker = f"<__media_{secrets.token_hex(16)}__>"
        self._files: list[bytes] = []

    @property
    def found(self) -> PromptImages | None:
        """The images so far, or None if there are none."""
        return PromptImages(self._marker, tuple(self._files)) if self._files else None

    def take(self, where: str, url: str | None) -> str:
        """Return the marker for the image at `url`. `where` names its place in messages.

        Raises BadRequest without a projector, and for an address that is not read.
        """
        if not self.are_read:
            raise BadRequest(NO_IMAGES)
        if not url:
            raise BadRequest(f"{where}: the image has no url")
        if len(self._files) == MOST_IMAGES:
            raise BadRequest(f"{where}: a request may have {MOST_IMAGES} images")
        self._files.append(self._file(where, url))
        return self._marker

    def _file(self, where: str, url: str) -> bytes:
        if url.startswith("data:"):
            kind, _, data = url.partition(",")
            if not (kind.startswith("data:image/") and kind.endswith("base64")):
                raise BadRequest(f"{where}: {kind[:80]!r} is not data:image/TYPE;base64")
            return _decoded(where, data)
        if url.startswith("file://"):
            return self._local(where, url.removeprefix("file://"))
        if url.startswith(("http://", "https://")):
            raise BadRequest(
                f"{where}: this server fetches no addresses: send the image as data:image/png;"
                "base64,..."
            )
        return _decoded(where, url)  # as llama-server takes it

    def _local(self, where: str, name: str) -> bytes:
        if self._media_path is None:
            raise BadRequest(f"{where}: file:// addresses need --media-path FOLDER")
        folder = self._media_path.resolve()
        path = (folder / name.lstrip("/")).resolve()
        if not path.is_relative_to(folder) or not path.is_file():
            raise BadRequest(f"{where}: the folder of --media-path has no file {name[:200]!r}")
        try:
            with path.open("rb") as file:
                return file.read(MOST_FILE_BYTES + 1)
        except OSError as e:
            raise BadRequest(f"{where}: {name[:200]!r} cannot be read ({e.strerror})") from e


def _decoded(where: str, data: str) -> bytes:
    try:
        found = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as e:
        raise BadRequest(f"{where}: the image is not base64 ({e})") from e
    if not found:
        raise BadRequest(f"{where}: the image is empty")
    return found
