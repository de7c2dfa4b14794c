"""`longleaf keys`: made, listed and ended on the API's host, in its database."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.host import in_api

app = typer.Typer(help="API keys: who may use this API from elsewhere.", no_args_is_help=True)


@app.command()
def create(
    tenant: Annotated[str, typer.Option(help="Whom the key is for; made where it is not there.")] = "default",
    scope: Annotated[
        list[str] | None, typer.Option(help="submit, read or admin, may be repeated; or worker.")
    ] = None,
    name: Annotated[str, typer.Option(help="What you call the key.")] = "",
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="Limit of the key.")] = None,
    max_queued_jobs: Annotated[int | None, typer.Option(min=1, help="Limit of its tenant's jobs.")] = None,
    max_document_bytes: Annotated[int | None, typer.Option(min=1, help="Limit of its tenant's.")] = None,
) -> None:
    """Make a key and print it, once: only its hash is kept."""
    scopes = [word for one in scope or [] for word in ("--scope", one)]
    limits = {
        "requests-per-minute": requests_per_minute,
        "max-queued-jobs": max_queued_jobs,
        "max-document-bytes": max_document_bytes,
    }
    given = [f"--{limit}={value}" for limit, value in limits.items() if value is not None]
    in_api("key_command", "create", f"--tenant={tenant}", f"--name={name}", *scopes, *given)


@app.command("list")
def list_() -> None:
    """Show all keys, without what they are."""
    in_api("key_command", "list")


@app.command()
def revoke(key_id: str) -> None:
    """End a key at once."""
    in_api("key_command", "revoke", key_id)
