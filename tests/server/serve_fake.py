"""`specoffload serve` with the fake generator, as a program of its own.

python serve_fake.py PORT LOG [bad-model | crash]
"""

from __future__ import annotations

import sys
from pathlib import Path

from fake_generator import FakeFactory

from specoffload.errors import KNOWN, meaning_of
from specoffload.server.run import serve


def main() -> int:
    port, log, *how = sys.argv[1:]
    factory = FakeFactory(
        log=Path(log),
        bad_model=how == ["bad-model"],
        abort_if=Path(__file__) if how == ["crash"] else None,
    )
    try:
        return serve(factory, port=int(port), grace_s=1.0, say=lambda line: print(line, flush=True))
    except KNOWN as e:
        print(e, file=sys.stderr)
        return meaning_of(e).exit_code


if __name__ == "__main__":
    raise SystemExit(main())
