"""The SQLite engine: WAL, foreign keys, and transactions that say at their start what they are.

A deferred transaction that reads and then writes fails at once with "database is locked", whatever
the timeout. So writes begin with BEGIN IMMEDIATE and wait for their turn: for one of this process at a lock,
which wakes them at once, for another process by asking SQLite again. It knows no table.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, create_engine, event
from sqlalchemy.orm import Session

BUSY_TIMEOUT_S = 5.0


class Database:
    """One SQLite file. `read()` and `write()` give a session for one transaction."""

    def __init__(self, path: Path) -> None:
        self._engine = create_engine(
            f"sqlite:///{path}",
            connect_args={"timeout": BUSY_TIMEOUT_S, "check_same_thread": False},
            pool_size=16,
            max_overflow=48,
        )
        event.listen(self._engine, "connect", _configure)
        event.listen(self._engine, "begin", _begin)
        self._synced = self._engine.execution_options(longleaf_write="FULL")
        self._unsynced = self._engine.execution_options(longleaf_write="NORMAL")
        self._turn = threading.Lock()

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A consistent view of the database; nothing is kept of what is changed in it."""
        with Session(self._engine, expire_on_commit=False) as session:
            yield session

    @contextmanager
    def write(self, synced: bool = True) -> Iterator[Session]:
        """One write transaction: committed at the end of the block, undone by an exception.

        Committed, it outlives any end of this process. With `synced` it is on the disk then and outlives a
        loss of power too; without, that loss may undo it, and what was committed after it, never a part.
        """
        # Whoever had no turn in that time asks SQLite, which waits once more and then says why.
        has_turn = self._turn.acquire(timeout=BUSY_TIMEOUT_S)
        try:
            engine = self._synced if synced else self._unsynced
            with Session(engine, expire_on_commit=False) as session, session.begin():
                session.connection()  # takes the write lock before anything is read
                yield session
        finally:
            if has_turn:
                self._turn.release()

    def close(self) -> None:
        self._engine.dispose()


def _configure(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # the driver begins nothing by itself; _begin does
    for pragma in ("journal_mode=WAL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _begin(connection: Connection) -> None:
    synchronous = connection.get_execution_options().get("longleaf_write")
    if synchronous is not None:
        connection.exec_driver_sql(f"PRAGMA synchronous={synchronous}")
    connection.exec_driver_sql("BEGIN" if synchronous is None else "BEGIN IMMEDIATE")
