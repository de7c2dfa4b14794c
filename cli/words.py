"""How every command speaks of what went wrong: one line on stderr, and the exit status 2 of a refusal."""

from __future__ import annotations

import sys

import typer

from cli.settings import Settings, SettingsError, load_settings

EXIT_REFUSED = 2


def settings_or_refuse() -> Settings:
    """The settings of the environment; values that are not accepted end the command."""
    try:
        return load_settings()
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
    print(f"longleaf: {message}", file=sys.stderr)
