"""Every flag of the program, declared once.

From this table come the commands (`specoffload.config.typer_commands`), the reading of llama.cpp's
variables (`command_line`), the names and ranges of a request's fields (`specoffload.server`), the
checks of what takes effect (`speculation`) and docs/flags.md (`page`).
"""

from specoffload.config.flags import (
    commands,
    ik_llama,
    llama,
    llama_server,
    llama_tools,
    model,
    offload,
    sampling,
    speculation,
)
from specoffload.config.flags.commands import POSITIONALS
from specoffload.config.flags.flag import Flag
from specoffload.config.flags.foreign import Foreign

TABLE: tuple[Flag, ...] = (
    *model.FLAGS,
    *offload.FLAGS,
    *speculation.FLAGS,
    *sampling.FLAGS,
    *commands.FLAGS,
)

FOREIGN: tuple[Foreign, ...] = (
    *llama.FOREIGN,
    *llama_server.FOREIGN,
    *ik_llama.FOREIGN,
    *llama_tools.FOREIGN,
)

__all__ = ["FOREIGN", "POSITIONALS", "TABLE"]
