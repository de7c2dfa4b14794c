"""PostgreSQL for several API hosts: its engine, and the locks by which the hosts take turns.

What the stores rely on is SQLite's: a reader sees one moment, and one writer at a time reads and then
writes. So a read is REPEATABLE READ, and a write begins with an advisory lock of the whole database, under
READ COMMITTED: each statement after it sees all that the writer before has committed.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, event

WRITE_LOCK, LEADER_LOCK, MIGRATION_LOCK = 0x4C4C_0001, 0x4C4C_0002, 0x4C4C_0003
CHANGES = "longleaf_jobs"
"""The channel on which job ids are told."""

_SESSION = {
    "application_name": "longleaf",
    # A host that is gone in the middle of a write must not keep the others from theirs,
    "idle_in_transaction_session_timeout": "30000",
    # nor a leader that is gone its place.
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
}
CONNECT: dict[str, Any] = {
    "connect_timeout": 5,
    "client_encoding": "UTF8",
    "options": " ".join(f"-c {name}={value}" for name, value in _SESSION.items()),
    # Less than what the server waits: a leader knows first that it is none any more.
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}


def shown(url: URL) -> str:
    """The address without its password."""
    return url.render_as_string(hide_password=True)


def make_engine(url: URL, busy_timeout_s: float) -> Engine:
    """Connections for the requests and tasks of one API host: 48 at most, more than it has threads."""
    options = f"{CONNECT['options']} -c lock_timeout={busy_timeout_s * 1000:.0f}"
    connect = CONNECT | {"options": options}
    engine = create_engine(
        url,
        connect_args=connect,
        pool_size=8,
        max_overflow=40,
        pool_pre_ping=True,
        hide_parameters=True,  # documents and questions, which errors would carry into the log
    )
    event.listen(engine, "begin", _begin)
    return engine


def make_lone_engine(url: URL) -> Engine:
    """For a connection that holds a lock, or sees every commit at once: nothing is in a transaction."""
    return create_engine(url, connect_args=CONNECT, poolclass=NullPool, isolation_level="AUTOCOMMIT")


def for_reading(engine: Engine) -> Engine:
    return engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)


def for_writing(engine: Engine, synced: bool) -> Engine:
    return engine.execution_options(longleaf_synchronous_commit="on" if synced else "off")


def _begin(connection: Connection) -> None:
    synchronous_commit = connection.get_execution_options().get("longleaf_synchronous_commit")
    if synchronous_commit is not None:
        connection.exec_driver_sql(
            "SELECT set_config('synchronous_commit', %s, true), pg_advisory_xact_lock(%s)",
            (synchronous_commit, WRITE_LOCK),
        )
