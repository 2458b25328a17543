"""Takes the images out of a request. A marker in the text stands for each of them.

Files are only collected and fetched here. The engine's process has them decoded
(`offload/images/decoding.py`).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from offload.errors import BadRequest
from offload.images.decoding import MOST_FILE_BYTES, NO_IMAGES
from specoffload.server.api.body import MOST_BYTES
from specoffload.server.engine.messages import TextWithImages
from specoffload.server.fetching import FetchLimits, fetched
from specoffload.session.images import PromptImages

MOST_IMAGES = 64  # in one request
MOST_FETCHES = 4  # files that are fetched at once, for all requests
_FETCHING_S = 30.0  # all files of a request have to be fetched within this time
# llama-server's words
_NO_MEDIA = "Multimodal data provided, but model does not support multimodal requests."


def new_marker() -> str:
    """Return a marker that no text contains by chance, in llama-server's form."""
    return f"<__media_{secrets.token_hex(16)}__>"


@dataclass(frozen=True)
class MediaRules:
    """What requests may name as images.

    `folder` is that of file:// addresses. `urls` says which http addresses are fetched: "none",
    "public" ones, or "all", also those of the machine and of private networks. `marker` stands for
    an image in raw prompts: clients find it in /props, and send prompts with it.
    """

    folder: Path | None = None
    urls: str = "none"
    marker: str = field(default_factory=new_marker)


def text_with_images(
    where: str, given: dict[str, Any], rules: MediaRules, *, are_read: bool
) -> TextWithImages:
    """Return the prompt of an object with `prompt_string` and `multimodal_data`.

    `where` names its place in the request. `are_read`: the model has a projector. Raises BadRequest
    with llama-server's words if it has none, if a file is no base64, or if the text has another
    number of markers than there are files.
    """
    text, data = given.get("prompt_string"), given.get("multimodal_data")
    if not are_read:
        raise BadRequest(_NO_MEDIA)
    if not isinstance(text, str):
        raise BadRequest(f"{where}: prompt_string must be text if there is multimodal_data")
    if not isinstance(data, list) or not all(isinstance(file, str) for file in data):
        raise BadRequest(f"{where}: multimodal_data must be a list of files in base64")
    if len(data) > MOST_IMAGES:
        raise BadRequest(f"{where}: a request may have {MOST_IMAGES} images")
    n_markers = text.count(rules.marker)
    if n_markers != len(data):
        raise BadRequest(
            f"Failed to tokenize prompt: {where} has {n_markers} media markers for {len(data)} "
            f"files, and the marker is {rules.marker} (media_marker of /props)"
        )
    places = (f"{where}.multimodal_data[{at}]" for at in range(len(data)))
    files = tuple(_decoded(place, file) for place, file in zip(places, data, strict=True))
    return TextWithImages(text, PromptImages(rules.marker, files))


class _Remote(NamedTuple):
    """An image that has to be fetched. `where` is its place in messages."""

    where: str
    url: str


class ConversationImages:
    """The images of one conversation, in the order in which its messages have them."""

    def __init__(
        self, rules: MediaRules | None = None, *, are_read: bool, marker: str | None = None
    ) -> None:
        """`are_read`: the model has a projector.

        Without `marker`, a new one is made, which no text can contain, because nobody can guess it.
        """
        self.are_read, self._rules = are_read, rules or MediaRules()
        self._marker = marker or new_marker()
        self._files: list[bytes | _Remote] = []

    async def fetched(self, places: asyncio.Semaphore) -> PromptImages | None:
        """Fetch the images at http addresses, and return all images. None if there are none.

        `places` has a place for each fetch that may run. Raises BadRequest if one fails.
        """
        if not self._files:
            return None
        wanted = {file.url: file for file in self._files if isinstance(file, _Remote)}
        got = await _all_fetched(list(wanted.values()), self._rules, places) if wanted else {}
        files = [got[file.url] if isinstance(file, _Remote) else file for file in self._files]
        if sum(map(len, files)) > MOST_BYTES:
            raise BadRequest(f"the images of a request may have {MOST_BYTES} bytes together")
        return PromptImages(self._marker, tuple(files))

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

    def _file(self, where: str, url: str) -> bytes | _Remote:
        if url.startswith("data:"):
            kind, _, data = url.partition(",")
            if not (kind.startswith("data:image/") and kind.endswith("base64")):
                raise BadRequest(f"{where}: {kind[:80]!r} is not data:image/TYPE;base64")
            return _decoded(where, data)
        if url.startswith("file://"):
            return self._local(where, url.removeprefix("file://"))
        if url.startswith(("http://", "https://")):
            if self._rules.urls == "none":
                raise BadRequest(
                    f"{where}: this server fetches no addresses without --allow-media-urls: send "
                    "the image as data:image/png;base64,..."
                )
            return _Remote(where, url)
        return _decoded(where, url)  # as llama-server takes it

    def _local(self, where: str, name: str) -> bytes:
        if self._rules.folder is None:
            raise BadRequest(
                f"{where}: file:// URLs are not allowed unless --media-path is specified"
            )
        folder = self._rules.folder.resolve()
        try:
            path = (folder / name.lstrip("/")).resolve()
            is_there = path.is_relative_to(folder) and path.is_file()
        except (OSError, ValueError, RuntimeError):  # too long, a NUL, a loop of links
            is_there = False
        if not is_there:
            raise BadRequest(f"{where}: the folder of --media-path has no file {name[:200]!r}")
        try:
            with path.open("rb") as file:
                return file.read(MOST_FILE_BYTES + 1)
        except OSError as e:
            raise BadRequest(f"{where}: {name[:200]!r} cannot be read ({e.strerror})") from e


async def _all_fetched(
    wanted: Sequence[_Remote], rules: MediaRules, places: asyncio.Semaphore
) -> dict[str, bytes]:
    """Return the files at these addresses. The first failure ends the other fetches."""
    limits = FetchLimits(MOST_FILE_BYTES, only_public=rules.urls != "all")
    got: dict[str, bytes] = {}

    async def get(remote: _Remote) -> None:
        async with places:
            if sum(map(len, got.values())) > MOST_BYTES:
                raise BadRequest(f"the images of a request may have {MOST_BYTES} bytes together")
            try:
                got[remote.url] = await fetched(remote.url, limits)
            except BadRequest as e:
                raise BadRequest(f"{remote.where}: the image cannot be fetched: {e}") from e

    try:
        async with asyncio.timeout(_FETCHING_S), asyncio.TaskGroup() as group:
            for remote in wanted:
                group.create_task(get(remote))
    except* BadRequest as e:
        why = e.exceptions[0]
        raise BadRequest(str(why)) from why
    except* TimeoutError as e:
        raise BadRequest(f"fetching the images takes over {_FETCHING_S:g} s") from e
    return got


def _decoded(where: str, data: str) -> bytes:
    try:
        found = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as e:
        raise BadRequest(f"{where}: the image is not base64 ({e})") from e
    if not found:
        raise BadRequest(f"{where}: the image is empty")
    return found
