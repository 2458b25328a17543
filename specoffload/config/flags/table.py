"""Every flag of the program, declared once.

From this table come the commands (`specoffload.config.typer_commands`), the reading of llama.cpp's
variables (`command_line`), the names and ranges of a request's fields (`specoffload.server`), the
checks of what takes effect (`speculation`) and docs/flags.md (`page`).
"""

from specoffload.config.flags import commands, model, offload, sampling, speculation
from specoffload.config.flags.commands import POSITIONALS
from specoffload.config.flags.flag import Flag

TABLE: tuple[Flag, ...] = (
    *model.FLAGS,
    *offload.FLAGS,
    *speculation.FLAGS,
    *sampling.FLAGS,
    *commands.FLAGS,
)

__all__ = ["POSITIONALS", "TABLE"]
