"""Makes typer commands from the table of flags.

typer only shows the help. `command_line` reads the arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperCommand
from typer.main import get_command

from specoffload import __version__, report
from specoffload.config.command_flags import POSITIONALS
from specoffload.config.command_line import HELP, CommandLine, flags_of, read_command_line
from specoffload.config.environment import read_environment
from specoffload.config.flag import OPENS, TITLES, Flag, Panel, full_meaning
from specoffload.config.options import CommandOptions
from specoffload.config.table import TABLE
from specoffload.ctrl_c import EXIT_CODE

_FIRST = "to begin with"
HELP_ALL = "--help-all"
_MORE = "{n} more flags ({panels}): {all}. All names, variables and defaults: docs/flags.md."


def add_command(
    app: typer.Typer, name: str, function: Callable[[CommandLine], None], *, under: str = ""
) -> None:
    """Add the command `name`, which calls `function` with its command line.

    The function's docstring is the command's help. `under` is the name of the command's group, or
    "" for a command without a group.
    """
    command = f"{under} {name}".strip()

    def run(context: typer.Context) -> None:
        report.only_data(context.obj.of(CommandOptions).as_json)
        try:
            function(context.obj)
        except KeyboardInterrupt:
            report.note("interrupted")
            raise typer.Exit(EXIT_CODE) from None
        finally:
            report.only_data(False)

    app.command(
        name,
        help=inspect.getdoc(function),
        cls=_class_for(command),
        options_metavar="[FLAGS]",
        epilog=_more(command),
    )(run)


def _shown_params(command: str) -> list[Any]:
    """The click parameters that the help of `command` shows."""
    parameters = [*_positional(command), *_options(command)]

    def function() -> None: ...

    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {p.name: p.annotation for p in parameters}
    app = typer.Typer(add_completion=False)
    app.command()(function)
    return get_command(app).params


def _in_first_help(command: str, flag: Flag) -> bool:
    """True if the short help of `command` shows `flag`.

    For a command that opens a model, these are the flags that users need first, and the command's
    own. For other commands, these are all flags that are not rare.
    """
    if flag.is_rare or flag.first or command not in OPENS:
        return not flag.is_rare
    return flag.panel in (Panel.COMMAND, Panel.SERVER)


def _more(command: str) -> str | None:
    """The line under the short help that says how many flags it leaves out; None if none."""
    left_out = [flag for flag in flags_of(command) if not _in_first_help(command, flag)]
    if not left_out:
        return None
    panels = ", ".join(p for p in Panel if any(flag.panel is p for flag in left_out))
    return _MORE.format(n=len(left_out), panels=panels, all=HELP_ALL)


def _class_for(command: str) -> type[TyperCommand]:
    class _Command(TyperCommand):
        """A command that reads its arguments by the table, and the environment once.

        Its parameters are made when the help or a completion shows them, because those of all
        commands take longer than everything else at a start.
        """

        _shown: list[Any] | None = None

        @property
        def params(self) -> list[Any]:
            if self._shown is None:
                self._shown = _shown_params(command)
            return self._shown

        @params.setter
        def params(self, _: list[Any]) -> None:
            self._shown = None

        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            before = args[: args.index("--")] if "--" in args else args
            asked = [word for word in before if word in (*HELP, HELP_ALL)]
            if HELP_ALL in asked:
                _print_all(command, self.get_usage(ctx), str(self.help))
                raise typer.Exit
            if asked:
                return super().parse_args(ctx, ["--help"])
            if "--version" in before:
                report.line(f"specoffload {__version__}")
                raise typer.Exit
            if ctx.resilient_parsing:  # True if the shell asks for completions
                _show_all(self)
                return super().parse_args(ctx, args)
            ctx.obj = read_command_line(command, args, read_environment())
            return []

        def get_help_option(self, ctx: Any) -> Any:
            option = super().get_help_option(ctx)
            if option is not None:
                option.hidden = True  # left out, since readers of the help know --help
            return option

    return _Command


def show_all_flags() -> None:
    """Print every flag of all commands once, panel by panel.

    A flag that some commands lack is shown with the commands that have it.
    """
    for panel, title in TITLES.items():
        report.line(f"\n{title}\n")
        for flag in TABLE:
            if flag.panel is panel:
                _print_flag(flag)


def _print_all(command: str, usage: str, about: str) -> None:
    """Print the usage of a command, what it does, and all its flags, panel by panel.

    Each flag has lines of its own. In a table, narrow terminals would cut the names.
    """
    report.line(f"{usage}\n\n{about}")
    flags = flags_of(command)
    for panel, title in TITLES.items():
        own = [flag for flag in flags if flag.panel is panel]
        if own:
            report.line(f"\n{title} ({panel})\n")
        for flag in own:
            _print_flag(flag)


def _print_flag(flag: Flag) -> None:
    names = ", ".join((*flag.names, *flag.off) or flag.variables)
    report.entry(f"{names} {flag.kind.metavar}".rstrip(), full_meaning(flag))


def _show_all(command: TyperCommand) -> None:
    """Show all flags of the command in shell completion."""
    for param in command.params:
        setattr(param, "hidden", False)  # noqa: B010  # typing knows no such field


def _positional(command: str) -> list[inspect.Parameter]:
    """The positional parameters of a command.

    They are hidden if the command opens a model, because the usage line already names them.
    """
    hidden = command in OPENS
    return [
        _parameter(
            f"word_{i}",
            str,
            typer.Argument(metavar=p.metavar, help=p.help, show_default=False, hidden=hidden),
        )
        for i, p in enumerate(POSITIONALS)
        if command in p.commands
    ]


def _options(command: str) -> list[inspect.Parameter]:
    """The parameters of all flags. Those that users need first precede the others, by panel."""
    flags = flags_of(command)
    order = list(Panel)
    rest = sorted((f for f in flags if not f.first), key=lambda f: order.index(f.panel))
    rows = [(_FIRST, flag) for flag in flags if flag.first]
    rows += [(str(flag.panel), flag) for flag in rest]
    return [_option(command, panel, flag) for panel, flag in rows]


def _option(command: str, panel: str, flag: Flag) -> inspect.Parameter:
    """A flag with its first name and its first short name. docs/flags.md has all names."""
    names = (flag.names or flag.off)[:1]
    if flag.is_switch and flag.names and flag.off:
        names = (f"{flag.names[0]}/{flag.off[0]}",)
    default = flag.shown_default
    declared = typer.Option(
        *names,
        *[name for name in flag.names if not name.startswith("--")][:1],
        help=escape(f"{flag.help} (default {default})" if default else flag.help),
        metavar=flag.kind.metavar or " ",
        rich_help_panel=panel,
        hidden=not _in_first_help(command, flag),
        show_default=False,
        autocompletion=_completed(flag) if flag.kind.values else None,
    )
    kind = bool if flag.is_switch else str
    word = names[0].partition("/")[0].strip("-")
    return _parameter(f"flag_{word.replace('-', '_')}", kind, declared)


def _completed(flag: Flag) -> Callable[[str], list[str]]:
    """Return a function that gives a shell the values of `flag` with a beginning."""

    def values(incomplete: str) -> list[str]:
        return [value for value in flag.kind.values if value.startswith(incomplete)]

    return values


def _parameter(name: str, kind: type, declared: Any) -> inspect.Parameter:
    default = False if kind is bool else None
    annotation: Any = Annotated[kind if kind is bool else kind | None, declared]  # type: ignore[valid-type]
    where = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, where, default=default, annotation=annotation)
