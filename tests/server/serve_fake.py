"""`specoffload serve` with the fake generator, as a program of its own.

python serve_fake.py PORT LOG GRACE_S [bad-model | crash | LOG_FILE]
"""

from __future__ import annotations

import sys
from pathlib import Path

from fake_generator import FakeFactory

from specoffload.config.options import ServeOptions
from specoffload.errors import KNOWN, meaning_of
from specoffload.server.log import LogSettings, ServerLog
from specoffload.server.run import serve


def main() -> int:
    port, log, grace_s, *how = sys.argv[1:]
    log_file = next((Path(word) for word in how if "/" in word), None)
    factory = FakeFactory(
        log=Path(log),
        bad_model=how == ["bad-model"],
        abort_if=Path(__file__) if how == ["crash"] else None,
    )
    options = ServeOptions(port=int(port), shutdown_timeout_s=float(grace_s))
    try:
        return serve(factory, options, log=ServerLog(LogSettings(log_file, timestamps=False)))
    except KNOWN as e:
        print(e, file=sys.stderr)
        return meaning_of(e).exit_code


if __name__ == "__main__":
    raise SystemExit(main())
