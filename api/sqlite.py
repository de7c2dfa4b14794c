"""SQLite's engine: WAL, foreign keys, and transactions that say at their start what they are.

A deferred transaction that reads and then writes fails at once with "database is locked", whatever the
timeout. So writes begin with BEGIN IMMEDIATE and wait for another process's by asking SQLite again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event


def make_engine(path: Path, busy_timeout_s: float) -> Engine:
    engine = create_engine(
        address(path),
        connect_args={"timeout": busy_timeout_s, "check_same_thread": False},
        pool_size=16,
        max_overflow=48,
        hide_parameters=True,  # documents and questions, which errors would carry into the log
    )
    event.listen(engine, "connect", _configure)
    event.listen(engine, "begin", _begin)
    return engine


def address(path: Path) -> URL:
    """A file's URL, whatever characters its path has."""
    return URL.create("sqlite", database=str(path))


def for_reading(engine: Engine) -> Engine:
    return engine


def for_writing(engine: Engine, synced: bool) -> Engine:
    return engine.execution_options(longleaf_synchronous="FULL" if synced else "NORMAL")


def _configure(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # the driver begins nothing by itself; _begin does
    for pragma in ("journal_mode=WAL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _begin(connection: Connection) -> None:
    synchronous = connection.get_execution_options().get("longleaf_synchronous")
    if synchronous is not None:
        connection.exec_driver_sql(f"PRAGMA synchronous={synchronous}")
    connection.exec_driver_sql("BEGIN" if synchronous is None else "BEGIN IMMEDIATE")
