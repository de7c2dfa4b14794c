"""What other API hosts say of jobs that changed, for the requests that wait here: PostgreSQL's LISTEN."""

from __future__ import annotations

import logging

import anyio
import psycopg
from sqlalchemy import URL

from api.notifier import Notifier
from api.postgres import CHANGES, CONNECT

log = logging.getLogger(__name__)

RETRY_S = 1.0


async def listen(url: URL, notifier: Notifier) -> None:
    """Wake waiters for what is told, until cancelled."""
    address = url.set(drivername="postgresql").render_as_string(hide_password=False)
    while True:
        try:
            async with await psycopg.AsyncConnection.connect(address, autocommit=True, **CONNECT) as heard:
                await heard.execute(f"LISTEN {CHANGES}")
                notifier.wake_all()  # for what was told while nobody listened
                async for told in heard.notifies():
                    notifier.notify(told.payload)
        except psycopg.Error as error:
            log.warning("other API hosts are not heard: %s", error)
        await anyio.sleep(RETRY_S)
