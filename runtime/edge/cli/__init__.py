"""The command `edge`: the list of commands, each loaded when it is called, and the one place where errors are printed.

This module imports click and nothing heavier, so that `edge --help` answers at once. One file per command, beside
this one.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from typing import Any

import click

from edge.errors import EdgeError

COMMANDS = {
    "init": "Make a new worker: a handler, its configuration and a test.",
    "dev": "Run the worker on this machine, reloading on save.",
    "models": "List, add and remove models.",
    "usage": "Show the latest model calls, newest first.",
    "bill": "Show what model calls cost, at list price before free allocations.",
    "doctor": "Check that this machine has what is needed.",
}
"""Name (also that of the module and of the command in it) to the one line that `edge --help` shows."""


class Commands(click.Group):
    """A group that imports a command's module when the command is called, and prints every `EdgeError`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order in which one meets them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command `cmd_name`, its module imported now."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f"edge.cli.{cmd_name}"), cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that `args` name.

        Raises:
            click.UsageError: there is none; the nearest one is named.
        """
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            close = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f"did you mean `edge {close[0]}`?" if close else f"there are: {', '.join(COMMANDS)}."
            ctx.fail(f"no such command {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list in `edge --help`, without importing a command."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an `EdgeError` becomes a line on stderr and its exit code, Ctrl-C a quiet 130."""
        try:
            return super().invoke(ctx)
        except EdgeError as error:
            click.echo(f"error: {error.message}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            ctx.exit(130)


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
@click.version_option(package_name="edge-workers-ai", prog_name="edge")
def cli() -> None:
    """Workers AI on your own machine: write a handler, run it, see what its model calls cost.

    `edge COMMAND --help` describes a command. Data goes to stdout, everything else to stderr; the exit code is 0
    when it worked, 1 when it failed and 2 when it was called wrongly.
    """


def main() -> None:
    """The console script `edge`."""
    sys.exit(cli.main(prog_name="edge"))
