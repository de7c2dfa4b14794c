"""Which of several API hosts records, reconciles and calls back: the one that holds a lock of PostgreSQL.

Events of one job must be applied in the order in which they came, so one host reads them. The lock is a
connection's: it is free as soon as its holder ends, and a holder whose connection broke stops before another
one begins.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import anyio.to_thread
from sqlalchemy import URL, Connection, text
from sqlalchemy.exc import DBAPIError

from api.postgres import LEADER_LOCK, make_lone_engine

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
HANDOVER_S = 3.0
"""A leader looks after its connection each second, so another one has stopped by then."""


class Leadership:
    def __init__(self, url: URL) -> None:
        self._engine = make_lone_engine(url)

    async def run(self, duties: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do the duties whenever this host is the one that does them, until cancelled."""
        # Where nobody holds the lock when this host comes, nobody has to stop first.
        has_waited = False
        while True:
            connection = await self._take()
            if connection is None:
                has_waited = True
                await anyio.sleep(LOOK_EVERY_S)
                continue
            try:
                if has_waited:
                    await anyio.sleep(HANDOVER_S)
                log.info("this host records, reconciles and calls back")
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(duties)
                    await self._until_lost(connection)
                    tasks.cancel_scope.cancel()
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(_close, connection)
            has_waited = True

    async def _take(self) -> Connection | None:
        """A connection that holds the lock; None where another host has it or there is no database."""
        try:
            return await anyio.to_thread.run_sync(self._try)
        except DBAPIError as error:
            log.warning("who leads is not known: %s", error.orig)
            return None

    def _try(self) -> Connection | None:
        connection = self._engine.connect()
        try:
            if connection.scalar(text("SELECT pg_try_advisory_lock(:key)"), {"key": LEADER_LOCK}):
                return connection
        except BaseException:
            _close(connection)
            raise
        _close(connection)
        return None

    async def _until_lost(self, connection: Connection) -> None:
        while True:
            await anyio.sleep(LOOK_EVERY_S)
            try:
                await anyio.to_thread.run_sync(connection.scalar, text("SELECT 1"))
            except DBAPIError as error:
                log.warning("this host leads no more: %s", error.orig)
                return


def _close(connection: Connection) -> None:
    # Without a pool the connection ends here, and with it the lock.
    connection.close()
