"""Fixtures: settings with a migrated database, a running API, a worker's side of the wire."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from api_rig import Api, FakeWorker, make_settings, running

from api.migrate import upgrade
from api.settings import Settings


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated database to copy: a migration for each test would cost more than the test."""
    path = tmp_path_factory.mktemp("schema") / "longleaf.db"
    upgrade(path)
    return path


@pytest.fixture
def settings(tmp_path: Path, empty_database: Path, redis_url: str) -> Settings:
    return make_settings(tmp_path, empty_database, redis_url)


@pytest.fixture(scope="module")
def shared_api(
    tmp_path_factory: pytest.TempPathFactory, empty_database: Path, redis_server: str
) -> Iterator[Api]:
    """One API for all tests of a module that leave nothing behind which another one minds."""
    with redis.Redis.from_url(redis_server) as client:
        client.flushall()
    with running(make_settings(tmp_path_factory.mktemp("api"), empty_database, redis_server)) as made:
        yield made


@pytest.fixture
def api(settings: Settings) -> Iterator[Api]:
    with running(settings) as made:
        yield made


@pytest.fixture
def worker(api: Api) -> FakeWorker:
    return FakeWorker(api.redis)
