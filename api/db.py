"""The database: sessions for one transaction each, that say at their start whether they will write.

One writer writes at a time, whatever it is about to read, so a count that was read in a write still holds
when it is committed. In this process writers wait at a lock, which wakes them at once; what holds off other
processes and hosts is in sqlite.py, for the file of one API host, and in postgres.py, for several. It knows
no table.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import URL, func, select
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from api import postgres, sqlite

log = logging.getLogger(__name__)

BUSY_TIMEOUT_S = 5.0

Place = Path | URL
"""A file of SQLite, or the address of a PostgreSQL database."""


class Database:
    """`read()` and `write()` give a session for one transaction."""

    def __init__(self, place: Place) -> None:
        if isinstance(place, Path):
            self._engine = sqlite.make_engine(place, BUSY_TIMEOUT_S)
            for_reading, for_writing = sqlite.for_reading, sqlite.for_writing
        else:
            self._engine = postgres.make_engine(place, BUSY_TIMEOUT_S)
            for_reading, for_writing = postgres.for_reading, postgres.for_writing
        self._reading = for_reading(self._engine)
        self._synced = for_writing(self._engine, synced=True)
        self._unsynced = for_writing(self._engine, synced=False)
        self._is_shared = not isinstance(place, Path)
        self._turn = threading.Lock()

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A consistent view of the database; nothing is kept of what is changed in it."""
        with Session(self._reading, expire_on_commit=False) as session:
            yield session

    @contextmanager
    def write(self, synced: bool = True) -> Iterator[Session]:
        """One write transaction: committed at the end of the block, undone by an exception.

        Committed, it outlives any end of this process. With `synced` it is on the disk then and outlives a
        loss of power, or of PostgreSQL's server, too; without, that may undo it, and what was committed after
        it, never a part.
        """
        # Whoever had no turn in that time asks the database, which waits once more and then says why.
        has_turn = self._turn.acquire(timeout=BUSY_TIMEOUT_S)
        try:
            engine = self._synced if synced else self._unsynced
            with Session(engine, expire_on_commit=False) as session, session.begin():
                session.connection()  # takes the write lock before anything is read
                yield session
        finally:
            if has_turn:
                self._turn.release()

    def tell_others(self, job_id: str) -> None:
        """Say to the other API hosts that a job has changed. Unheard, they see it when they look next."""
        if not self._is_shared:
            return
        try:
            with Session(self._engine) as session, session.begin():
                session.execute(select(func.pg_notify(postgres.CHANGES, job_id)))
        except OperationalError as error:
            log.warning("other API hosts do not hear of %s: %s", job_id, error.orig)

    def close(self) -> None:
        self._engine.dispose()
