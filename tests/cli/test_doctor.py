"""`longleaf doctor` on installations that lack something: what is named, what is to be done, how it ends."""

from __future__ import annotations

import os
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import redis

from tests.cli.test_command import ROOT, longleaf


def doctor(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "LONGLEAF_DATA": str(folder / "data"), "PYTHONPATH": str(ROOT)} | variables
    return subprocess.run(
        [sys.executable, "-m", "cli", "doctor"],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_working_installation_ends_with_0_and_changes_nothing(tmp_path: Path) -> None:
    done = doctor(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("Python", "MLX", "compiler", "Redis", "data folder", "database", "model", "port"):
        assert f" {name}: " in done.stdout
    assert "bad" not in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_everything_that_is_wrong_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "longleaf.db").write_bytes(b"not a database at all" * 100)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = doctor(
            tmp_path,
            LONGLEAF_PORT=port,
            LONGLEAF_MODEL="no/such",
            REDIS_URL="unix:///tmp/longleaf-nothing-here.sock",
        )
    assert done.returncode == 1
    assert "bad  Redis: no answer" in done.stdout
    assert "bad  database: " in done.stdout
    assert "longleaf restore FILE" in done.stdout
    assert f"warn port: 127.0.0.1:{port}" in done.stdout
    assert "python -m worker.models pull no/such" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_a_redis_that_may_forget_jobs_is_a_warning(tmp_path: Path, redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            done = doctor(tmp_path, REDIS_URL=redis_url)
        finally:
            client.config_set("maxmemory-policy", "noeviction")
    assert "warn Redis: " in done.stdout
    assert "set maxmemory-policy noeviction" in done.stdout


def test_a_database_of_a_newer_version_stops_the_start(tmp_path: Path) -> None:
    assert longleaf(tmp_path, "keys", "list").returncode == 0
    with closing(sqlite3.connect(tmp_path / "longleaf.db")) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.commit()
    done = doctor(tmp_path, LONGLEAF_DATA=str(tmp_path))
    assert done.returncode == 1
    assert "bad  database: schema 9999" in done.stdout
