"""The commands that speak to the API: send jobs, watch them, print what came of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from pydantic import BaseModel, ValidationError
from rich.console import Console
from rich.table import Table

from cli.client import Client, Job
from cli.connection import connected
from cli.results import show_result
from cli.sources import document_ids, is_document
from cli.watch import watch
from cli.words import OPTIONS, cell, console, refuse, say
from jobs import Ask, Prompt, State, Summarize
from jobs.faults import field_path, told
from jobs.printable import json_text, printable

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130
LONG_TOKENS = 1024
"""Of a long summary, where no other limit is given."""

Model = Annotated[str | None, typer.Option(help="Model id; the server's default where absent.")]
MaxTokens = Annotated[
    int | None, typer.Option("--max-tokens", min=1, help="Limit of each answer; 512 where absent.")
]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token each time.")]
TopP = Annotated[float, typer.Option("--top-p", help="Draw from the likeliest tokens of this share.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same answer.")]
Stop = Annotated[list[str] | None, typer.Option(help="Ends an answer before this text; may be repeated.")]
Thinking = Annotated[bool, typer.Option("--thinking", help="Let a model that can think before it answers.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the API's JSON.")]
ExpiresAfter = Annotated[int | None, typer.Option(min=1, help="Seconds until an unfinished job expires.")]
Priority = Annotated[str, typer.Option(help="high, normal or low: who waits for whom.")]
Language = Annotated[
    str | None,
    typer.Option(help="Language of the answer, such as German or de; the model's choice where absent."),
]
Name = Annotated[str | None, typer.Option(help="What to call a document that comes through a pipe.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print no progress.")]
Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="DOCUMENT...", help="Files (text, Markdown, PDF), - for standard input, or document ids."
    ),
]


def submit(
    sources: Sources,
    summarize: Annotated[bool, typer.Option("--summarize", help="Summarise them (the default).")] = False,
    focus: Annotated[str | None, typer.Option(help="What the summary is to pay attention to.")] = None,
    length: Annotated[
        str | None, typer.Option(help="Of the summary: short, medium (the default) or long.")
    ] = None,
    language: Language = None,
    prompt: Annotated[str | None, typer.Option(help="Your own instruction instead.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Watch the job and print its result.")] = False,
    name: Name = None,
    model: Model = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    stop: Stop = None,
    thinking: Thinking = False,
    expires_after: ExpiresAfter = None,
    priority: Priority = "normal",
    quiet: Quiet = False,
) -> None:
    """Send a job over one document, or several together, and print the job's id."""
    if prompt is not None:
        of_summary = {"--summarize": summarize or None, "--focus": focus, "--length": length}
        given = [
            option for option, value in (of_summary | {"--language": language}).items() if value is not None
        ]
        if given:
            refuse(
                f"{given[0]} is for a summary, and --prompt asks for something else: leave one of them out"
            )
    limit = max_tokens or (LONG_TOKENS if length == "long" else None)
    common = _common(sources, model, limit, temperature, top_p, seed, stop, thinking, expires_after, priority)
    with _valid_spec():
        spec: Summarize | Prompt
        if prompt is None:
            common |= {"focus": focus, "language": language, "length": "medium" if length is None else length}
            spec = Summarize(**common)
        else:
            spec = Prompt(**common, instruction=prompt)
    with connected() as client:
        spec.documents = document_ids(client, sources, name)
        job = client.submit(spec)
        if not wait:
            print(job.id)
            return
        _finish(client, _watch(client, job.id, quiet), as_json=False)


def ask(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="DOCUMENT QUESTION... | DOCUMENT... -q QUESTION",
            help="A document (a file, - for standard input, or an id) and one or more questions; "
            "with -q, documents alone.",
        ),
    ],
    question: Annotated[
        list[str] | None, typer.Option("--question", "-q", help="A question; may be repeated.")
    ] = None,
    language: Language = None,
    name: Name = None,
    model: Model = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    stop: Stop = None,
    thinking: Thinking = False,
    expires_after: ExpiresAfter = None,
    priority: Priority = "normal",
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Ask questions about a document, or about several together, and print the answers."""
    sources, questions = _documents_and_questions(words, question)
    common = _common(
        sources, model, max_tokens, temperature, top_p, seed, stop, thinking, expires_after, priority
    )
    with _valid_spec():
        spec = Ask(**common, questions=questions, language=language)
    with connected() as client:
        spec.documents = document_ids(client, sources, name)
        job = client.submit(spec)
        _finish(client, _watch(client, job.id, quiet), as_json)


def warm(
    sources: Sources,
    name: Name = None,
    model: Model = None,
    thinking: Annotated[
        bool,
        typer.Option("--thinking", help="For jobs that let the model think, where its prompt says so first."),
    ] = False,
    wait: Annotated[bool, typer.Option(help="Watch it until its prefix is stored.")] = True,
    quiet: Quiet = False,
) -> None:
    """Read documents on a worker and store their prefix, so that the first question needn't wait for it."""
    with connected() as client:
        job = client.warm(document_ids(client, sources, name), model, thinking)
        if not wait:
            print(job.id)
            return
        _fail_unless_succeeded(_watch(client, job.id, quiet))
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
        print(printable(f"{job.error.code}: {job.error.detail}"))


def wait(job_id: str, quiet: Quiet = False) -> None:
    """Watch a job until it ends."""
    with connected() as client:
        job = _watch(client, job_id, quiet)
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
        table.add_row(cell(model["id"]), f"{context:,} tokens" if context else "?", ", ".join(notes))
    console().print(table)


def _finish(client: Client, job: Job, as_json: bool) -> None:
    if not job.ended or not job.num_done:
        _fail_unless_succeeded(job)
    found = client.result(job.id)
    if as_json:
        _print_json(found)
    else:
        show_result(console(), found)
    if not found.complete and job.error is None:  # an error says it itself
        num_there = f"{len(found.outputs):,} of {found.num_outputs:,} answers"
        say(f"{num_there}; `longleaf retry {job.id}` asks for the others")
    _fail_unless_succeeded(job)


def _fail_unless_succeeded(job: Job) -> None:
    if job.state is State.SUCCEEDED:
        return
    if not job.ended:
        refuse(f"{job.id} is {job.state.value}; `longleaf wait {job.id}` watches it")
    reason = f": {job.error.detail}" if job.error is not None else ""
    say(f"{job.id} {job.state.value}{reason}")
    raise typer.Exit(EXIT_FAILED)


def _watch(client: Client, job_id: str, quiet: bool) -> Job:
    try:
        return watch(client, job_id, Console(stderr=True, quiet=quiet))
    except KeyboardInterrupt:
        say(f"the job goes on; `longleaf wait {job_id}` watches it, `longleaf cancel {job_id}` stops it")
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _documents_and_questions(words: list[str], questions: list[str] | None) -> tuple[list[str], list[str]]:
    """What `ask` is given: with -q the words are documents, else a document and then questions."""
    if questions:
        return words, questions
    if len(words) == 1:
        refuse(f'name a question: longleaf ask {words[0]} "What does it say of …?"')
    for word in words[1:]:
        if is_document(word):
            refuse(
                f"{word} is a document, and without -q what follows the first one is a question: for several "
                f'documents write longleaf ask {words[0]} {word} -q "the question"'
            )
    return words[:1], words[1:]


def _common(
    sources: Sequence[str],
    model: str | None,
    max_tokens: int | None,
    temperature: float,
    top_p: float,
    seed: int | None,
    stop: list[str] | None,
    thinking: bool,
    expires_after: int | None,
    priority: str,
) -> dict[str, Any]:
    """The fields that every type of job has; the documents as they were named."""
    common = {
        "documents": list(sources),
        "model": model,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "stop": stop or [],
        "thinking": thinking,
        "expires_after": expires_after,
        "priority": priority,
    }
    return common if max_tokens is None else common | {"max_output_tokens": max_tokens}


@contextmanager
def _valid_spec() -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = str(first["loc"][0])
        refuse(f"{OPTIONS.get(field, field_path(first['loc']))}: {told(first)}")


def _print_json(value: BaseModel) -> None:
    print(json_text(value.model_dump(mode="json")))
