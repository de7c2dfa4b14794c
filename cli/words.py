"""How every command speaks of what went wrong: one line on stderr, and the exit status 2 of a refusal."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import typer
from rich.console import Console
from rich.markup import escape

from cli.settings import Settings, SettingsError, load_settings
from jobs.printable import one_line, printable

EXIT_REFUSED = 2
NO_WIDTH = 10_000
OPTIONS = {
    "max_output_tokens": "--max-tokens",
    "expires_after": "--expires-after",
    "documents": "documents",
    "top_p": "--top-p",
    **{
        name: f"--{name}"
        for name in (
            "focus",
            "language",
            "length",
            "model",
            "priority",
            "seed",
            "stop",
            "temperature",
            "thinking",
        )
    },
    "instruction": "--prompt",
}
"""The options of the command that are other words for the API's fields."""


def settings_or_refuse(given: Mapping[str, object] | None = None) -> Settings:
    """The settings, options before the environment; values that are not accepted end the command."""
    try:
        return load_settings(given)
    except SettingsError as error:
        refuse(str(error))
        raise


def refuse(message: str) -> None:
    """End the command.

    Raises:
        typer.Exit: always.
    """
    say(message)
    raise typer.Exit(EXIT_REFUSED)


def say(message: str) -> None:
    print(f"longleaf: {printable(message)}", file=sys.stderr)


def console() -> Console:
    """Standard output; where no terminal shows it, nothing is cut or wrapped to a width."""
    return Console() if sys.stdout.isatty() else Console(width=NO_WIDTH)


def cell(text: str) -> str:
    """Text that somebody else wrote, as a cell of a table or a part of a line that rich prints."""
    return escape(one_line(text))
