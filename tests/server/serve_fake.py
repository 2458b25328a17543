"""`specoffload serve` with the fake generator, as a program of its own.

python serve_fake.py PORT LOG GRACE_S [bad-model | crash]
"""

from __future__ import annotations

import sys
from pathlib import Path

from fake_generator import FakeFactory

from specoffload.config.options import ServeOptions
from specoffload.errors import KNOWN, meaning_of
from specoffload.server.run import serve


def main() -> int:
    port, log, grace_s, *how = sys.argv[1:]
    factory = FakeFactory(
        log=Path(log),
        bad_model=how == ["bad-model"],
        abort_if=Path(__file__) if how == ["crash"] else None,
    )

    def say(line: str) -> None:
        print(line, flush=True)

    try:
        return serve(factory, ServeOptions(port=int(port)), grace_s=float(grace_s), say=say)
    except KNOWN as e:
        print(e, file=sys.stderr)
        return meaning_of(e).exit_code


if __name__ == "__main__":
    raise SystemExit(main())
