"""The commands that act on this machine: run the service, look after it, say what it can do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cli import up as local
from cli.doctor import examine
from cli.words import cell, settings_or_refuse
from jobs.printable import printable

EXIT_BAD = 1

out = Console()

Data = Annotated[Path | None, typer.Option(help="Data folder (LONGLEAF_DATA).")]


def up(
    data: Data = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on (LONGLEAF_HOST).")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port (LONGLEAF_PORT).")] = None,
    model: Annotated[str | None, typer.Option(help="Model to serve (LONGLEAF_MODEL).")] = None,
) -> None:
    """Run Redis, the API and a worker here until Ctrl-C."""
    given = {"data": data, "host": host, "port": port, "model": model}
    raise typer.Exit(local.up(settings_or_refuse({k: v for k, v in given.items() if v is not None})))


def down(data: Data = None) -> None:
    """Stop what `longleaf up` runs on a data folder."""
    raise typer.Exit(local.down(data or settings_or_refuse().data))


def worker(
    join: Annotated[
        str,
        typer.Option(envvar="REDIS_URL", help="The installation's Redis: redis:// or, with TLS, rediss://."),
    ],
    api: Annotated[str, typer.Option(envvar="LONGLEAF_API", help="Its API: http:// or https://.")],
    model: Annotated[str | None, typer.Option(help="Model to serve; the API's default where absent.")] = None,
    memory: Annotated[str | None, typer.Option(help="Such as 64GB; this machine's where absent.")] = None,
    data: Data = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the worker's token (LONGLEAF_WORKER_TOKEN).")
    ] = None,
) -> None:
    """Work for an installation on another machine, until Ctrl-C."""
    given = {
        "REDIS_URL": join,
        "LONGLEAF_API": api,
        "LONGLEAF_MODEL": model,
        "LONGLEAF_MEMORY_BYTES": memory,
        "LONGLEAF_DATA": data,
        "LONGLEAF_WORKER_TOKEN_FILE": token_file,
    }
    env = os.environ | {name: str(value) for name, value in given.items() if value is not None}
    if token_file is not None:
        env.pop("LONGLEAF_WORKER_TOKEN", None)
    # In the place of this process: signals reach the worker, and its exit status is ours.
    os.execve(sys.executable, [sys.executable, "-m", "worker", "--join"], env)


def plan(
    model: Annotated[str, typer.Argument(help="A model folder, or an id whose folder is there.")],
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of prompt and answer; the model's context where absent.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Such as 64GB; what this machine's device may use where absent.")
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Plan for a machine without a GPU.")] = False,
) -> None:
    """Say how much memory a model needs for a context, and whether it fits."""
    command = [sys.executable, "-m", "worker.plan", "--models-dir", str(settings_or_refuse().models)]
    command += ["--context", str(context)] if context is not None else []
    command += [f"--memory={memory}"] if memory is not None else []
    command += ["--cpu"] if cpu else []
    raise typer.Exit(subprocess.run([*command, "--", model]).returncode)


def backup(file: Annotated[Path, typer.Argument(help="Where the copy goes.")]) -> None:
    """Save the database as one file, also while Longleaf runs."""
    in_api("backup", "create", str(file))


def restore(file: Annotated[Path, typer.Argument(help="What `longleaf backup` made.")]) -> None:
    """Put a saved database in the place of the present one, which is kept, also while Longleaf runs."""
    in_api("backup", "restore", str(file))


def doctor() -> None:
    """Check what Longleaf needs here and say what to mend; exit status 1 where it cannot start."""
    marks = {"ok": "[green]ok[/green]  ", "warn": "[yellow]warn[/yellow]", "bad": "[red]bad[/red] "}
    is_bad = False
    for finding in examine(settings_or_refuse()):
        is_bad = is_bad or finding.state == "bad"
        out.print(
            f"{marks[finding.state]} {cell(finding.name)}: {cell(finding.detail)}",
            highlight=False,
            soft_wrap=True,
        )
        if finding.mend:
            out.print(f"     → {printable(finding.mend)}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(EXIT_BAD if is_bad else 0)


def in_api(module: str, *words: str) -> None:
    """Run a command of the API on this host's database and end with its exit status."""
    command = [sys.executable, "-m", f"api.{module}", *words]
    env = {**os.environ, "LONGLEAF_DATA": str(settings_or_refuse().data)}
    status = subprocess.run(command, env=env).returncode
    raise typer.Exit(status if status >= 0 else 128 - status)  # ended by a signal, as a shell says it
