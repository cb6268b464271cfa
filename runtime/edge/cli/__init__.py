"""The command `edge`: the list of commands, each loaded when it is called, and the one place where errors are printed.

This module imports click and nothing heavier, so that `edge --help` answers at once. One file per command, beside
this one.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import sys
from typing import Any

import click

from edge.errors import EdgeError

COMMANDS = {
    "init": "Make a new worker: a handler, its configuration and a test.",
    "dev": "Run workers on this machine, reloading on save.",
    "serve": "Serve workers and the API to others, with tokens.",
    "tokens": "Create, list and revoke the tokens of the API.",
    "models": "List, add and remove models.",
    "kv": "Read and write KV namespaces.",
    "d1": "Run SQL and migrations on D1 databases.",
    "r2": "Read and write R2 buckets.",
    "usage": "Show the latest model calls, newest first.",
    "bill": "Show what model calls cost, at list price before free allocations.",
    "errors": "Show the errors of the API, or what one CODE means.",
    "doctor": "Check that this machine has what is needed.",
}
"""Name (also that of the module and of the command in it) to the one line that `edge --help` shows."""


_OTHER_WORDS = {
    "create": "init",
    "new": "init",
    "run": "dev",
    "start": "dev",
    "ls": "list",
    "download": "add",
    "get": "add",
    "install": "add",
    "pull": "add",
    "delete": "rm",
    "remove": "rm",
    "uninstall": "rm",
}
"""What other programs call it, to what it is called here."""


class Group(click.Group):
    """A group of commands that names the nearest one where there is none of that name."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that `args` name.

        Raises:
            click.UsageError: there is none; the nearest one is named.
        """
        names = self.list_commands(ctx)
        if args[0] not in names and not args[0].startswith("-"):
            close = [name for name in (_OTHER_WORDS.get(args[0]),) if name in names]
            close += difflib.get_close_matches(args[0], names, n=1)
            hint = f"did you mean `{ctx.command_path} {close[0]}`?" if close else f"there are: {', '.join(names)}."
            ctx.fail(f"no such command {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)


class Commands(Group):
    """The group that imports a command's module when the command is called, and prints every `EdgeError`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order in which one meets them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command `cmd_name`, its module imported now."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f"edge.cli.{cmd_name}"), cmd_name)
        return command

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
        except UnicodeEncodeError as error:
            click.echo(f"error: {error.object!r} is no text in UTF-8, as names and paths have to be", err=True)
            ctx.exit(2)


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
    try:
        try:
            cli.main(prog_name="edge")
        finally:
            print(end="", flush=True)  # where there is a stdout
    except OSError as error:  # the disk behind stdout is full, for example, or nobody reads it any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left of it is not tried again
        if error.errno != errno.EPIPE:
            click.echo(f"error: {error}", err=True)
        sys.exit(1)
