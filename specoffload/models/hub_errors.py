"""Turns the errors of the hub, the network and the cache's disk into one sentence each."""

from __future__ import annotations

import difflib
import errno
import importlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from specoffload.errors import FetchFailed, UsageError
from specoffload.models.names import HubName

_NO_ROOM = {
    errno.ENOSPC: "there is no room on the disk of",
    errno.EDQUOT: "the quota is used up in",
    errno.EFBIG: "files may not be as large (ulimit -f, or the file system's limit) in",
}
_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)
_NO_FOLDER = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST)
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)
_UNAUTHORISED, _FORBIDDEN, _PROXY_LOGIN, _TOO_MANY = 401, 403, 407, 429  # HTTP statuses
_SERVER_ERRORS = 500  # and above
_SHOWN_CHARS = 120
PORTAL = "a login page of the network, or a proxy, may answer in its place"


def check_variables() -> None:
    """Raise UsageError if huggingface_hub cannot be imported because of a variable's value."""
    try:
        importlib.import_module("huggingface_hub.constants")
    except ValueError as e:
        raise UsageError(
            f"HF_ENDPOINT or another variable of huggingface_hub cannot be used: {e}"
        ) from e


@contextmanager
def in_one_sentence(name: HubName, token: str | None, *, suggests: bool) -> Iterator[None]:
    """Turn errors of huggingface_hub and OSError into FetchFailed, or UsageError for a wrong name.

    `suggests`: ask the hub for a similar name if there is no repository of this name.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        FileMetadataError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
        XetDownloadError,
    )

    # The HTTP client's own errors: httpx's with huggingface_hub 1.x, httpx2's with 2.x.
    http_error = HfHubHTTPError.__bases__[0]
    assert issubclass(http_error, Exception)
    client = importlib.import_module(http_error.__module__.partition(".")[0])
    hub = constants.ENDPOINT

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a full disk, which was checked before
            yield
    except GatedRepoError as e:
        raise FetchFailed(
            f"{name.repo} is gated: accept its terms at {hub}/{name.repo}, and set "
            "HF_TOKEN to a token of yours that may read it"
        ) from e
    except RepositoryNotFoundError as e:
        near = _suggestion(name, token) if suggests else ""
        if not near and (source := token_source(token)):
            near = f", or {source} is expired or may not read it"
        raise UsageError(f"{hub} has no repository {name.repo}{near or _PRIVATE}") from e
    except RevisionNotFoundError as e:
        raise UsageError(f"{hub}/{name.repo} has no revision {name.revision}") from e
    except RemoteEntryNotFoundError as e:
        raise FetchFailed(f"{name} cannot be fetched: {hub} has no such file") from e
    except HFValidationError as e:
        raise UsageError(f"{name.repo}: {e}") from e
    except HfHubHTTPError as e:
        status = e.response.status_code
        words = status_words(status, token_source(token), e.server_message or "")
        raise FetchFailed(f"{hub} answered {status}{words}") from e
    except (http_error, client.InvalidURL) as e:
        if isinstance(e, client.LocalProtocolError):  # its words show the token
            source = token_source(token) or "the token"
            raise FetchFailed(f"{source} has letters that no token has: copy it again") from None
        reason = str(e) or type(e).__name__
        if "CERTIFICATE_VERIFY_FAILED" in reason:
            reason += "; SSL_CERT_FILE can name your network's certificates"
        raise FetchFailed(f"{hub} cannot be reached ({reason})") from e
    except XetDownloadError as e:
        raise FetchFailed(f"the download of {name} broke off ({e}): start it again") from e
    except LocalEntryNotFoundError as e:
        if isinstance(e.__cause__, FileMetadataError):
            raise FetchFailed(f"{hub} did not answer as a hub does: {PORTAL}") from e
        raise FetchFailed(f"{name} cannot be fetched: {' '.join(str(e).split())}") from e
    except OSError as e:
        raise FetchFailed(_disk_words(name, e, Path(constants.HF_HUB_CACHE))) from e
    except UnicodeEncodeError as e:  # a header of the request cannot carry the token
        source = token_source(token) or "the token"
        raise FetchFailed(f"{source} has letters that no token has: copy it again") from e
    # A file beyond plain HTTP's 50 GB without hf_xet, or a proxy of an unknown kind.
    except (ValueError, ImportError) as e:
        raise FetchFailed(f"{name} cannot be fetched: {' '.join(str(e).split())}") from e


def status_words(status: int, source: str, said: str) -> str:
    """Return what a refusal by the hub means, and what to do.

    `source` names the token that was sent, "" for none. `said` is the hub's own message. Pure.
    """
    words = ""
    if status == _UNAUTHORISED and source:
        words = (
            f": {source} is expired or invalid: replace it, or remove it (public models need no "
            "token)"
        )
    elif status == _UNAUTHORISED:
        words = ": it asks for a token: set HF_TOKEN to one of yours"
    elif status == _FORBIDDEN:
        token = f"{source} may not read it, or " if source else ""
        words = f": {token}your network blocks it"
    elif status == _PROXY_LOGIN:
        words = ": the proxy asks for a password (HTTPS_PROXY=http://NAME:PASSWORD@HOST:PORT)"
    elif status == _TOO_MANY:
        more = "" if source else ", or set HF_TOKEN, whose limit is higher"
        words = f" (too many requests): wait some minutes{more}"
    elif status >= _SERVER_ERRORS:
        words = " (a fault of its own): try again later"
    shown = "".join(letter for letter in said if letter.isprintable())[:_SHOWN_CHARS]
    return f"{words} (it says: {shown})" if shown else words


def token_source(token: str | None) -> str:
    """Name the token that requests send; "" if they send none."""
    from huggingface_hub import constants, get_token

    if token is not None:
        return "the token of --hf-token"
    if not (there := get_token()):
        return ""
    with suppress(OSError, UnicodeDecodeError):
        if Path(constants.HF_TOKEN_PATH).read_text(encoding="utf-8").strip() == there:
            return f"the token in {constants.HF_TOKEN_PATH}"
    return "the token in HF_TOKEN"


def _disk_words(name: HubName, error: OSError, folder: Path) -> str:
    reason = error.strerror or str(error)
    if error.errno in _NO_ROOM:
        return (
            f"{_NO_ROOM[error.errno]} {folder}: make room and start again, or "
            "have HF_HOME name another; the next start resumes the download"
        )
    if error.errno in _NO_LOCKS:
        return (
            f"{folder}, where models are kept, lies on a file system without locks ({reason}): "
            "have HF_HOME name a folder on another"
        )
    is_there = error.filename is not None and Path(str(error.filename)).is_relative_to(folder)
    if error.errno in _NOT_WRITABLE or (error.errno in _NO_FOLDER and is_there):
        return (
            f"{folder}, where models are kept, cannot be written ({reason}): have HF_HOME name a "
            "folder that you may write to"
        )
    return f"the download of {name} broke off ({error}): start it again"


_PRIVATE = " (a private one needs HF_TOKEN)"


def _suggestion(name: HubName, token: str | None) -> str:
    """The end of an error message: the most similar name on the hub, or ""."""
    owner, _, model = name.repo.partition("/")
    ids = [*_ids(token, search=model), *_ids(token, author=owner)]
    near = difflib.get_close_matches(name.repo, ids, 1, cutoff=0.3) or ids[:1]
    return f"; did you mean {near[0]}?" if near else ""


def _ids(token: str | None, **asked: str) -> list[str]:
    from huggingface_hub import HfApi

    list_models: Callable[..., Iterable[object]] = HfApi(token=token).list_models
    try:
        return [str(getattr(model, "id", "")) for model in list_models(limit=50, **asked)]
    except Exception:  # any error, since a suggestion is optional
        return []
