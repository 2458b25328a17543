"""`specoffload serve`: the server over a session that lives in the engine process.

The API process reads no model file and never loads the native library: whatever is wrong with a
file, the engine process says, and an assertion of the library ends that process alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from specoffload import report
from specoffload.chat.conversation import ChatSettings
from specoffload.config.options import ServeOptions
from specoffload.config.resolution import Config
from specoffload.server.run import serve
from specoffload.session.generation import GenerateOptions
from specoffload.session.progress import OnProgress, ignore

if TYPE_CHECKING:
    from specoffload.session.session import Session


def open_session(
    config: Config, verbose: bool, library: bool, on_progress: OnProgress = ignore
) -> Session:
    """Called in the engine process, which alone imports the engine; picklable with its arguments.
    `verbose` and `library` are report's."""
    from specoffload.session.session import Session

    if verbose:
        report.be_verbose(library=library)
    return Session(config, on_progress)


def serve_config(
    config: Config,
    serving: ServeOptions,
    chat: ChatSettings,
    defaults: GenerateOptions,
    remarks: Sequence[str] = (),
) -> None:
    """Say what was chosen, and serve until stopped; `defaults` are for requests that do not say.
    `remarks` on the command line are always said.

    Raises UsageError where an address or a model cannot be had.
    """
    for words in remarks:
        report.note(words)
    for reason in (*config.reasons, *config.spec.reasons):
        if reason not in remarks:
            report.detail(reason)
    factory = functools.partial(open_session, config, *report.verbosity())
    code = serve(factory, serving, chat=chat, defaults=defaults, say=report.line)
    if code:
        raise SystemExit(code)
