"""`specoffload serve`: runs the server, with its session in the engine process.

The API process reads no model file and never loads the native library. So the engine process
reports what is wrong with a file, and a failed assertion in the library ends only that process.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

from offload.notes import OnProgress
from specoffload import report
from specoffload.chat.conversation import ChatSettings
from specoffload.config.options import ServeOptions
from specoffload.config.resolution import DEMO_WORDS, Config
from specoffload.errors import KNOWN
from specoffload.generation.generation import GenerateOptions, ignore
from specoffload.server.log import LogSettings, ServerLog
from specoffload.server.run import serve
from specoffload.server.unwaited import never_wait_for_output
from specoffload.slots.prompt_shelf import PromptShelf

if TYPE_CHECKING:
    from specoffload.session.session import Session


class ServedAs(NamedTuple):
    """How a command line of `serve` opens its model, and what its requests have by default."""

    config: Config
    chat: ChatSettings
    defaults: GenerateOptions


def open_session(
    config: Config,
    verbose: bool,
    library_level: int,
    log: LogSettings,
    on_progress: OnProgress = ignore,
    shelf: PromptShelf | None = None,
) -> Session:
    """Open the session in the engine process. The function and its arguments can be pickled.

    The engine is imported here, so that only that process loads it. `verbose` and `library_level`
    are settings of `report`. `shelf` has the prompts of the model's last session.
    """
    from specoffload.session.session import Session

    never_wait_for_output()
    if verbose:
        report.be_verbose(library_level=library_level)
    ServerLog(log).follow_warnings()
    return Session(config, on_progress, shelf=shelf)


def serve_config(
    config: Config,
    serving: ServeOptions,
    chat: ChatSettings,
    defaults: GenerateOptions,
) -> None:
    """Print the choices made, and serve until stopped. Raises SystemExit with a non-zero exit code.

    `defaults` apply to options that a request lacks.
    Raises UsageError if the address or the model cannot be used.
    """
    never_wait_for_output()
    settings = LogSettings(serving.log_file, serving.log_timestamps, serving.log_prefix)
    log = ServerLog(settings)
    log.follow_warnings()
    for words in (*config.notes, *((DEMO_WORDS,) if config.is_demo else ())):
        log.note(words)
    factory = functools.partial(
        open_session, config, report.is_verbose(), report.library_log_level(), settings
    )
    workers = config.remote.workers if config.uses_workers else ()
    name = report.plain(config.alias or config.model.stem)
    try:
        code = serve(
            *(factory, serving),
            chat=chat,
            defaults=defaults,
            workers=workers,
            name=name,
            log=log,
        )
    except KNOWN as e:
        log.error(e)
        raise
    if code:
        raise SystemExit(code)
