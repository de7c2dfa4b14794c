"""The commands that speak to the API: send jobs, watch them, print what came of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel, ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cli.client import Client, Job
from cli.connection import connected
from cli.results import show_result
from cli.watch import watch
from cli.words import refuse, say
from jobs import Ask, Prompt, State, Summarize

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130

out = Console()
err = Console(stderr=True)

Model = Annotated[str | None, typer.Option(help="Model id; the server's default where absent.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Limit of each answer.")]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token each time.")]
TopP = Annotated[float, typer.Option("--top-p", help="Draw from the likeliest tokens of this share.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same answer.")]
Stop = Annotated[list[str] | None, typer.Option(help="Ends an answer before this text; may be repeated.")]
Thinking = Annotated[bool, typer.Option("--thinking", help="Let a model that can think before it answers.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the API's JSON.")]
ExpiresAfter = Annotated[int | None, typer.Option(min=1, help="Seconds until an unfinished job expires.")]
Priority = Annotated[str, typer.Option(help="high, normal or low: who waits for whom.")]
Source = Annotated[str, typer.Argument(help="A file (text, Markdown, PDF) or a document id.")]


def submit(
    source: Source,
    summarize: Annotated[bool, typer.Option("--summarize", help="Summarise it (the default).")] = False,
    prompt: Annotated[str | None, typer.Option(help="Your own instruction instead.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Watch the job and print its result.")] = False,
    model: Model = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    stop: Stop = None,
    thinking: Thinking = False,
    expires_after: ExpiresAfter = None,
    priority: Priority = "normal",
) -> None:
    """Send a job over a document and print the job's id."""
    if summarize and prompt is not None:
        refuse("--summarize and --prompt exclude each other")
    with connected() as client:
        common = _common(client, source, model, max_tokens, temperature, top_p, seed, stop, thinking)
        common |= {"expires_after": expires_after, "priority": priority}
        with _valid_spec():
            spec = Summarize(**common) if prompt is None else Prompt(**common, instruction=prompt)
        job = client.submit(spec)
        if not wait:
            print(job.id)
            return
        _finish(client, _watch(client, job.id), as_json=False)


def ask(
    source: Source,
    questions: Annotated[list[str], typer.Argument(help="One or more questions.")],
    model: Model = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    stop: Stop = None,
    thinking: Thinking = False,
    expires_after: ExpiresAfter = None,
    priority: Priority = "normal",
    as_json: AsJson = False,
) -> None:
    """Ask questions about a document and print the answers."""
    with connected() as client:
        common = _common(client, source, model, max_tokens, temperature, top_p, seed, stop, thinking)
        common |= {"expires_after": expires_after, "priority": priority}
        with _valid_spec():
            spec = Ask(**common, questions=questions)
        job = client.submit(spec)
        _finish(client, _watch(client, job.id), as_json)


def warm(
    source: Source,
    model: Model = None,
    thinking: Annotated[
        bool,
        typer.Option("--thinking", help="For jobs that let the model think, where its prompt says so first."),
    ] = False,
    wait: Annotated[bool, typer.Option(help="Watch it until its prefix is stored.")] = True,
) -> None:
    """Read a document on a worker and store its prefix, so that the first question needn't wait for it."""
    with connected() as client:
        job = client.warm([_document_id(client, source)], model, thinking)
        if not wait:
            print(job.id)
            return
        _fail_unless_succeeded(_watch(client, job.id))
        found = client.result(job.id)
    if found.prefix_id is None:
        say("nothing is stored: under 192 tokens are not, and the worker's log says where there was no room")
        raise typer.Exit(EXIT_FAILED)
    usage = found.usage
    print(f"{found.prefix_id}: {usage.prompt_tokens:,} tokens, {usage.cached_tokens:,} of them before")


def status(job_id: str, as_json: AsJson = False) -> None:
    """Say where a job stands."""
    with connected() as client:
        job = client.job(job_id)
    if as_json:
        _print_json(job)
        return
    line = f"{job.id}: {job.type}, {job.state.value}"
    if job.progress is not None and not job.ended:
        progress = job.progress
        line += f", {progress.phase} {progress.num_done:,}/{progress.num_total:,} tokens"
        line += f", {progress.tokens_per_s:,.0f} tokens/s"
    if job.attempt > 1:
        line += f", attempt {job.attempt}"
    print(line)
    if job.error is not None:
        print(f"{job.error.code}: {job.error.detail}")


def wait(job_id: str) -> None:
    """Watch a job until it ends."""
    with connected() as client:
        job = _watch(client, job_id)
        _fail_unless_succeeded(job)
        print(f"{job.id}: {job.state.value}; `longleaf result {job.id}` prints the result")


def result(job_id: str, as_json: AsJson = False) -> None:
    """Print what a finished job found."""
    with connected() as client:
        _finish(client, client.job(job_id), as_json)


def cancel(job_id: str) -> None:
    """Stop a job."""
    with connected() as client:
        print(f"{job_id}: {client.cancel(job_id).state.value}")


def retry(job_id: str) -> None:
    """Queue a failed, cancelled or expired job again."""
    with connected() as client:
        print(f"{job_id}: {client.retry(job_id).state.value}")


def models() -> None:
    """List the models that can be asked for."""
    with connected() as client:
        found = client.models()
    table = Table("model", "context", "", box=None, pad_edge=False)
    for model in found:
        context = model.get("context_tokens")
        notes = [word for word in ("default", "available") if model.get(word)]
        table.add_row(escape(model["id"]), f"{context:,} tokens" if context else "?", ", ".join(notes))
    out.print(table)


def _finish(client: Client, job: Job, as_json: bool) -> None:
    _fail_unless_succeeded(job)
    found = client.result(job.id)
    if as_json:
        _print_json(found)
    else:
        show_result(out, found)


def _fail_unless_succeeded(job: Job) -> None:
    if job.state is State.SUCCEEDED:
        return
    if not job.ended:
        refuse(f"{job.id} is {job.state.value}; `longleaf wait {job.id}` watches it")
    reason = f": {job.error.detail}" if job.error is not None else ""
    say(f"{job.id} {job.state.value}{reason}")
    raise typer.Exit(EXIT_FAILED)


def _watch(client: Client, job_id: str) -> Job:
    try:
        return watch(client, job_id, err)
    except KeyboardInterrupt:
        say(f"the job goes on; `longleaf wait {job_id}` watches it, `longleaf cancel {job_id}` stops it")
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _common(
    client: Client,
    source: str,
    model: str | None,
    max_tokens: int,
    temperature: float,
    top_p: float,
    seed: int | None,
    stop: list[str] | None,
    thinking: bool,
) -> dict[str, Any]:
    """The fields that every type of job has."""
    return {
        "documents": [_document_id(client, source)],
        "model": model,
        "max_output_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "stop": stop or [],
        "thinking": thinking,
    }


def _document_id(client: Client, source: str) -> str:
    path = Path(source)
    if path.is_file():
        return client.upload(path).id
    if path.exists() or not re.fullmatch(r"doc_[0-9A-Za-z]+", source):
        refuse(f"{source} is neither a file nor a document id (doc_...)")
    return source


@contextmanager
def _valid_spec() -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        refuse(f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}")


def _print_json(value: BaseModel) -> None:
    print(value.model_dump_json(indent=2))
