"""Who runs on a data folder: the lock, not the file, decides."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cli.up_lock import AlreadyRunning, UpInfo, UpLock

INFO = UpInfo(pid=os.getpid(), url="http://127.0.0.1:1", started_at=0.0, model="m", redis_url="unix:///x")


def test_second_holder_is_told_who_is_first(tmp_path: Path) -> None:
    first = UpLock(tmp_path)
    first.acquire()
    first.write(INFO)
    with pytest.raises(AlreadyRunning) as caught:
        UpLock(tmp_path).acquire()
    assert caught.value.info == INFO
    first.release()


def test_file_that_a_dead_holder_left_does_not_block(tmp_path: Path) -> None:
    (tmp_path / "up.json").write_text(INFO.model_dump_json())
    (tmp_path / "up.lock").touch()
    lock = UpLock(tmp_path)
    lock.acquire()
    lock.release()


@pytest.mark.parametrize("content", ["", "{", '{"pid": "x"}'])
def test_unreadable_file_is_no_information(tmp_path: Path, content: str) -> None:
    (tmp_path / "up.json").write_text(content)
    assert UpLock(tmp_path).read() is None


def test_released_lock_leaves_no_file_behind(tmp_path: Path) -> None:
    lock = UpLock(tmp_path)
    lock.acquire()
    lock.write(INFO)
    lock.release()
    assert not (tmp_path / "up.json").exists()
    UpLock(tmp_path).acquire()
