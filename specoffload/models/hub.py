"""Fetches models from the Hugging Face hub, or any server that speaks its API (HF_ENDPOINT).

huggingface_hub does the fetching: its cache, its progress bars, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE
are the ones people have set. It is imported only where a name asks for it.
"""

from __future__ import annotations

import difflib
import errno
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from specoffload import report
from specoffload.errors import FetchFailed, UsageError
from specoffload.models.choice import choose, choose_file
from specoffload.models.name import HubName
from specoffload.models.resume import bytes_there, fetch_blob

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

_GIB = 1 << 30


def fetch(name: HubName, *, offline: bool = False, token: str | None = None) -> Path:
    """The model's file, or its first part, on this disk; what is not there is downloaded.

    Raises UsageError for a name that does not exist, FetchFailed for what stands in the way.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    if offline or constants.HF_HUB_OFFLINE:
        cached = cached_model(name)
        if cached is None:
            raise FetchFailed(
                f"{name} is not in {constants.HF_HUB_CACHE}, and nothing is fetched with "
                f"{'--offline' if offline else 'HF_HUB_OFFLINE'}"
            )
        return cached
    try:
        with _in_one_sentence(name, token):
            return _download(name, token)
    except (_Unreachable, LocalEntryNotFoundError) as e:
        cached = cached_model(name)
        if cached is None:
            raise FetchFailed(f"{name} cannot be fetched: {e}") from e
        report.note(f"{e}: {name} as it was fetched before")
        return cached


def cached_model(name: HubName) -> Path | None:
    """The file as it was last fetched, if all of it was."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{name.repo.replace('/', '--')}"
    try:
        commit = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    snapshot = folder / "snapshots" / commit
    files = [str(p.relative_to(snapshot)) for p in sorted(snapshot.rglob("*")) if p.is_file()]
    try:
        return snapshot / _chosen(name, files)[0]
    except UsageError:
        return None


class _Unreachable(FetchFailed):
    """The hub cannot be asked now; what was fetched before may do."""


def _chosen(name: HubName, files: list[str]) -> tuple[str, ...]:
    if name.file:
        return choose_file(files, name.file, name.repo)
    return choose(files, name.quant, name.repo)


def _download(name: HubName, token: str | None) -> Path:
    from huggingface_hub import HfApi, hf_hub_download

    info = HfApi(token=token).model_info(name.repo, files_metadata=True)
    files = _chosen(name, [file.rfilename for file in info.siblings or ()])
    _check_room(name, files, info)
    paths = []
    for file in files:
        fetch_blob(name.repo, file, info.sha, token)
        paths.append(Path(hf_hub_download(name.repo, file, revision=info.sha, token=token)))
    _remember(name, info.sha)
    return paths[0]


def _check_room(name: HubName, files: Sequence[str], info: ModelInfo) -> None:
    """Raises FetchFailed before anything is fetched that the disk cannot hold."""
    from huggingface_hub import constants, try_to_load_from_cache

    missing_bytes = sum(
        (file.size or 0) - (bytes_there(name.repo, file.lfs.sha256) if file.lfs else 0)
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


def _remember(name: HubName, commit: str | None) -> None:
    """Note what `main` was: a commit that is asked for by its number leaves no such note."""
    from huggingface_hub import constants

    note = Path(constants.HF_HUB_CACHE) / f"models--{name.repo.replace('/', '--')}" / "refs/main"
    if commit:
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(commit, encoding="utf-8")


@contextmanager
def _in_one_sentence(name: HubName, token: str | None) -> Iterator[None]:
    """The hub's errors as ours."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        XetDownloadError,
    )

    # The HTTP client's own errors: httpx's with huggingface_hub 1.x, httpx2's with 2.x.
    http_error = HfHubHTTPError.__bases__[0]
    assert issubclass(http_error, Exception)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a full disk, which is looked at before
            yield
    except GatedRepoError as e:
        raise FetchFailed(
            f"{name.repo} is gated: accept its terms at {constants.ENDPOINT}/{name.repo}, and set "
            "HF_TOKEN to a token of yours that may read it"
        ) from e
    except RepositoryNotFoundError as e:
        near = _suggestion(name, token)
        raise UsageError(f"{constants.ENDPOINT} has no repository {name.repo}{near}") from e
    except HFValidationError as e:
        raise UsageError(f"{name.repo}: {e}") from e
    except HfHubHTTPError as e:
        status = e.response.status_code
        kind = _Unreachable if status >= 500 else FetchFailed
        raise kind(f"{constants.ENDPOINT} answered {status}") from e
    except http_error as e:
        why = str(e) or type(e).__name__
        raise _Unreachable(f"{constants.ENDPOINT} cannot be reached ({why})") from e
    except XetDownloadError as e:
        raise _Unreachable(f"the download of {name} broke off ({e}): start it again") from e
    except OSError as e:
        if e.errno in _NO_ROOM:
            raise FetchFailed(
                f"{_NO_ROOM[e.errno]} {constants.HF_HUB_CACHE}: make room and start again, or "
                "have HF_HOME name another; what came stays, and is gone on with"
            ) from e
        raise _Unreachable(f"the download of {name} broke off ({e}): start it again") from e
    except ValueError as e:  # a file beyond plain HTTP's 50 GB without hf_xet, or no hub's answer
        raise FetchFailed(f"{name} cannot be fetched: {' '.join(str(e).split())}") from e


_NO_ROOM = {
    errno.ENOSPC: "there is no room on the disk of",
    errno.EDQUOT: "the quota is used up in",
    errno.EFBIG: "files may not be as large (ulimit -f, or the file system's limit) in",
}


def _suggestion(name: HubName, token: str | None) -> str:
    """The nearest name that the hub knows, as the end of a sentence; "" if it tells of none."""
    owner, _, model = name.repo.partition("/")
    found = [*_ids(token, search=model), *_ids(token, author=owner)]
    near = difflib.get_close_matches(name.repo, found, 1, cutoff=0.3) or found[:1]
    words = f"; did you mean {near[0]}?" if near else ""
    return words + (" (a private one needs HF_TOKEN)" if not words else "")


def _ids(token: str | None, **asked: str) -> list[str]:
    from huggingface_hub import HfApi

    list_models: Callable[..., Iterable[object]] = HfApi(token=token).list_models
    try:
        return [str(getattr(model, "id", "")) for model in list_models(limit=50, **asked)]
    except Exception:  # a suggestion is worth no second error
        return []
