"""The API that a command speaks to, and what becomes of its refusals."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import typer

from cli.client import Client, Refused, Unreachable
from cli.settings import SettingsError
from cli.words import EXIT_REFUSED, OPTIONS, say, settings_or_refuse

EXIT_UNREACHABLE = 3

given_key: ContextVar[str | None] = ContextVar("key", default=None)
"""What `--key` says, before the words of the command."""


@contextmanager
def connected() -> Iterator[Client]:
    """A client of the API that the settings name; what it raises becomes a message and an exit status."""
    try:
        settings = settings_or_refuse()
        with Client(settings.api_url, key=given_key.get() or settings.api_key) as client:
            yield client
    except Unreachable as error:
        say(str(error))
        raise typer.Exit(EXIT_UNREACHABLE) from None
    except SettingsError as error:
        say(str(error))
        raise typer.Exit(EXIT_REFUSED) from None
    except Refused as error:
        say(f"refused: {in_our_words(error)}")
        raise typer.Exit(EXIT_REFUSED) from None


def in_our_words(error: Refused) -> str:
    """A refusal as the command's user reads it: options instead of fields, commands instead of routes."""
    text = re.sub(r"/v1/jobs/(job_\w+)\?wait=\d+", r"`longleaf wait \1`", str(error))
    text = text.replace("max_output_tokens", OPTIONS["max_output_tokens"])
    if error.code == "cannot_think":
        text = text.replace("thinking is true", "--thinking is given")
    return text
