"""Serves a configuration of `bench` in a process of its own, as `specoffload serve` would.

`python -m specoffload.commands.bench_serving FILE --host HOST --port PORT` is that process. FILE
has the configuration, so that no flag has to be written and read again.
"""

from __future__ import annotations

import argparse
import pickle
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from offload.errors import DeviceFailed
from specoffload.bench.llama_server import running_server
from specoffload.chat.conversation import ChatSettings
from specoffload.commands.serve import serve_config
from specoffload.config.options import ServeOptions
from specoffload.config.resolution import Config, for_serving
from specoffload.errors import KNOWN, meaning_of
from specoffload.generation.generation import GenerateOptions


@contextmanager
def serving(config: Config) -> Iterator[str]:
    """Start a server with its engine process, yield its address, and end it after the block.

    Raises DeviceFailed with the last line of its log if it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="specoffload-bench-") as name:
        file, log = Path(name, "config"), Path(name, "log")
        file.write_bytes(pickle.dumps(config))
        is_ready = False
        try:
            command = [sys.executable, "-m", "specoffload.commands.bench_serving", str(file)]
            with running_server(command, log) as (_, port):
                is_ready = True
                yield f"http://127.0.0.1:{port}"
        except DeviceFailed as e:
            if is_ready:
                raise
            lines = log.read_text("utf-8", errors="replace").split("\n")
            last = next((line.strip() for line in reversed(lines) if line.strip()), "")
            raise DeviceFailed(f"the server {str(e).removeprefix('it ')}: {last}") from e


def main() -> None:
    """Serve the configuration in the file that the command line names."""
    reader = argparse.ArgumentParser()
    reader.add_argument("file", type=Path)
    reader.add_argument("--host", required=True)
    reader.add_argument("--port", type=int, required=True)
    words = reader.parse_args()
    config: Config = pickle.loads(words.file.read_bytes())
    own = ServeOptions(host=words.host, port=words.port)
    try:
        serve_config(for_serving(config, own), own, ChatSettings(), GenerateOptions())
    except KNOWN as e:
        print(e, flush=True)  # the last line, after those of the library
        raise SystemExit(meaning_of(e).exit_code) from None


if __name__ == "__main__":
    main()
