"""`python -m api.backup create|restore FILE`: the database into one file and back, both while the API runs.

SQLite's own backup gives a consistent copy of a database that is written to, and puts one back in a single
transaction. Snapshots and Redis are not in it: the first are made again, the second follows the database.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from api import postgres
from api.migrate import MigrationError, current, upgrade
from api.settings import SettingsError, load_settings
from jobs import streams
from jobs.private_files import only_for_user

_POSTGRES = (
    "the database is PostgreSQL's, whose own tools copy it while Longleaf runs: "
    "pg_dump --format=custom --file=FILE {url} saves it; with the API hosts stopped, "
    "pg_restore --clean --if-exists --single-transaction --dbname={url} FILE puts it back"
)


class BackupError(Exception):
    """Nothing was written, or what was there is as it was; the text says what to do."""


def create(database: Path, target: Path) -> None:
    """Write a checked copy. Raises BackupError and OSError; an older file at `target` is kept until then."""
    if not database.exists():
        raise BackupError(f"there is no database {database}: set LONGLEAF_DATA to its folder")
    partial = target.with_name(target.name + ".part")
    partial.unlink(missing_ok=True)
    # It holds documents, the hashes of keys and the tenants' secrets.
    os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    try:
        _copy(database, partial)
        _check(partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def restore(database: Path, source: Path) -> Path | None:
    """Put a backup in the place of the database; returns where the replaced one is kept, if there was one.

    Raises:
        BackupError: the file is no backup, damaged, or of a newer Longleaf.
        OSError: a folder cannot be written.
    """
    if not source.is_file():
        raise BackupError(f"{source} is not a file")
    _check(source)
    kept = None
    with tempfile.TemporaryDirectory(prefix="longleaf-", dir=_folder(database)) as folder:
        # Brought to this code's schema beforehand: an API that runs sees nothing in between.
        ready = Path(folder) / "longleaf.db"
        _copy(source, ready)
        try:
            if current(ready) is None:
                raise BackupError(f"{source} is a SQLite database, but not a backup of Longleaf")
            upgrade(ready)
        except MigrationError as error:
            raise BackupError(str(error).replace(str(ready), str(source))) from error
        if database.exists():
            kept = database.with_name(f"{database.name}.{time.strftime('%Y%m%d-%H%M%S')}.bak")
            create(database, kept)
        _copy(ready, database)
    return kept


def _copy(source: Path, target: Path) -> None:
    try:
        with (
            closing(_open_to_read(source)) as old,
            closing(sqlite3.connect(target, timeout=30)) as new,
        ):
            old.backup(new)
    except sqlite3.Error as error:
        raise BackupError(f"{source} cannot be copied to {target}: {error}") from error


def _open_to_read(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=30)


def _check(path: Path) -> None:
    try:
        with closing(_open_to_read(path)) as connection:
            (answer,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    except sqlite3.Error as error:
        raise BackupError(f"{path} cannot be read as a SQLite database ({error})") from error
    if answer != "ok":
        raise BackupError(f"{path} is damaged ({answer}): use another backup")


def _folder(database: Path) -> Path:
    database.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return database.parent


def main() -> int:
    streams.prepare()
    streams.end_with_reader()
    only_for_user()
    what, path = sys.argv[1], Path(sys.argv[2])
    try:
        database = load_settings().database
        if not isinstance(database, Path):
            raise BackupError(_POSTGRES.format(url=postgres.shown(database.set(drivername="postgresql"))))
        if what == "create":
            create(database, path)
            print(f"{database} is saved as {path} ({path.stat().st_size:,} bytes)")
        else:
            kept = restore(database, path)
            print(f"{path} is restored as {database}" + (f"; what was there is {kept}" if kept else ""))
    except (BackupError, SettingsError, OSError) as error:
        print(f"longleaf {'backup' if what == 'create' else what}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
