"""The `longleaf` command. Exit status: 0 ok, 1 the job failed, 2 refused or misused, 3 no API to reach."""

from __future__ import annotations

from typing import Annotated

import typer

from cli import connection, host, jobs, keys, prefixes, webhooks

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
    app()


if __name__ == "__main__":
    main()
