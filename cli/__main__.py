"""The `longleaf` command.

Exit status: 0 ok, 1 the job failed, 2 refused or misused, 3 no API to reach, 130 ended by Ctrl-C, 141 the
reader of the output went away.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from click import Abort

from cli import connection, host, jobs, keys, listings, prefixes, webhooks
from jobs import streams

EXIT_INTERRUPTED, EXIT_READER_LEFT = 130, 141
"""As a shell tells of programs that SIGINT or SIGPIPE has ended."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (
    host.up,
    host.down,
    host.worker,
    jobs.submit,
    jobs.ask,
    jobs.status,
    jobs.wait,
    jobs.result,
    jobs.cancel,
    jobs.retry,
    jobs.models,
    host.plan,
    host.backup,
    host.restore,
    host.doctor,
):
    app.command()(command)
app.add_typer(listings.documents, name="documents")
app.add_typer(listings.jobs, name="jobs")
app.add_typer(keys.app, name="keys")
prefixes.app.command()(jobs.warm)
app.add_typer(prefixes.app, name="prefixes")
app.add_typer(webhooks.app, name="webhooks")


@app.callback()
def options(
    key: Annotated[
        str | None,
        typer.Option(help="API key (LONGLEAF_API_KEY, which other users of this machine do not see)."),
    ] = None,
) -> None:
    """Ask long documents questions on your own machines."""
    connection.given_key.set(key)


def main() -> None:
    streams.prepare()
    try:
        app()
    except SystemExit as ended:
        # What writes ends with an error of its own where the other end of a pipe was closed.
        reader_left = isinstance(ended.__context__, BrokenPipeError)
        status = EXIT_INTERRUPTED if isinstance(ended.__context__, Abort) else ended.code
    else:
        reader_left, status = False, 0
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        reader_left = True
    if reader_left:  # nothing may be said of it any more, not even by the interpreter as it ends
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(null, stream)
        status = EXIT_READER_LEFT
    sys.exit(status)


if __name__ == "__main__":
    main()
