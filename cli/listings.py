"""`longleaf documents` and `longleaf jobs`: what the API keeps, in pages, and its deletion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from cli.client import Client, Page, Refused
from cli.connection import connected, in_our_words
from cli.figures import ago_iso, size
from cli.words import EXIT_REFUSED, cell, console, say
from jobs import State
from jobs.printable import json_text

documents = typer.Typer(
    help="The documents that the API keeps.", invoke_without_command=True, pretty_exceptions_enable=False
)
jobs = typer.Typer(
    help="The jobs that the API keeps.", invoke_without_command=True, pretty_exceptions_enable=False
)

Limit = Annotated[int, typer.Option(min=1, max=200, help="Items in a page.")]
After = Annotated[str | None, typer.Option(help="Id of the last item seen: the page that follows it.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the API's JSON.")]
Ids = Annotated[list[str], typer.Argument(help="Ids, as the list prints them.")]
ABOUT_CHARS = 60


@documents.callback()
def list_documents_alone(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        list_documents()


@documents.command("list")
def list_documents(limit: Limit = 50, after: After = None, as_json: AsJson = False) -> None:
    """List documents, the newest first."""
    with connected() as client:
        page = client.documents(limit, after)
    table = Table(
        Column("id", no_wrap=True), "name", "tokens", "pages", "size", "added", box=None, pad_edge=False
    )
    for document in page.data:
        counts = list(document["num_tokens"].values())
        table.add_row(
            cell(document["id"]),
            cell(document["name"]),
            f"{counts[0]:,}" if counts else "?",
            str(document["num_pages"] or ""),
            size(document["num_bytes"]),
            ago_iso(document["created_at"]),
        )
    _show(page, table, "documents", as_json)


@documents.command("rm")
def remove_documents(ids: Ids) -> None:
    """Delete documents with their text; one that an unfinished job reads stays."""
    with connected() as client:
        _remove(client, ids, client.delete_document)


@jobs.callback()
def list_jobs_alone(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        list_jobs()


@jobs.command("list")
def list_jobs(
    state: Annotated[State | None, typer.Option(help="Only jobs that are so.")] = None,
    limit: Limit = 50,
    after: After = None,
    as_json: AsJson = False,
) -> None:
    """List jobs, the newest first."""
    with connected() as client:
        page = client.jobs(state, limit, after)
    table = Table(
        Column("id", no_wrap=True), "type", "state", "submitted", "documents", "", box=None, pad_edge=False
    )
    for job in page.data:
        table.add_row(
            cell(job["id"]),
            cell(job["type"]),
            cell(job["state"]),
            ago_iso(job["created_at"]),
            str(len(job["spec"]["documents"])),
            cell(_about(job["spec"])),
        )
    _show(page, table, "jobs", as_json)


@jobs.command("rm")
def remove_jobs(ids: Ids) -> None:
    """Delete jobs that have ended, with their results."""
    with connected() as client:
        _remove(client, ids, client.delete_job)


def _show(page: Page, table: Table, kind: str, as_json: bool) -> None:
    if as_json:
        print(json_text(page.model_dump(mode="json")))
        return
    if not page.data:
        say(f"there are no {kind} here")
        return
    console().print(table)
    if page.has_more:
        say(f"there are more: `longleaf {kind} list --after {page.next}`")


def _remove(client: Client, ids: Sequence[str], delete: Callable[[str], None]) -> None:
    """Delete each; the exit status is that of a refusal where one was refused."""
    is_refused = False
    for id in ids:
        try:
            delete(id)
        except Refused as error:
            is_refused = True
            say(f"refused: {in_our_words(error)}")
        else:
            print(f"{id}: deleted")
    if is_refused:
        raise typer.Exit(EXIT_REFUSED)


def _about(spec: dict[str, Any]) -> str:
    """What is asked, as far as it fits a line."""
    questions = spec.get("questions") or []
    text = str(questions[0] if questions else spec.get("instruction") or spec.get("focus") or "")
    text = text if len(text) <= ABOUT_CHARS else text[: ABOUT_CHARS - 1] + "…"
    return f"{text} (and {len(questions) - 1} more)" if len(questions) > 1 else text
