"""Fixtures: settings with a migrated database, a running API, a worker's side of the wire."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from api_rig import Api, FakeWorker, make_settings, running
from sqlalchemy import make_url

from api.migrate import upgrade
from api.settings import Settings
from tests.postgres_process import Postgres, start_postgres


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated database to copy: a migration for each test would cost more than the test."""
    path = tmp_path_factory.mktemp("schema") / "longleaf.db"
    upgrade(path)
    return path


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A module that names DATABASES runs on each of them; the others on SQLite."""
    if "database_kind" in metafunc.fixturenames and hasattr(metafunc.module, "DATABASES"):
        metafunc.parametrize("database_kind", metafunc.module.DATABASES)


@pytest.fixture
def database_kind() -> str:
    return "sqlite"


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A server whose template1 is migrated."""
    with start_postgres() as server:
        upgrade(make_url(server.url("template1")))
        yield server


@pytest.fixture
def settings(
    tmp_path: Path, empty_database: Path, redis_url: str, database_kind: str, request: pytest.FixtureRequest
) -> Iterator[Settings]:
    made = make_settings(tmp_path, empty_database, redis_url)
    if database_kind == "sqlite":
        yield made
        return
    server: Postgres = request.getfixturevalue("postgres")
    url = server.new_database()
    yield made.model_copy(update={"database_url": url})
    server.drop(url)


@pytest.fixture(scope="module")
def shared_api(
    tmp_path_factory: pytest.TempPathFactory, empty_database: Path, redis_server: str
) -> Iterator[Api]:
    """One API for all tests of a module that leave nothing behind which another one minds."""
    # In a database of Redis of its own: it lives on beside the other APIs of the module, and would take
    # their events.
    url = f"{redis_server}?db=1"
    with redis.Redis.from_url(url) as client:
        client.flushdb()
    with running(make_settings(tmp_path_factory.mktemp("api"), empty_database, url)) as made:
        yield made


@pytest.fixture
def api(settings: Settings) -> Iterator[Api]:
    with running(settings) as made:
        yield made


@pytest.fixture
def worker(api: Api) -> FakeWorker:
    return FakeWorker(api.redis)
