"""Brings the database to the schema of this code: `python -m api.migrate`, or the API at its start.

One process at a time (flock; in PostgreSQL a lock of its own); an existing file is copied first; the whole
upgrade is one transaction, so a failed one leaves the database as it was.
"""

from __future__ import annotations

import fcntl
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Connection, NullPool, create_engine, inspect, text
from sqlalchemy.exc import OperationalError

import migrations
from api import postgres
from api.db import Place
from api.settings import SettingsError, load_settings
from api.sqlite import address
from jobs.private_files import only_for_user


class MigrationError(Exception):
    """The database could not be brought to this code's schema; the text says what to do."""


def config() -> Config:
    """Alembic's configuration, without an ini file."""
    made = Config()
    folder = str(Path(migrations.__file__).parent).replace("%", "%%")  # as in an ini file
    made.set_main_option("script_location", folder)
    made.set_main_option("path_separator", "os")
    return made


def head() -> str:
    revision = ScriptDirectory.from_config(config()).get_current_head()
    assert revision is not None
    return revision


def current(database: Place) -> str | None:
    """The revision of a database; None for an empty or absent one.

    Raises:
        MigrationError: it is something else's, or PostgreSQL cannot be reached.
    """
    if isinstance(database, Path):
        return _revision_of_file(database)
    with _connected(database) as connection:
        return _revision(connection, postgres.shown(database))


def upgrade(database: Place) -> Path | None:
    """Create or upgrade a database. Returns the backup that was made, if one was: of a file only.

    Raises:
        MigrationError: for a database of a newer version or of something else, or one that cannot be reached.
        OSError: where the folder cannot be written.
    """
    if isinstance(database, Path):
        return _upgrade_file(database)
    with _connected(database) as connection:
        # Until the end of the transaction, which is the whole upgrade: another host waits, then finds it
        # done.
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": postgres.MIGRATION_LOCK})
        name = postgres.shown(database)
        if _is_due(_revision(connection, name), name):
            _run(connection)
            connection.commit()
    return None


def _upgrade_file(database: Path) -> Path | None:
    database.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _lock(database.with_name(database.name + ".lock")):
        try:
            old = _revision_of_file(database)
        except sqlite3.DatabaseError as error:
            raise MigrationError(
                f"{database} cannot be read as a SQLite database ({error}): move it away or restore a backup"
            ) from error
        if not _is_due(old, str(database)):
            return None
        backup = _backup(database, old) if old is not None else None
        # Documents, and what keys and tenants rest on: not for other users of this machine.
        database.touch(mode=0o600)
        try:
            _run_on_file(database)
        except OperationalError as error:
            raise MigrationError(
                f"{database} cannot be brought to this version's schema ({error.orig}): free space on its "
                "disk, or set LONGLEAF_DATA to another folder; `longleaf doctor` says more"
            ) from error
        return backup


def _is_due(old: str | None, name: str) -> bool:
    """Whether a database needs an upgrade. Raises MigrationError for one of a newer version."""
    known = {script.revision for script in ScriptDirectory.from_config(config()).walk_revisions()}
    if old is not None and old not in known:
        raise MigrationError(
            f"{name} was written by a newer Longleaf (schema {old}, this code knows up to {head()}): "
            "install the newer version or restore a backup"
        )
    return old != head()


def _revision_of_file(database: Path) -> str | None:
    if not database.exists():
        return None
    with closing(sqlite3.connect(database, timeout=5)) as connection:
        tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if "alembic_version" not in tables:
            if tables:
                raise MigrationError(
                    f"{database} is a SQLite database of something else (it has no alembic_version table): "
                    "set LONGLEAF_DATA to another folder"
                )
            return None
        row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        return row[0] if row else None


def _revision(connection: Connection, name: str) -> str | None:
    tables = inspect(connection).get_table_names()
    if "alembic_version" not in tables:
        if tables:
            raise MigrationError(
                f"{name} is a database of something else (it has no alembic_version table): make one for "
                "Longleaf alone and set LONGLEAF_DATABASE_URL to it"
            )
        return None
    found: str | None = connection.scalar(text("SELECT version_num FROM alembic_version"))
    return found


@contextmanager
def _connected(url: URL) -> Iterator[Connection]:
    """A connection to PostgreSQL. Raises MigrationError where there is none."""
    try:
        engine = create_engine(url, connect_args=postgres.CONNECT, poolclass=NullPool)
    except ModuleNotFoundError as error:
        raise MigrationError(
            f"LONGLEAF_DATABASE_URL needs PostgreSQL's driver ({error}): pip install 'longleaf[postgres]'"
        ) from error
    try:
        connection = engine.connect()
    except OperationalError as error:
        raise MigrationError(
            f"no database at {postgres.shown(url)} ({' '.join(str(error.orig).split())}): start PostgreSQL, "
            "make the database, or correct LONGLEAF_DATABASE_URL"
        ) from error
    with connection:
        yield connection


def _run(connection: Connection) -> None:
    made = config()
    made.attributes["connection"] = connection
    command.upgrade(made, "head")


def _run_on_file(database: Path) -> None:
    # Foreign keys stay off here (SQLite's default): a batch migration drops and recreates a table,
    # and with them on that deletes the rows that refer to it.
    engine = create_engine(address(database), connect_args={"timeout": 5, "isolation_level": None})
    try:
        with engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode=WAL")
            connection.exec_driver_sql("PRAGMA foreign_keys=OFF")
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            _run(connection)
            broken = connection.exec_driver_sql("PRAGMA foreign_key_check").fetchall()
            if broken:
                connection.exec_driver_sql("ROLLBACK")
                raise MigrationError(
                    f"{database}: the upgrade would leave {len(broken)} dangling rows; undone"
                )
            connection.commit()
    finally:
        engine.dispose()


def _backup(database: Path, revision: str) -> Path:
    target = database.with_name(f"{database.name}.{revision}.bak")
    partial = target.with_name(target.name + ".part")
    with closing(sqlite3.connect(database)) as source, closing(sqlite3.connect(partial)) as copy:
        source.backup(copy)
    partial.replace(target)
    return target


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> int:
    only_for_user()
    try:
        database = load_settings().database
        backup = upgrade(database)
    except (SettingsError, MigrationError, OSError) as error:
        print(f"longleaf migrate: {error}", file=sys.stderr)
        return 1
    name = database if isinstance(database, Path) else postgres.shown(database)
    print(f"{name} is at {head()}" + (f" (the older one is kept as {backup})" if backup else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
