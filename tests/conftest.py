"""What every test runs on: the CPU's real BLAS under MLX, and one Redis-compatible server."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.redis_process import start_redis
from worker import accelerate

# A proxy of this machine's owner takes what is meant for the servers that the tests start.
for _name in ("no_proxy", "NO_PROXY"):
    os.environ[_name] = ",".join(filter(None, (os.environ.get(_name), "localhost,127.0.0.1,::1")))

# Before any test imports MLX, as in the engine child: reference BLAS would make the model tests crawl.
accelerate.prepare_cpu()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[str]:
    """The URL of one server for the whole run."""
    # A socket's path may have about 100 characters, which pytest's own folders can exceed.
    folder = Path(tempfile.mkdtemp(prefix="ll-", dir="/tmp"))
    with start_redis(folder) as url:
        yield url
    shutil.rmtree(folder)


@pytest.fixture
def redis_url(redis_server: str) -> str:
    """The same server, empty before each test."""
    with redis.Redis.from_url(redis_server) as client:
        client.flushdb()
    return redis_server
