"""PostgreSQL as the database: its schema, how it is named and refused, and what is said of backups."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic import command
from api_rig import eventually, make_settings, running
from sqlalchemy import create_engine, inspect, make_url, text
from sqlalchemy.exc import OperationalError
from test_start import api_process

from api import backup, migrate
from api.db import Database
from api.keys import KeyStore
from api.limits import Limits
from api.models import Base
from api.postgres import LEADER_LOCK, make_lone_engine, shown
from api.settings import SettingsError, load_settings
from cli import doctor
from cli.settings import load_settings as cli_settings
from tests.postgres_process import Postgres

ROOT = Path(__file__).parents[2]


@pytest.fixture
def empty(postgres: Postgres) -> Iterator[str]:
    """The URL of a database without tables."""
    url = postgres.new_database(like="template0")
    yield url
    postgres.drop(url)


def longleaf(folder: Path, url: str, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "LONGLEAF_DATA": str(folder), "LONGLEAF_DATABASE_URL": url}
    return subprocess.run(
        [sys.executable, "-m", "cli", *words],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_migrations_make_what_the_models_say(empty: str) -> None:
    url = make_url(empty)
    assert migrate.current(url) is None
    migrate.upgrade(url)
    assert migrate.current(url) == migrate.head()
    engine = create_engine(url)
    with engine.connect() as connection:
        config = migrate.config()
        config.attributes["connection"] = connection
        command.check(config)
        assert set(inspect(connection).get_table_names()) == {*Base.metadata.tables, "alembic_version"}
    engine.dispose()


def test_concurrent_starts_migrate_once(empty: str) -> None:
    code = "import sys, sqlalchemy, api.migrate; api.migrate.upgrade(sqlalchemy.make_url(sys.argv[1]))"
    command = [sys.executable, "-c", code, empty]
    started = [subprocess.Popen(command, stderr=subprocess.PIPE, cwd=ROOT) for _ in range(3)]
    errors = [process.communicate(timeout=60)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], errors
    assert migrate.current(make_url(empty)) == migrate.head()


@pytest.mark.parametrize(
    ("statements", "message"),
    [
        (["CREATE TABLE alembic_version AS SELECT '9999' AS version_num"], "newer"),
        (["CREATE TABLE something_else (a int)"], "something else"),
    ],
)
def test_a_strange_database_is_left_alone(empty: str, statements: list[str], message: str) -> None:
    engine = create_engine(empty)
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))
    tables = inspect(engine).get_table_names()
    with pytest.raises(migrate.MigrationError, match=message):
        migrate.upgrade(make_url(empty))
    assert inspect(engine).get_table_names() == tables
    engine.dispose()


@pytest.mark.parametrize(
    "url", ["mysql://host/name", "postgresql+asyncpg://host/name", "postgresql://host", "x"]
)
def test_an_address_that_is_not_accepted_is_said_without_its_password(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("LONGLEAF_DATABASE_URL", url.replace("//host", "//user:secret@host"))
    with pytest.raises(SettingsError, match=r"LONGLEAF_DATABASE_URL=.*postgresql\+psycopg://") as caught:
        load_settings()
    assert "secret" not in str(caught.value)


def test_a_server_that_is_not_there_stops_the_start_in_one_sentence(tmp_path: Path) -> None:
    url = "postgresql://longleaf:secret@127.0.0.1:1/longleaf"
    process = api_process(tmp_path, LONGLEAF_DATABASE_URL=url)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert "no database at postgresql+psycopg://longleaf:***@127.0.0.1:1/longleaf" in said
    assert "correct LONGLEAF_DATABASE_URL" in said
    assert "secret" not in said
    assert "Traceback" not in said


@pytest.mark.parametrize(("what", "tool"), [("create", "pg_dump"), ("restore", "pg_restore")])
def test_backup_and_restore_name_the_tools_for_it_and_write_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    what: str,
    tool: str,
) -> None:
    monkeypatch.setenv("LONGLEAF_DATABASE_URL", "postgresql://longleaf:secret@db.example/longleaf")
    monkeypatch.setenv("LONGLEAF_DATA", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["backup", what, str(tmp_path / "x")])
    assert backup.main() == 1
    said = capsys.readouterr().err
    assert tool in said
    assert "secret" not in said
    assert list(tmp_path.iterdir()) == []


def test_the_doctor_looks_at_the_database_that_is_named(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(url: str) -> doctor.Finding:
        monkeypatch.setenv("LONGLEAF_DATABASE_URL", url)
        return doctor._database(cli_settings())

    made = postgres.new_database()
    assert found(made) == doctor.Finding("database", "ok", f"PostgreSQL, schema {migrate.head()}")
    postgres.drop(made)
    away = found("postgresql://127.0.0.1:1/x")
    assert away.state == "bad"
    assert away.detail.startswith("no database at")
    assert away.mend.startswith("correct LONGLEAF_DATABASE_URL, or start the server")


def test_keys_are_made_in_the_database_that_is_named(tmp_path: Path, postgres: Postgres) -> None:
    url = postgres.new_database()
    made = longleaf(tmp_path, url, "keys", "create", "--max-document-bytes", str(10**11))
    assert made.returncode == 0, made.stderr
    database = Database(make_url(url))
    caller = KeyStore(database).caller(made.stdout.strip())
    database.close()
    assert caller is not None
    assert caller.limits == Limits(max_document_bytes=10**11)
    assert not (tmp_path / "longleaf.db").exists()
    postgres.drop(url)


def test_a_writer_waits_for_another_hosts_and_gives_up_in_time(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.db.BUSY_TIMEOUT_S", 0.2)
    url = postgres.new_database()
    ours, theirs = Database(make_url(url)), Database(make_url(url))

    def write() -> None:
        with theirs.write():
            raise AssertionError("it came in")

    with ours.write(), pytest.raises(OperationalError, match="lock timeout"):
        write()
    ours.close()
    theirs.close()
    postgres.drop(url)


def test_a_writer_sees_what_the_writer_before_it_committed(postgres: Postgres) -> None:
    url = postgres.new_database()
    ours, theirs = Database(make_url(url)), Database(make_url(url))
    count, waiting = (
        text("SELECT count(*) FROM tenants"),
        text("SELECT count(*) FROM pg_locks WHERE NOT granted"),
    )
    seen: list[int | None] = []

    def write() -> None:
        with theirs.write() as session:
            seen.append(session.scalar(count))

    thread = threading.Thread(target=write)
    with ours.write() as session:
        before = session.scalar(count)
        thread.start()
        eventually(lambda: session.scalar(waiting))
        session.execute(text("INSERT INTO tenants VALUES ('ten_x', 'x', '00', 0, 0, NULL)"))
    thread.join()
    assert seen == [before + 1]
    ours.close()
    theirs.close()
    postgres.drop(url)


def test_a_reader_sees_one_moment_and_does_not_write(postgres: Postgres) -> None:
    url = postgres.new_database()
    database = Database(make_url(url))
    count = text("SELECT count(*) FROM tenants")
    with database.read() as session:
        before = session.scalar(count)
        KeyStore(database).create("another", ["read"], "")
        assert session.scalar(count) == before
        with pytest.raises(Exception, match="read-only transaction"):
            session.execute(text("DELETE FROM tenants"))
    database.close()
    postgres.drop(url)


def test_an_id_with_a_nul_is_refused_and_nothing_of_it_is_logged(
    tmp_path: Path, empty_database: Path, redis_url: str, postgres: Postgres, caplog: pytest.LogCaptureFixture
) -> None:
    url = postgres.new_database()
    settings = make_settings(tmp_path, empty_database, redis_url, database_url=url)
    with running(settings) as api:
        for method, path in (
            ("GET", "jobs/se%00cret"),
            ("DELETE", "documents/se%00cret"),
            ("GET", "jobs/%00/events"),
        ):
            answer = api.http.request(method, f"/v1/{path}")
            assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
        job = api.submit(type="prompt", instruction="a\0b")
        assert api.job(job["id"])["spec"]["instruction"] == "a\0b"
    assert "cret" not in caplog.text
    postgres.drop(url)


def test_an_unsynced_write_asks_for_no_wait(postgres: Postgres) -> None:
    url = postgres.new_database()
    database = Database(make_url(url))
    found = {}
    for synced in (True, False):
        with database.write(synced=synced) as session:
            found[synced] = session.scalar(text("SHOW synchronous_commit"))
    assert found == {True: "on", False: "off"}
    database.close()
    postgres.drop(url)


def test_a_password_is_never_shown() -> None:
    url = make_url("postgresql+psycopg://user:secret@host/name")
    assert "secret" not in shown(url)


def test_the_lock_is_free_when_its_holder_ends(postgres: Postgres) -> None:
    url = postgres.new_database()
    engines = [make_lone_engine(make_url(url)) for _ in range(2)]
    first, second = (engine.connect() for engine in engines)
    take = text(f"SELECT pg_try_advisory_lock({LEADER_LOCK})")
    assert (first.scalar(take), second.scalar(take)) == (True, False)
    first.close()
    eventually(lambda: second.scalar(take))  # the server ends the session after its client
    second.close()
    postgres.drop(url)
