"""`python -m api`: the API under uvicorn, with start-up errors in one sentence."""

from __future__ import annotations

import logging
import socket
import sys
from contextlib import suppress

import uvicorn
from fastapi import FastAPI

from api.app import create_app
from api.db import Database
from api.keys import KeyStore
from api.migrate import MigrationError, upgrade
from api.settings import Settings, SettingsError, load_settings
from jobs import logs, streams
from jobs.listening import CannotListen, listen
from jobs.loopback import in_url
from jobs.private_files import make_private, only_for_user


class Server(uvicorn.Server):
    """Ends event streams and long polls when a stop is asked for, instead of waiting for them."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._longleaf = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._longleaf.state.services.notifier.close()
        await super().shutdown(sockets)


class StartError(Exception):
    """The API cannot start; the text says what to do."""


def check_keys(settings: Settings) -> None:
    """Raises StartError where keys are needed and there is none: nobody could use the service."""
    if not settings.needs_key:
        return
    database = Database(settings.database)
    try:
        if KeyStore(database).any_valid():
            return
    finally:
        database.close()
    why = "LONGLEAF_REQUIRE_KEY is set" if settings.require_key else f"others can reach {settings.host}"
    raise StartError(
        f"{why} and there is no API key: make one with `longleaf keys create`"
        + ("" if settings.require_key else ", or set LONGLEAF_HOST=127.0.0.1 to serve this machine alone")
    )


def make_server(settings: Settings) -> Server:
    app = create_app(settings)
    return Server(
        uvicorn.Config(app, timeout_graceful_shutdown=2, log_config=None, access_log=False, lifespan="on"),
        app,
    )


def main() -> int:
    streams.prepare()
    only_for_user()
    try:
        settings = load_settings()
        logs.configure(settings.log_format, "%(asctime)s %(levelname)s %(name)s: %(message)s")
        if settings.log_format == "text":
            logging.getLogger("api.access").setLevel(logging.WARNING)  # people poll
        sockets = listen(settings.host, settings.port)
        make_private(settings.data)
        upgrade(settings.database)
        check_keys(settings)
    except (SettingsError, CannotListen, StartError, MigrationError) as error:
        print(f"longleaf api: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"longleaf api: {error}; set LONGLEAF_DATA to a folder that can be written", file=sys.stderr)
        return 1
    log = logging.getLogger("api")
    for host, port in (sock.getsockname()[:2] for sock in sockets):
        log.info("listening on http://%s:%d, data in %s", in_url(host), port, settings.data)
    server = make_server(settings)
    # After its orderly stop uvicorn raises the signal again, which is no news to anyone.
    with suppress(KeyboardInterrupt):
        server.run(sockets=sockets)
    return 0 if server.started else 1


if __name__ == "__main__":
    sys.exit(main())
