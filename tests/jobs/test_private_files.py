"""A data folder is for its user alone, also one that was made before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jobs.private_files import make_private, open_to_others


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data folder as an older version left it under a umask of 022."""
    data = tmp_path / "data"
    for folder in (data, data / "redis" / "appendonlydir", data / "snapshots" / "ab"):
        folder.mkdir(parents=True, mode=0o755)
    for name in ("longleaf.db", "longleaf.db-wal", "up.lock", "redis/appendonlydir/a.aof", "snapshots/ab/x"):
        (data / name).write_text("x")
        (data / name).chmod(0o644)
    return data


def modes(folder: Path) -> set[int]:
    return {path.lstat().st_mode & 0o777 for path in (folder, *folder.rglob("*")) if not path.is_symlink()}


def test_folders_and_files_that_are_there_are_closed(data: Path) -> None:
    make_private(data)
    assert modes(data) == {0o700, 0o600}
    assert list(open_to_others(data)) == []


def test_a_folder_with_other_things_in_it_stays_open_and_so_do_they(data: Path) -> None:
    (data / "thesis.pdf").write_text("x")
    (data / "thesis.pdf").chmod(0o644)
    data.chmod(0o755)
    make_private(data)
    assert data.stat().st_mode & 0o777 == 0o755
    assert (data / "thesis.pdf").stat().st_mode & 0o777 == 0o644
    assert (data / "longleaf.db").stat().st_mode & 0o777 == 0o600
    assert (data / "snapshots").stat().st_mode & 0o777 == 0o700


def test_what_a_link_in_it_leads_to_is_left_alone(data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("x")
    other.chmod(0o644)
    os.symlink(other, data / "snapshots" / "link")
    make_private(data)
    assert other.stat().st_mode & 0o777 == 0o644


def test_a_store_on_another_disk_is_closed_through_its_link(data: Path, tmp_path: Path) -> None:
    (data / "snapshots").rename(tmp_path / "disk")
    os.symlink(tmp_path / "disk", data / "snapshots")
    make_private(data)
    assert modes(tmp_path / "disk") == {0o700, 0o600}


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    make_private(tmp_path / "none")
    assert not (tmp_path / "none").exists()
