"""A data folder is tried out by doing in it what the service does; a bad one is named with what to do."""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from cli import data_folder
from cli.data_folder import MAX_PATH_BYTES, Unusable, try_out
from tests.cli.test_command import ROOT

NASTY = "a b%20c#d?e'f\"g=é日本語;[x]$&"


@pytest.mark.parametrize("name", ["plain", NASTY, f"{NASTY}/not/there/yet"])
def test_a_good_folder_is_left_as_it_was(tmp_path: Path, name: str) -> None:
    assert try_out(tmp_path / name) == ""
    assert list(tmp_path.iterdir()) == []
    (tmp_path / name).mkdir(parents=True)
    (tmp_path / name / "longleaf.db").write_text("x")
    assert try_out(tmp_path / name) == ""
    assert [path.name for path in (tmp_path / name).iterdir()] == ["longleaf.db"]


def refused(data: Path) -> Unusable:
    before = sorted(data.parent.rglob("*"))
    with pytest.raises(Unusable) as caught:
        try_out(data)
    assert sorted(data.parent.rglob("*")) == before
    return caught.value


def test_a_link_to_a_disk_that_is_not_mounted_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").symlink_to("/nowhere/disk")
    for data in (tmp_path / "data", tmp_path / "data" / "longleaf"):
        found = refused(data)
        assert found.detail == f"{tmp_path}/data is a link to /nowhere/disk, which is not there"
        assert found.mend.startswith("mount the disk")


def test_a_link_to_a_folder_is_as_good_as_the_folder(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "data").symlink_to(tmp_path / "disk")
    assert try_out(tmp_path / "data") == ""


def test_a_file_in_its_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for data in (tmp_path / "file", tmp_path / "file" / "data"):
        assert refused(data).detail == f"{tmp_path}/file is not a folder"


def test_a_path_that_sqlite_does_not_take_is_measured(tmp_path: Path) -> None:
    data = tmp_path.joinpath(*["x" * 100] * 5)
    found = refused(data)
    assert f"has {len(os.fsencode(data))} bytes, and SQLite takes {MAX_PATH_BYTES}" in found.detail
    longest = tmp_path.joinpath(*["x" * 100] * 3)
    longest /= "y" * (MAX_PATH_BYTES - len(os.fsencode(longest)) - 1)
    assert try_out(longest) == ""


@pytest.mark.parametrize(
    ("number", "said", "mend"),
    [
        (errno.EROFS, "Read-only file system", "mount it for writing"),
        (errno.ENOSPC, "No space left", "free some space"),
        (errno.EACCES, "Permission denied, it belongs to ", "chown -R"),
        (errno.EIO, "Input/output error", "set LONGLEAF_DATA to a folder on a local disk"),
    ],
)
def test_what_the_disk_refuses_is_said_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, said: str, mend: str
) -> None:
    def refuse(**_: object) -> str:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(data_folder.tempfile, "mkdtemp", refuse)
    found = refused(tmp_path)
    assert said in found.detail
    assert mend in found.mend


def test_a_disk_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    found = refused(tmp_path)
    assert "its file system does not take locks (No locks available)" in found.detail
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)  # as some network file systems answer
    assert "a second program gets a lock that is taken" in refused(tmp_path).detail


def test_a_disk_without_shared_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoLog(sqlite3.Connection):
        def execute(self, sql: str, *_: object) -> sqlite3.Cursor:
            return super().execute(sql.replace("=WAL", ""))  # what SQLite answers where there is none

    monkeypatch.setattr(data_folder.sqlite3, "connect", lambda path: NoLog(path))
    assert "its journal is 'delete'" in refused(tmp_path).detail


def test_a_disk_that_keeps_no_permissions_is_a_risk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vfat and exFAT give every file the mode of the mount, and refuse or ignore another."""
    monkeypatch.setattr(Path, "chmod", lambda self, mode: os.chmod(self, 0o755))
    assert try_out(tmp_path) == f"the file system of {tmp_path} keeps no permissions"


WITHOUT_POWERS = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
WITHOUT_POWERS += ["--inh-caps=-dac_override,-dac_read_search"]
HAS_POWERS = os.geteuid() == 0


def longleaf(data: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command, without root's right to read and write everything where the tests have that."""
    command = [*(WITHOUT_POWERS if HAS_POWERS else []), sys.executable, "-m", "cli", *words]
    env = {**os.environ, "LONGLEAF_DATA": str(data), "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=env, cwd=data.parent, capture_output=True, text=True, timeout=60)


@pytest.mark.skipif(sys.platform != "linux" and HAS_POWERS, reason="needs setpriv")
def test_a_locked_folder_is_one_sentence_whatever_the_command(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o000)
    try:
        for words in (["up"], ["down"], ["keys", "list"], ["prefixes", "list"], ["backup", "x.db"]):
            done = longleaf(data, *words)
            assert done.returncode in (1, 2), words
            assert len(done.stderr.splitlines()) == 1, done.stderr
            assert "Permission denied" in done.stderr
        doctor = longleaf(data, "doctor")
        assert "bad  data folder: " in doctor.stdout
        assert "Traceback" not in doctor.stdout + doctor.stderr
    finally:
        data.chmod(0o700)


@pytest.mark.skipif(sys.platform != "linux" and HAS_POWERS, reason="needs setpriv")
def test_a_file_in_it_that_another_user_left_is_named(tmp_path: Path) -> None:
    """`sudo longleaf up`, once, leaves such."""
    (tmp_path / "data" / "redis").mkdir(parents=True)
    locked = tmp_path / "data" / "redis" / "dump.rdb"
    locked.touch(mode=0o000)
    done = longleaf(tmp_path / "data", "up")
    assert done.returncode == 2
    assert f"{locked} may not be read and written (it belongs to " in done.stderr
    assert f"chown -R {os.geteuid()}:" in done.stderr
