"""Downloads that a later process goes on with.

huggingface_hub gives each download a file of a name of its own and removes it when it ends early
(huggingface_hub #4228), so a program that is ended would begin again, and parts of models have up
to 50 GB. Here the file is named by its content's SHA-256, stays, and is asked for from its end on.
It becomes a file of the cache only when it is whole, and what was gone on with only if it has that
SHA-256.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from specoffload.errors import FetchFailed

_SHA256 = re.compile(r"[0-9a-f]{64}")


def bytes_there(repo: str, sha256: str) -> int:
    """Of a file's bytes, those that an earlier download left."""
    partial = _partial(_folder(repo), sha256)
    return partial.stat().st_size if partial.exists() else 0


def _folder(repo: str) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"


def _partial(folder: Path, etag: str) -> Path:
    """Where a download lies until it is whole; the ending is the hub's own: its tools clear it."""
    return folder / "blobs" / f"{etag}.resumed.incomplete"


def fetch_blob(repo: str, file: str, commit: str | None, token: str | None) -> None:
    """Bring a large file into the hub's cache, going on with what is there of it.

    What is small, whole already, or better fetched otherwise (Xet's parallel downloads, where
    HF_XET_HIGH_PERFORMANCE asks for them or plain HTTP ends) is left to huggingface_hub.
    Raises FetchFailed for a content that is not the hub's, and what huggingface_hub raises.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.utils import WeakFileLock

    if isinstance(try_to_load_from_cache(repo, file, revision=commit), str):
        return
    url = hf_hub_url(repo, file, revision=commit)
    about = get_hf_file_metadata(url, token=token)
    etag, size_bytes = about.etag or "", about.size or 0
    folder = _folder(repo)
    partial, blob = _partial(folder, etag), folder / "blobs" / etag
    by_xet = about.xet_file_data is not None and constants.HF_XET_HIGH_PERFORMANCE
    too_large = size_bytes > constants.MAX_HTTP_DOWNLOAD_SIZE
    if not _SHA256.fullmatch(etag) or not size_bytes or by_xet or too_large or blob.exists():
        return
    lock = Path(constants.HF_HUB_CACHE) / ".locks" / folder.name / f"{etag}.lock"
    for needed in (lock.parent, partial.parent):
        needed.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if blob.exists():  # another process was faster
            return
        if _go_on(partial, url, token, size_bytes, file):
            _check(partial, etag, file)
        os.replace(partial, blob)


def _go_on(partial: Path, url: str, token: str | None, size_bytes: int, file: str) -> bool:
    """True if something of it was there before. Redirects are followed without the token."""
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    with partial.open("ab") as there:
        if there.tell() > size_bytes:
            there.truncate(0)
        n_there = there.seek(0, os.SEEK_END)
        http_get(
            url,
            there,
            resume_size=n_there,
            headers=build_hf_headers(token=token),
            expected_size=size_bytes,
            displayed_filename=Path(file).name,
        )
    return n_there > 0


def _check(partial: Path, sha256: str, file: str) -> None:
    """Raises FetchFailed, and removes what lies there, where it is not what the hub has."""
    with partial.open("rb") as there:
        found = hashlib.file_digest(there, "sha256").hexdigest()
    if found != sha256:
        partial.unlink()
        raise FetchFailed(
            f"what came of {file} is not what the hub has (SHA-256 {found[:12]}…, expected "
            f"{sha256[:12]}…): it was removed, start again"
        )
