"""Backup and restore: whole, checked, and possible while the API runs and jobs come in."""

from __future__ import annotations

import sqlite3
import stat
import threading
from contextlib import closing
from pathlib import Path

import pytest
from alembic import command
from api_rig import Api, FakeWorker, eventually, result, running
from sqlalchemy import create_engine

from api import migrate
from api.backup import BackupError, create, restore
from api.settings import Settings
from jobs import EventType


def test_a_backup_that_is_made_while_jobs_come_in_is_a_moment_of_the_service(
    api: Api, tmp_path: Path
) -> None:
    document, saved = api.upload(), tmp_path / "saved %20? #1 é.db"
    stop = threading.Event()
    made: list[str] = []

    def submit() -> None:
        while not stop.is_set():
            made.append(str(api.submit(document)["id"]))

    thread = threading.Thread(target=submit)
    thread.start()
    try:
        eventually(lambda: len(made) > 3)
        create(api.services.settings.database, saved)
    finally:
        stop.set()
        thread.join()
    with closing(sqlite3.connect(saved)) as connection:
        kept = [row[0] for row in connection.execute("SELECT id FROM jobs ORDER BY id")]
        events = connection.execute("SELECT count(*) FROM job_events").fetchone()[0]
    assert 3 <= len(kept) <= len(made)
    assert kept == sorted(made)[: len(kept)]
    assert events == len(kept)
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600


def test_a_restore_under_a_running_api_brings_back_what_was_saved(settings: Settings, tmp_path: Path) -> None:
    with running(settings.model_copy(update={"lost_after_s": 0.2})) as api:
        _restore_under(api, tmp_path)


def _restore_under(api: Api, tmp_path: Path) -> None:
    database = api.services.settings.database
    before = api.submit()["id"]
    create(database, tmp_path / "saved.db")
    after = api.submit()["id"]
    api.http.post(f"/v1/jobs/{before}/cancel")
    kept = restore(database, tmp_path / "saved.db")
    assert api.job(before)["state"] == "queued"
    assert api.http.get(f"/v1/jobs/{after}").status_code == 404
    # The queue follows: what is in no database any more is dropped, what is owed is handed out.
    eventually(lambda: [rq_id.rpartition("-")[0] for rq_id in api.queued()] == [before])
    request = FakeWorker(api.redis).take()
    FakeWorker(api.redis).say(before, request.attempt, EventType.SUCCEEDED, result())
    api.wait_state(before, "succeeded")
    assert kept is not None
    with closing(sqlite3.connect(kept)) as connection:
        assert connection.execute("SELECT count(*) FROM jobs WHERE id = ?", [after]).fetchone() == (1,)


def test_an_older_backup_is_brought_to_this_schema(tmp_path: Path) -> None:
    old = tmp_path / "old.db"
    engine = create_engine(f"sqlite:///{old}")
    with engine.begin() as connection:
        config = migrate.config()
        config.attributes["connection"] = connection
        command.upgrade(config, "0003")
    engine.dispose()
    assert restore(tmp_path / "data" / "longleaf.db", old) is None
    assert migrate.current(tmp_path / "data" / "longleaf.db") == migrate.head()
    assert migrate.current(old) == "0003"


def test_what_is_no_backup_changes_nothing(tmp_path: Path, empty_database: Path) -> None:
    database = tmp_path / "longleaf.db"
    create(empty_database, database)
    before = database.read_bytes()
    (tmp_path / "text").write_bytes(b"not a database at all" * 100)
    damaged = bytearray(before)
    damaged[5000:9000] = b"\xff" * 4000
    (tmp_path / "damaged").write_bytes(damaged)
    with closing(sqlite3.connect(tmp_path / "other")) as connection:
        connection.execute("CREATE TABLE something_else (a)")
    create(empty_database, tmp_path / "newer")
    with closing(sqlite3.connect(tmp_path / "newer")) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.commit()
    for name in ("text", "damaged", "other", "newer", "absent"):
        with pytest.raises(BackupError, match=name):
            restore(database, tmp_path / name)
        assert database.read_bytes() == before
    assert list(tmp_path.glob("*.bak")) == []


def test_a_backup_of_nothing_leaves_an_older_one_alone(tmp_path: Path) -> None:
    (tmp_path / "saved").write_text("older")
    with pytest.raises(BackupError, match="LONGLEAF_DATA"):
        create(tmp_path / "absent.db", tmp_path / "saved")
    assert (tmp_path / "saved").read_text() == "older"


def test_the_database_is_for_its_user_alone(tmp_path: Path) -> None:
    migrate.upgrade(tmp_path / "data" / "longleaf.db")
    assert stat.S_IMODE((tmp_path / "data" / "longleaf.db").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o700
