"""Fetches models from the Hugging Face hub, or any server that speaks its API (HF_ENDPOINT).

huggingface_hub does the fetching, so its cache, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE apply. It is
imported only if a name refers to the hub.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

from offload.errors import BadModel, OffloadError, TruncatedModel
from offload.model_file import read_facts
from specoffload import report
from specoffload.errors import FetchFailed, SpecOffloadError, UsageError
from specoffload.models.hub_errors import PORTAL, check_variables, in_one_sentence
from specoffload.models.names import HubName, choose, choose_file

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo


_GIB = 1 << 30
_CHUNK_BYTES = 1 << 20
_PARTIAL_CONTENT = 206  # HTTP status
_FIRST_RANGE_BYTES = 4 << 20  # headers with a vocabulary have 2 to 20 MB
_MOST_HEADER_BYTES = 256 << 20
_CHECKED_BYTES = 1 << 30  # a download of more than this takes longer than a check of the headers


def _unchecked(name: HubName, /) -> None:
    """Check nothing before a download."""


def fetch(
    name: HubName,
    *,
    offline: bool = False,
    token: str | None = None,
    header_only: bool = False,
    check: Callable[[HubName], None] = _unchecked,
) -> Path:
    """The path of the model's file or of its first part. Downloads missing files.

    With `header_only`, only the beginning of each missing file is downloaded, and the rest of the
    file at the returned path is a hole. Otherwise `check` is called before a large download, and
    may raise. If anything fails, a file that was fetched before is used, and a note says why.
    Without one, raises UsageError for a name that does not exist, and FetchFailed if the download
    fails.
    """
    check_variables()
    from huggingface_hub import constants

    name = replace(name, repo=_spelled(name.repo))
    cached = cached_model(name)
    if cached is not None and header_only and not _damage(cached):
        return cached
    if offline or constants.HF_HUB_OFFLINE:
        if cached is None:
            raise FetchFailed(
                f"{name} is not in {constants.HF_HUB_CACHE}, and nothing is fetched with "
                f"{'--offline' if offline else 'HF_HUB_OFFLINE'}"
            )
        return _whole(cached)
    try:
        with in_one_sentence(name, token, suggests=cached is None):
            return _download_headers(name, token) if header_only else _download(name, token, check)
    except SpecOffloadError as e:
        if cached is None or not cached.exists():
            raise
        report.note(f"{e}; {name} is used as it was fetched before")
        return _whole(cached)


def _damage(path: Path) -> str:
    """Return a sentence if a cached file is shorter than its header says, else ""."""
    try:
        read_facts(path)
    except TruncatedModel as e:
        return str(e)
    except OffloadError:
        return ""  # the command that opens the file says it
    return ""


def _whole(path: Path) -> Path:
    """Return `path`. Raises FetchFailed if the file is shorter than its header says."""
    if damage := _damage(path):
        raise FetchFailed(f"{damage}: start once with the hub in reach, and the rest is fetched")
    return path


def file_beside(
    name: HubName,
    choose: Callable[[Sequence[str], str], str | None],
    what: str,
    *,
    offline: bool = False,
    token: str | None = None,
) -> HubName | None:
    """The file that `choose` takes for the model `name` from its repository, or None.

    `choose` gets the repository's files, and the model among them or "". `what` names the file in
    a note. One that was fetched before is found without a network. If the hub fails and the model
    was fetched before, the answer is None, and a note says why. Otherwise raises FetchFailed and
    UsageError as `fetch` does.
    """
    from huggingface_hub import constants

    def chosen(files: list[str]) -> HubName | None:
        file = choose(files, _model_in(name, files))
        return None if file is None else HubName(name.repo, file=file, revision=name.revision)

    _, files = hub_snapshot(_folder(name.repo), name.revision)
    if beside := chosen(files):
        return beside
    if offline or constants.HF_HUB_OFFLINE:
        return None
    is_cached = cached_model(name) is not None
    try:
        with in_one_sentence(name, token, suggests=not is_cached):
            info = _listing(name, token)
    except SpecOffloadError as e:
        if not is_cached:
            raise
        report.note(f"{e}; no {what} was looked for there")
        return None
    return chosen([f.rfilename for f in info.siblings or () if f.rfilename.isprintable()])


def _model_in(name: HubName, files: list[str]) -> str:
    """The file of the model `name` among a repository's files, or "" if there is none."""
    with suppress(UsageError):
        return _chosen(name, files)[0]
    return ""


def cached_model(name: HubName) -> Path | None:
    """The path of the file as it was last fetched, or None if it was not fetched completely."""
    snapshot, files = hub_snapshot(_folder(name.repo), name.revision)
    try:
        return snapshot / _chosen(name, files)[0]
    except UsageError:
        return None


def hub_snapshot(folder: Path, revision: str = "") -> tuple[Path, list[str]]:
    """The snapshot of a revision in a repository's folder of the hub's cache, and its files.

    "" is the branch main. There are no files if nothing was fetched, or none may be read.
    """
    try:
        commit = revision
        if not _COMMIT.fullmatch(revision):
            commit = _ref(folder, revision).read_text(encoding="utf-8").strip()
        if not _COMMIT.fullmatch(commit):  # an interrupted write, or a path out of the cache
            return folder, []
        snapshot = folder / "snapshots" / commit
        return snapshot, [
            str(path.relative_to(snapshot))
            for path in sorted(snapshot.rglob("*"))
            if path.is_file()
        ]
    except (OSError, ValueError):
        return folder, []


def _ref(folder: Path, revision: str) -> Path:
    """The file in the hub's cache that has the commit of a branch or a tag."""
    return folder / "refs" / (revision or "main")


def models_folder() -> Path:
    """The folder of the hub's cache, where fetched models are kept. Raises UsageError."""
    check_variables()
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _folder(repo: str) -> Path:
    """The repository's folder in the hub's cache.

    The hub reads names in upper and lower case alike, so a folder in another spelling is used.
    """
    name = f"models--{repo.replace('/', '--')}"
    folder = models_folder() / name
    with suppress(OSError):
        if not folder.exists():
            there = (
                path for path in models_folder().iterdir() if path.name.lower() == name.lower()
            )
            return next(there, folder)
    return folder


def _spelled(repo: str) -> str:
    """The repository's name in the spelling of its folder in the cache, if it has one."""
    spelled = _folder(repo).name.removeprefix("models--").replace("--", "/", 1)
    return spelled if spelled.lower() == repo.lower() else repo


def _chosen(name: HubName, files: list[str]) -> tuple[str, ...]:
    if name.file:
        return choose_file(files, name.file, name.repo)
    return choose(files, name.quant, name.repo)


def _listing(name: HubName, token: str | None, *, has_sizes: bool = False) -> ModelInfo:
    """Ask the hub for a repository's commit and files. Raises FetchFailed for another answer."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HFValidationError

    try:
        return HfApi(token=token).model_info(
            name.repo,
            revision=name.revision or None,
            files_metadata=has_sizes,
            timeout=constants.HF_HUB_ETAG_TIMEOUT,
        )
    except (HFValidationError, UnicodeEncodeError):
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        if isinstance(e, OSError):  # a refusal by the hub
            raise
        raise FetchFailed(f"{constants.ENDPOINT} answered with no list of files: {PORTAL}") from e


def _download(name: HubName, token: str | None, check: Callable[[HubName], None]) -> Path:
    from huggingface_hub import hf_hub_download

    info = _listing(name, token, has_sizes=True)
    commit, files = _listed(name, info)
    _set_damaged_aside(name, files, info)
    if _check_room(name, files, info) > _CHECKED_BYTES:
        check(name)
    paths = []
    for file in files:
        fetch_blob(name.repo, file, commit, token)
        paths.append(Path(hf_hub_download(name.repo, file, revision=commit, token=token)))
        with suppress(OSError):  # in a cache that is only read
            (_headers(name, commit) / file).unlink(missing_ok=True)
    if not _COMMIT.fullmatch(name.revision):
        # Downloads by commit do not write the commit of a branch to the cache.
        _write_ref(_ref(_folder(name.repo), name.revision), commit)
    return paths[0]


def _set_damaged_aside(name: HubName, files: Sequence[str], info: ModelInfo) -> None:
    """Make each cached file whose size differs from the hub's an unfinished download.

    The download resumes from it, and its checksum is compared at the end. Copies that broke off
    leave such files, and so do disks that were full.
    """
    from huggingface_hub import try_to_load_from_cache

    for file in info.siblings or ():
        if file.rfilename not in files or file.lfs is None or not file.size:
            continue
        cached = try_to_load_from_cache(name.repo, file.rfilename, revision=info.sha)
        if not isinstance(cached, str) or not _SHA256.fullmatch(file.lfs.sha256):
            continue
        n_there = Path(cached).stat().st_size
        if n_there != file.size:
            report.note(
                f"{file.rfilename} in {models_folder()} has {n_there} bytes, and the hub's has "
                f"{file.size}: it is fetched again"
            )
            os.replace(Path(cached).resolve(), _partial(_folder(name.repo), file.lfs.sha256))


def _write_ref(ref: Path, commit: str) -> None:
    with suppress(OSError):
        if ref.read_text(encoding="utf-8").strip() == commit:
            return
    ref.parent.mkdir(parents=True, exist_ok=True)
    ref.write_text(commit, encoding="utf-8")


_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHOWN_CHARS = 80


def _listed(name: HubName, info: ModelInfo) -> tuple[str, tuple[str, ...]]:
    """Return the commit that the hub names, and the model's files in its listing.

    Both become parts of paths in the cache, so a hub that lies must not name another folder. Raises
    FetchFailed for a commit that is no SHA-1, and for a file outside of the repository's folder.
    """
    if not isinstance(info.sha, str) or not _COMMIT.fullmatch(info.sha):
        raise FetchFailed(
            f"{name.repo}: the hub names the commit {_shown(info.sha)}, which is not a SHA-1 of 40 "
            "hexadecimal digits: nothing was fetched (HF_ENDPOINT names the hub)"
        )
    listed = [file.rfilename for file in info.siblings or ()]
    files = _chosen(name, [file for file in listed if file.isprintable()])
    for file in files:
        if not _is_inside(file):
            raise FetchFailed(
                f"{name.repo}: the hub lists the file {_shown(file)}, whose name leads out of the "
                "repository's folder: nothing was fetched (HF_ENDPOINT names the hub)"
            )
    return info.sha, files


def _is_inside(file: str) -> bool:
    """True if a file's name is a path below a folder."""
    return "\\" not in file and all(part not in ("", ".", "..") for part in file.split("/"))


def _shown(text: object) -> str:
    """Return text of a hub for a message: controls escaped, and not longer than a line."""
    return repr(text)[:_SHOWN_CHARS]


def _headers(name: HubName, commit: str) -> Path:
    """The folder of files that have only their headers, in the hub's cache."""
    return _folder(name.repo) / "headers" / commit


def _download_headers(name: HubName, token: str | None) -> Path:
    """Download the headers of the model's parts to a folder in the hub's cache."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    info = _listing(name, token)
    commit, files = _listed(name, info)
    folder = _headers(name, commit)
    for file in files:
        path = folder / file
        if path.exists():
            continue
        url = hf_hub_url(name.repo, file, revision=commit)
        size_bytes = get_hf_file_metadata(url, token=token).size or 0
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.incomplete")
        with partial.open("wb") as there:
            _append_header(there, url, token, size_bytes)
            there.truncate(size_bytes)
        os.replace(partial, path)
    return folder / files[0]


def _append_header(there: IO[bytes], url: str, token: str | None, size_bytes: int) -> None:
    """Download the beginning of a GGUF file, in growing ranges until its header is complete.

    Raises BadModel if the file is no GGUF file.
    """
    from offload.ggml.gguf import read_header

    end = _FIRST_RANGE_BYTES
    while True:
        _append(there, url, token, end=min(end, size_bytes))
        there.flush()
        try:
            read_header(Path(there.name), size_bytes)
        except BadModel:
            if end >= min(size_bytes, _MOST_HEADER_BYTES):
                raise
            end *= 2
        else:
            return


def _check_room(name: HubName, files: Sequence[str], info: ModelInfo) -> int:
    """Returns the bytes of the missing files. Raises FetchFailed if the disk has no room."""
    from huggingface_hub import constants, try_to_load_from_cache

    missing_bytes = sum(
        (file.size or 0) - (_bytes_there(name.repo, file.lfs.sha256) if file.lfs else 0)
        for file in info.siblings or ()
        if file.rfilename in files
        and not isinstance(
            try_to_load_from_cache(name.repo, file.rfilename, revision=info.sha), str
        )
    )
    folder = Path(constants.HF_HUB_CACHE)
    free = shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free
    if missing_bytes > free:
        raise FetchFailed(
            f"{name} needs {missing_bytes / _GIB:.1f} GiB more in {folder}, where "
            f"{free / _GIB:.1f} GiB are free: make room, or have HF_HOME name another disk"
        )
    return missing_bytes


_SHA256 = re.compile(r"[0-9a-f]{64}")


def _bytes_there(repo: str, sha256: str) -> int:
    """Number of bytes of a file that an interrupted download has left on the disk."""
    partial = _partial(_folder(repo), sha256)
    return partial.stat().st_size if partial.exists() else 0


def _partial(folder: Path, etag: str) -> Path:
    """The path of an unfinished download. The hub's own tools delete files with this ending."""
    return folder / "blobs" / f"{etag}.resumed.incomplete"


def fetch_blob(repo: str, file: str, commit: str | None, token: str | None) -> None:
    """Download a large file into the hub's cache, resuming an interrupted download.

    Does nothing for files that huggingface_hub should download: small files, and those for Xet. Xet
    is used if HF_XET_HIGH_PERFORMANCE is set, or if the file is too large for plain HTTP. Raises
    FetchFailed if the content differs from the hub's, and errors of huggingface_hub.
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
        if blob.exists():  # downloaded by another process meanwhile
            return
        if _go_on(partial, url, token, size_bytes, file):
            _check(partial, etag, file)
        os.replace(partial, blob)


def _go_on(partial: Path, url: str, token: str | None, size_bytes: int, file: str) -> bool:
    """Download the rest of a file. Returns True if a part of it had been downloaded before.

    Retries after a broken connection if the last try brought new bytes. Redirects are followed
    without the token.
    """
    with partial.open("ab") as there:
        if there.tell() > size_bytes:
            there.truncate(0)
        n_there = there.seek(0, os.SEEK_END)
        with report.progress(Path(file).name) as bar:
            while (n_before := there.tell()) < size_bytes:
                try:
                    _append(there, url, token, lambda n: bar(n / size_bytes))
                except (OSError, FetchFailed):  # disk errors, and refusals by the hub
                    raise
                except Exception:
                    if there.tell() == n_before:
                        raise
                else:
                    if there.tell() == n_before:
                        raise OSError(f"no more than {n_before} of {size_bytes} bytes came")
        if (n_came := there.tell()) != size_bytes:
            there.truncate(0)
            raise FetchFailed(f"{file} should have {size_bytes} bytes, and {n_came} came: {PORTAL}")
    return n_there > 0


def _append(
    there: IO[bytes],
    url: str,
    token: str | None,
    on_size: Callable[[int], None] = lambda _: None,
    end: int | None = None,
) -> None:
    """Append the file's next bytes up to position `end`; None means all of them.

    Starts at the first byte again if the server ignores ranges.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    headers = build_hf_headers(token=token)
    if there.tell() or end is not None:
        headers["Range"] = f"bytes={there.tell()}-{'' if end is None else end - 1}"
    with get_session().stream(
        "GET",
        url,
        headers=headers,
        follow_redirects=True,
        timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
    ) as answer:
        hf_raise_for_status(answer)
        if answer.headers.get("Content-Type", "").startswith("text/html"):
            raise FetchFailed(
                f"{constants.ENDPOINT} answered with a page in place of a file: {PORTAL}"
            )
        if there.tell() and answer.status_code != _PARTIAL_CONTENT:
            there.truncate(0)
            there.seek(0)
        for chunk in answer.iter_bytes(_CHUNK_BYTES):
            there.write(chunk)
            on_size(there.tell())
            if end is not None and there.tell() >= end:
                return


def _check(partial: Path, sha256: str, file: str) -> None:
    """Raises FetchFailed and deletes the file if its SHA-256 differs from the hub's."""
    with partial.open("rb") as there:
        digest = hashlib.file_digest(there, "sha256").hexdigest()
    if digest != sha256:
        partial.unlink()
        raise FetchFailed(
            f"the download of {file} is damaged (SHA-256 {digest[:12]}…, expected "
            f"{sha256[:12]}…): it was removed, start again"
        )
