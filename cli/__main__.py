"""The `longleaf` command. Exit status: 0 ok, 1 the job failed, 2 refused or misused, 3 no API to reach."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel, ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cli import prefixes
from cli import up as local
from cli.client import Client, Job, Refused, Unreachable
from cli.doctor import examine
from cli.watch import watch
from cli.words import EXIT_REFUSED, refuse, say, settings_or_refuse
from jobs import Ask, Prompt, Result, State, Summarize

EXIT_FAILED, EXIT_UNREACHABLE, EXIT_INTERRUPTED = 1, 3, 130

_given_key: ContextVar[str | None] = ContextVar("key", default=None)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
keys = typer.Typer(help="API keys: who may use this API from elsewhere.", no_args_is_help=True)
app.add_typer(keys, name="keys")
out = Console()
err = Console(stderr=True)

app.add_typer(prefixes.app, name="prefixes")

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
Data = Annotated[Path | None, typer.Option(help="Data folder (LONGLEAF_DATA).")]


@app.callback()
def options(
    key: Annotated[
        str | None,
        typer.Option(help="API key (LONGLEAF_API_KEY, which other users of this machine do not see)."),
    ] = None,
) -> None:
    """Ask long documents questions on your own machines."""
    _given_key.set(key)


@app.command()
def up(
    data: Data = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on (LONGLEAF_HOST).")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port (LONGLEAF_PORT).")] = None,
    model: Annotated[str | None, typer.Option(help="Model to serve (LONGLEAF_MODEL).")] = None,
) -> None:
    """Run Redis, the API and a worker here until Ctrl-C."""
    given = {"data": data, "host": host, "port": port, "model": model}
    settings = settings_or_refuse().model_copy(update={k: v for k, v in given.items() if v is not None})
    raise typer.Exit(local.up(settings))


@app.command()
def down(data: Data = None) -> None:
    """Stop what `longleaf up` runs on a data folder."""
    raise typer.Exit(local.down(data or settings_or_refuse().data))


@app.command()
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
    with _client() as client:
        common = _common(client, source, model, max_tokens, temperature, top_p, seed, stop, thinking)
        common |= {"expires_after": expires_after, "priority": priority}
        with _valid_spec():
            spec = Summarize(**common) if prompt is None else Prompt(**common, instruction=prompt)
        job = client.submit(spec)
        if not wait:
            print(job.id)
            return
        _finish(client, _watch(client, job.id), as_json=False)


@app.command()
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
    with _client() as client:
        common = _common(client, source, model, max_tokens, temperature, top_p, seed, stop, thinking)
        common |= {"expires_after": expires_after, "priority": priority}
        with _valid_spec():
            spec = Ask(**common, questions=questions)
        job = client.submit(spec)
        _finish(client, _watch(client, job.id), as_json)


@app.command()
def status(job_id: str, as_json: AsJson = False) -> None:
    """Say where a job stands."""
    with _client() as client:
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


@app.command()
def wait(job_id: str) -> None:
    """Watch a job until it ends."""
    with _client() as client:
        job = _watch(client, job_id)
        _fail_unless_succeeded(job)
        print(f"{job.id}: {job.state.value}; `longleaf result {job.id}` prints the result")


@app.command()
def result(job_id: str, as_json: AsJson = False) -> None:
    """Print what a finished job found."""
    with _client() as client:
        _finish(client, client.job(job_id), as_json)


@app.command()
def cancel(job_id: str) -> None:
    """Stop a job."""
    with _client() as client:
        print(f"{job_id}: {client.cancel(job_id).state.value}")


@app.command()
def retry(job_id: str) -> None:
    """Queue a failed, cancelled or expired job again."""
    with _client() as client:
        print(f"{job_id}: {client.retry(job_id).state.value}")


@keys.command("create")
def create_key(
    tenant: Annotated[str, typer.Option(help="Whom the key is for; made where it is not there.")] = "default",
    scope: Annotated[list[str] | None, typer.Option(help="submit, read or admin; may be repeated.")] = None,
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
    _in_api("key_command", "create", f"--tenant={tenant}", f"--name={name}", *scopes, *given)


@keys.command("list")
def list_keys() -> None:
    """Show all keys, without what they are."""
    _in_api("key_command", "list")


@keys.command("revoke")
def revoke_key(key_id: str) -> None:
    """End a key at once."""
    _in_api("key_command", "revoke", key_id)


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="A model folder, or an id whose folder is there.")],
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of prompt and answer; the model's context where absent.")
    ] = None,
    memory: Annotated[str | None, typer.Option(help="Such as 64GB; this machine's where absent.")] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Plan for a machine without a GPU.")] = False,
) -> None:
    """Say how much memory a model needs for a context, and whether it fits."""
    command = [sys.executable, "-m", "worker.plan", "--models-dir", str(settings_or_refuse().models)]
    command += ["--context", str(context)] if context is not None else []
    command += [f"--memory={memory}"] if memory is not None else []
    command += ["--cpu"] if cpu else []
    raise typer.Exit(subprocess.run([*command, "--", model]).returncode)


@app.command()
def backup(file: Annotated[Path, typer.Argument(help="Where the copy goes.")]) -> None:
    """Save the database as one file, also while Longleaf runs."""
    _in_api("backup", "create", str(file))


@app.command()
def restore(file: Annotated[Path, typer.Argument(help="What `longleaf backup` made.")]) -> None:
    """Put a saved database in the place of the present one, which is kept, also while Longleaf runs."""
    _in_api("backup", "restore", str(file))


@app.command()
def doctor() -> None:
    """Check what Longleaf needs here and say what to mend; exit status 1 where it cannot start."""
    marks = {"ok": "[green]ok[/green]  ", "warn": "[yellow]warn[/yellow]", "bad": "[red]bad[/red] "}
    is_bad = False
    for finding in examine(settings_or_refuse()):
        is_bad = is_bad or finding.state == "bad"
        out.print(
            f"{marks[finding.state]} {escape(finding.name)}: {escape(finding.detail)}",
            highlight=False,
            soft_wrap=True,
        )
        if finding.mend:
            out.print(f"     → {finding.mend}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(EXIT_FAILED if is_bad else 0)


@app.command()
def models() -> None:
    """List the models that can be asked for."""
    with _client() as client:
        found = client.models()
    table = Table("model", "context", "", box=None, pad_edge=False)
    for model in found:
        context = model.get("context_tokens")
        notes = [word for word in ("default", "available") if model.get(word)]
        table.add_row(escape(model["id"]), f"{context:,} tokens" if context else "?", ", ".join(notes))
    out.print(table)


def show_result(console: Console, result: Result) -> None:
    """The answers, each with what it cost."""
    for output in result.outputs:
        if output.question is not None:
            console.print(f"[bold]{escape(output.question)}[/bold]")
        if output.thinking is not None:
            console.print(f"[dim]{escape(output.thinking)}[/dim]\n", highlight=False, soft_wrap=True)
        console.print(output.text.strip(), markup=False, highlight=False, soft_wrap=True)
        usage, timing = output.usage, output.timing
        rate = f", {usage.output_tokens / timing.decode_s:,.0f} tokens/s" if timing.decode_s > 0 else ""
        cut = "; cut at the limit, see --max-tokens" if output.finish_reason == "length" else ""
        console.print(
            f"[dim]{usage.prompt_tokens:,} prompt tokens, {usage.cached_tokens:,} of them cached; "
            f"{usage.output_tokens:,} output tokens{rate}; "
            f"first token after {timing.time_to_first_token_s:.2f} s{cut}[/dim]\n",
            highlight=False,
            soft_wrap=True,
        )


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
def _client() -> Iterator[Client]:
    """A client of the API that the settings name; what it raises becomes a message and an exit status."""
    try:
        settings = settings_or_refuse()
        with Client(settings.api_url, key=_given_key.get() or settings.api_key) as client:
            yield client
    except Unreachable as error:
        say(str(error))
        raise typer.Exit(EXIT_UNREACHABLE) from None
    except Refused as error:
        say(f"refused: {error}")
        raise typer.Exit(EXIT_REFUSED) from None


@contextmanager
def _valid_spec() -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        refuse(f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}")


def _in_api(module: str, *words: str) -> None:
    """Run a command of the API on this host's database and end with its exit status."""
    command = [sys.executable, "-m", f"api.{module}", *words]
    env = {**os.environ, "LONGLEAF_DATA": str(settings_or_refuse().data)}
    raise typer.Exit(subprocess.run(command, env=env).returncode)


def _print_json(value: BaseModel) -> None:
    print(value.model_dump_json(indent=2))


def main() -> None:
    app()


if __name__ == "__main__":
    main()
