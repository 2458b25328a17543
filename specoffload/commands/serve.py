"""`specoffload serve`: the server over a session that lives in the engine process.

The API process reads no model file and never loads the native library: whatever is wrong with a
file, the engine process says, and an assertion of the library ends that process alone.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from specoffload import report
from specoffload.config.resolution import Config
from specoffload.errors import UsageError
from specoffload.server.run import serve
from specoffload.session.generation import GenerateOptions

if TYPE_CHECKING:
    from specoffload.session.session import Session


def open_session(config: Config) -> Session:
    """Called in the engine process, which alone imports the engine; picklable with its argument."""
    from specoffload.session.session import Session

    return Session(config)


def all_keys(typed: str | None, file: Path | None) -> str | None:
    """Typed keys and those of a file's lines, commas between them; None where there are none.

    Raises UsageError for a file that cannot be read or has no key.
    """
    if file is None:
        return typed
    try:
        lines = file.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"{file}: cannot be read as UTF-8 text ({e})") from e
    if not lines:
        raise UsageError(f"{file} has no key, one of which stands on each line")
    return ",".join(filter(None, (typed, *lines)))


def serve_config(
    config: Config,
    *,
    host: str,
    port: int,
    api_key: str | None,
    max_queue: int,
    defaults: GenerateOptions,
) -> None:
    """Say what was chosen, and serve until stopped; `defaults` are for requests that do not say.

    Raises UsageError where an address or a model cannot be had.
    """
    for reason in (*config.reasons, *config.spec.reasons):
        report.note(reason)
    factory = functools.partial(open_session, config)
    code = serve(
        factory, host, port, api_key, max_queue=max_queue, defaults=defaults, say=report.line
    )
    if code:
        raise SystemExit(code)
