"""`longleaf webhooks`: the secret that signs callbacks, asked of the API and exchanged there."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.client import WebhookSecret
from cli.connection import connected
from cli.words import say

app = typer.Typer(help="The secret that signs the callbacks of a key's tenant.", no_args_is_help=True)


@app.command()
def secret() -> None:
    """Print the secret."""
    with connected() as client:
        _show(client.webhook_secret())


@app.command()
def rotate(
    overlap: Annotated[
        int, typer.Option(min=0, help="Seconds for which the secret so far signs too; 0 where it has leaked.")
    ] = 86_400,
) -> None:
    """Exchange the secret for another one and print it."""
    with connected() as client:
        _show(client.rotate_webhook_secret(overlap))


def _show(found: WebhookSecret) -> None:
    print(found.secret)
    if found.old_until is not None:
        say(f"the secret before signs as well until {found.old_until}")
