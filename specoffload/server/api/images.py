"""Takes the images out of a request. A marker in the text stands for each of them.

Files are only collected and fetched here. `api/image_reading.py` has them decoded.

An image of the last turn has to be read. A program sends the images of earlier turns and of its
tools with each later request, so one that cannot be read is left out, and named in the answer.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from offload.errors import BadRequest
from offload.images.decoding import MOST_FILE_BYTES, NO_IMAGES
from offload.regular_file import open_regular
from specoffload.server.api.body import MOST_BYTES
from specoffload.server.engine.messages import TextWithImages
from specoffload.server.fetching import FetchLimits, fetched
from specoffload.session.images import PromptImages

MOST_IMAGES = 64  # in one request
MOST_FETCHES = 4  # files that are fetched at once, for all requests
OMITTED = "[image omitted]"  # what the model reads in place of an image that is left out
_OMITTED_STEP = 16  # by how many images of a history at a time are left out
_ANY_TYPE = ("", "application/octet-stream", "binary/octet-stream")  # of a data URL
_URL_SAFE = str.maketrans("-_", "+/")
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
    files = tuple(from_base64(place, file) for place, file in zip(places, data, strict=True))
    return TextWithImages(text, PromptImages(rules.marker, files))


class _Remote(NamedTuple):
    """An image that has to be fetched. `where` is its place in messages."""

    where: str
    url: str


@dataclass(frozen=True)
class TakenImage:
    """An image of a conversation: its file, or why there is none.

    `where` is its place in messages. `name` is what it is called if it is left out; "" if the
    request has to be refused without it.
    """

    where: str
    name: str
    file: bytes | BadRequest


class ConversationImages:
    """The images of one conversation, in the order in which its messages have them."""

    def __init__(
        self, rules: MediaRules | None = None, *, are_read: bool, marker: str | None = None
    ) -> None:
        """`are_read`: the model has a projector.

        Without `marker`, a new one is made, which no text can contain, because nobody can guess it.
        """
        self.are_read, self._rules = are_read, rules or MediaRules()
        self.marker = marker or new_marker()
        self.left_out: list[str] = []  # names of images that no model without a projector reads
        self.omitted: list[tuple[str, str]] = []  # kinds and places of other files, as in "video"
        self._taken: list[tuple[str, str, bytes | _Remote | BadRequest]] = []

    async def fetched(self, places: asyncio.Semaphore) -> list[TakenImage]:
        """Fetch the images at http addresses, and return all images.

        `places` has a place for each fetch that may run. Raises BadRequest if an image fails that
        the request needs, or if the files that it needs have too many bytes together.
        """
        remotes = [(f, bool(name)) for _, name, f in self._taken if isinstance(f, _Remote)]
        needed = {f.url for f, may_fail in remotes if not may_fail}
        wanted = {f.url: f for f, _ in remotes}
        got: Mapping[str, bytes | BadRequest] = {}
        if wanted:
            got = await _all_fetched(list(wanted.values()), needed, self._rules, places)
        return [
            TakenImage(where, name, got[file.url] if isinstance(file, _Remote) else file)
            for where, name, file in self._taken
        ]

    def take(self, where: str, url: str | None, name: str = "") -> str:
        """Return the marker for the image at `url`. `where` names its place in messages.

        `name` is what the image is called if it can be left out. Raises BadRequest for an image
        that cannot: without a projector, and for an address that is not read.
        """
        if not self.are_read:
            if not name:
                raise BadRequest(NO_IMAGES)
            self.left_out.append(name)
            return OMITTED
        file: bytes | _Remote | BadRequest
        try:
            if not url:
                raise BadRequest(f"{where}: the image has no url")
            file = self._file(where, url.strip())
        except BadRequest as e:
            if not name:
                raise
            file = e
        if not name and sum(not own_name for _, own_name, _ in self._taken) == MOST_IMAGES:
            raise BadRequest(f"{where}: a request may have {MOST_IMAGES} images")
        self._taken.append((where, name, file))
        return self.marker

    def _file(self, where: str, url: str) -> bytes | _Remote:
        scheme = url[:8].lower()
        if scheme.startswith("data:"):
            return _in_data_url(where, url)
        if scheme.startswith("file://"):
            return self._local(where, url[len("file://") :])
        if scheme.startswith(("http://", "https://")):
            if self._rules.urls == "none":
                raise BadRequest(
                    f"{where}: this server fetches no addresses without --allow-media-urls: send "
                    "the image as data:image/png;base64,..."
                )
            return _Remote(where, url)
        return from_base64(where, url)  # as llama-server takes it

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
            with open_regular(path) as file:
                return file.read(MOST_FILE_BYTES + 1)
        except OSError as e:
            raise BadRequest(f"{where}: {name[:200]!r} cannot be read ({e.strerror})") from e


def chosen(images: Sequence[TakenImage]) -> list[TakenImage]:
    """Return the images with an error in place of each file that exceeds the limits of a request.

    The request's own images come first, then those of its history from the last to the first. Old
    ones are left out in steps, so that the beginning of a prompt stays the same for some requests.
    """
    n_needed = sum(not image.name for image in images)
    n_old = len(images) - n_needed
    n_over = max(0, len(images) - MOST_IMAGES)
    n_out = min(n_old, -(-n_over // _OMITTED_STEP) * _OMITTED_STEP)
    old = [at for at, image in enumerate(images) if image.name]
    left_out = set(old[:n_out])
    n_bytes = 0
    order = [at for at, image in enumerate(images) if not image.name] + old[n_out:][::-1]
    for at in order:
        file = images[at].file
        n_bytes += 0 if isinstance(file, BadRequest) else len(file)
        if n_bytes > MOST_BYTES:
            if not images[at].name:
                raise BadRequest(f"the images of a request may have {MOST_BYTES} bytes together")
            left_out.add(at)
            n_bytes -= len(file) if isinstance(file, bytes) else 0
    too_many = BadRequest(f"a request may have {MOST_IMAGES} images of {MOST_BYTES} bytes together")
    return [
        replace(image, file=too_many) if at in left_out else image
        for at, image in enumerate(images)
    ]


async def _all_fetched(
    wanted: Sequence[_Remote], needed: Collection[str], rules: MediaRules, places: asyncio.Semaphore
) -> dict[str, bytes | BadRequest]:
    """Return the files at these addresses, or why there is none.

    The first failure at a `needed` address ends the other fetches, and is raised.
    """
    limits = FetchLimits(MOST_FILE_BYTES, only_public=rules.urls != "all")
    late = BadRequest(f"fetching the images takes over {_FETCHING_S:g} s")
    got: dict[str, bytes | BadRequest] = {remote.url: late for remote in wanted}

    async def get(remote: _Remote) -> None:
        async with places:
            if sum(len(file) for file in got.values() if isinstance(file, bytes)) > MOST_BYTES:
                error = BadRequest(f"the images of a request may have {MOST_BYTES} bytes together")
            else:
                try:
                    got[remote.url] = await fetched(remote.url, limits)
                    return
                except BadRequest as e:
                    error = BadRequest(f"{remote.where}: the image cannot be fetched: {e}")
        if remote.url in needed:
            raise error
        got[remote.url] = error

    try:
        async with asyncio.timeout(_FETCHING_S), asyncio.TaskGroup() as group:
            for remote in sorted(wanted, key=lambda remote: remote.url not in needed):
                group.create_task(get(remote))
    except* BadRequest as e:
        error = e.exceptions[0]
        raise BadRequest(str(error)) from error
    except* TimeoutError as e:
        if any(got[url] is late for url in needed):
            raise late from e
    return got


def _in_data_url(where: str, url: str) -> bytes:
    """Return the bytes of a data URL (RFC 2397). What type of image they are, they say."""
    kind, comma, data = url.partition(",")
    media_type, *parameters = (part.strip() for part in kind[len("data:") :].lower().split(";"))
    is_image = media_type.startswith("image/") or media_type in _ANY_TYPE
    if not comma or not is_image or "base64" not in parameters[-1:]:
        raise BadRequest(f"{where}: {kind[:80]!r} is not data:image/TYPE;base64")
    return from_base64(where, unquote(data) if "%" in data else data)


def from_base64(where: str, data: str) -> bytes:
    """Return the bytes of base64 in any form that programs write.

    It may have line feeds and blanks (RFC 2045), the alphabet for addresses (RFC 4648) and no
    padding, and may be a data URL. Raises BadRequest for anything else.
    """
    data = data.strip()
    if data[:5].lower() == "data:":
        return _in_data_url(where, data)
    packed = "".join(data.split()).translate(_URL_SAFE).rstrip("=")
    try:
        raw = base64.b64decode(packed + "=" * (-len(packed) % 4), validate=True)
    except (binascii.Error, ValueError) as e:
        raise BadRequest(f"{where}: the image is not base64 ({e})") from e
    if not raw:
        raise BadRequest(f"{where}: the image is empty")
    return raw
