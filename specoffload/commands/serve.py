"""`specoffload serve`: the server over a session that lives in the engine process."""

from __future__ import annotations

import functools

from offload.model import read_facts
from specoffload import report
from specoffload.config.resolution import Config
from specoffload.server.run import serve
from specoffload.session.session import Session


def open_session(config: Config) -> Session:
    """What the engine process builds; picklable together with its configuration."""
    return Session(config)


def serve_config(
    config: Config, *, host: str, port: int, api_key: str | None, max_queue: int
) -> None:
    """Check the files here, where a person sees the sentence, then serve until stopped."""
    read_facts(config.model)
    if config.draft is not None:
        read_facts(config.draft)
    factory = functools.partial(open_session, config)
    code = serve(factory, host, port, api_key, max_queue=max_queue, say=report.line)
    if code:
        raise SystemExit(code)
