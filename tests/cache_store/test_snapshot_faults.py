"""Faults of the disk, injected into the `os` calls that the store makes."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from stored_blocks import disk_usage, files_in, get, make_chain, path_of, put, which

from cache_store import BadBlock, SnapshotStore

CALLS = ("open", "mkdir", "statvfs", "scandir", "ftruncate", "pwritev", "fsync", "rename", "unlink")


@contextmanager
def failing_at(step: int, code: int, names: tuple[str, ...] = CALLS) -> Iterator[list[str]]:
    """Let the `step`-th call of these fail, once; gives the list of calls made."""
    made: list[str] = []

    def wrap(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            made.append(name)
            if len(made) - 1 == step:
                if name == "pwritev":  # a full disk takes a part first
                    call(arguments[0], [arguments[1][0][:100]], arguments[2])
                raise OSError(code, os.strerror(code))
            return call(*arguments, **options)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(os, name, wrap(name, getattr(os, name)))
        yield made


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EMFILE])
@pytest.mark.parametrize("scenario", ["new", "replace", "evict"])
def test_a_fault_at_any_step_of_a_write_leaves_old_or_nothing(
    tmp_path: Path, scenario: str, code: int
) -> None:
    step, num_failed = 0, 0
    chain, others = make_chain(1), [make_chain(1, seed) for seed in (1, 2)]
    while True:
        folder = tmp_path / str(step)
        store = SnapshotStore(folder, 3 * 8192, 0)
        for other in others:
            put(store, other, 0)
        if scenario == "replace":
            put(store, chain, 0, exact=False)
        if scenario == "evict":
            put(store, make_chain(1, seed=3), 0)
        with failing_at(step, code) as made:
            stored = put(store, chain, 0)
        if len(made) <= step:
            assert stored
            break
        key = chain.keys[0]
        on_disk = path_of(folder, key).exists()
        if stored:
            assert which(get(store, key), key) == "exact"
        elif on_disk:
            assert scenario == "replace"
            assert which(get(store, key), key) == "continued"
        num_failed += not stored
        assert disk_usage(folder) <= 3 * 8192
        if made[step] != "unlink":
            assert [path for path in files_in(folder) if path.suffix == ".tmp"] == []
        assert put(store, chain, 0), "the store must work once the fault has gone"
        assert which(get(store, key), key) == "exact"
        assert all(which(get(store, e.key), e.key) == "exact" for e in store.entries())
        again = SnapshotStore(folder, 3 * 8192, 0)
        assert [path for path in files_in(folder) if path.suffix == ".tmp"] == []
        assert again.match(chain.keys, chain.blocks) == 1
        step += 1
    assert num_failed > 6
    assert {"open", "ftruncate", "pwritev", "fsync", "rename"} <= set(made)


def test_a_full_disk_is_reported_once_until_a_write_succeeds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = SnapshotStore(tmp_path, 1 << 20, 0)
    chain = make_chain(1)
    for _ in range(3):
        with failing_at(0, errno.ENOSPC, ("pwritev",)):
            assert not put(store, chain, 0)
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    assert put(store, chain, 0)
    with failing_at(0, errno.ENOSPC, ("pwritev",)):
        assert not put(store, make_chain(1, seed=1), 0)
    assert len(caplog.records) == 2


@pytest.mark.parametrize(("name", "step"), [("pread", 0), ("preadv", 0)])
def test_a_disk_that_cannot_read_a_block_makes_it_a_miss(tmp_path: Path, name: str, step: int) -> None:
    store = SnapshotStore(tmp_path, 1 << 20, 0)
    chain = make_chain(1)
    put(store, chain, 0)
    buffers = [array.data for array in get(store, chain.keys[0])]
    with failing_at(step, errno.EIO, (name,)), pytest.raises(BadBlock, match="Input/output error"):
        store.read(chain.keys[0], buffers)
    assert store.match(chain.keys, chain.blocks) == 0
    assert not path_of(tmp_path, chain.keys[0]).exists()


@pytest.mark.parametrize("name", ["open", "pread", "preadv"])
@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EMFILE])
def test_a_shortage_of_this_process_does_not_condemn_the_block(tmp_path: Path, name: str, code: int) -> None:
    store = SnapshotStore(tmp_path, 1 << 20, 0)
    chain = make_chain(1)
    put(store, chain, 0)
    buffers = [array.data for array in get(store, chain.keys[0])]
    with failing_at(0, code, (name,)), pytest.raises(BadBlock):
        store.read(chain.keys[0], buffers)
    assert store.match(chain.keys, chain.blocks) == 1


def test_a_block_cut_while_it_is_read_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SnapshotStore(tmp_path, 1 << 20, 0)
    chain = make_chain(1)
    put(store, chain, 0)
    buffers = [array.data for array in get(store, chain.keys[0])]
    read = os.preadv

    def cut_then_read(fd: int, views: Any, offset: int) -> int:
        os.truncate(path_of(tmp_path, chain.keys[0]), 4200)
        return read(fd, views, offset)

    monkeypatch.setattr(os, "preadv", cut_then_read)
    with pytest.raises(BadBlock, match="file size"):
        store.read(chain.keys[0], buffers)


def test_a_bad_block_that_cannot_be_moved_is_still_a_miss(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, 1 << 20, 0)
    chain = make_chain(1)
    put(store, chain, 0)
    path_of(tmp_path, chain.keys[0]).write_bytes(b"junk")
    with failing_at(0, errno.EIO, ("rename",)):
        assert store.match(chain.keys, chain.blocks) == 0
    assert store.match(chain.keys, chain.blocks) == 0
    assert store.info(chain.keys[0]) is None
    assert path_of(tmp_path, chain.keys[0]).exists()
    assert put(store, chain, 0)
    assert store.match(chain.keys, chain.blocks) == 1


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_folder_that_cannot_be_written_at_start_serves_reading(
    tmp_path: Path, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    chain = make_chain(2)
    first = SnapshotStore(tmp_path, 1 << 20, 0)
    put(first, chain, 0)
    with failing_at(0, code, ("open",)):
        store = SnapshotStore(tmp_path, 1 << 20, 0)
    assert store.read_only
    assert "reading only" in caplog.text
    assert store.match(chain.keys, chain.blocks) == 1
    assert which(get(store, chain.keys[0]), chain.keys[0]) == "exact"
    assert not put(store, chain, 1)


def test_a_read_only_folder_is_read_and_left_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots"
    chain = make_chain(3)
    first = SnapshotStore(folder, 1 << 20, 0)
    for index in range(2):
        put(first, chain, index)
    raw = path_of(folder, chain.keys[1]).read_bytes()
    path_of(folder, chain.keys[1]).write_bytes(raw[:-1])
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files_in(folder)}
    for base in [*tmp_path.parents, tmp_path]:
        if base.stat().st_uid == os.getuid() and base.name.startswith(
            ("pytest-", "popen-", "test_", tmp_path.name)
        ):
            base.chmod(0o755)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    am_root = os.geteuid() == 0
    try:
        if am_root:  # permissions do not bind root
            os.seteuid(65534)
        store = SnapshotStore(folder, 1 << 20, 0)
        assert store.read_only
        for _ in range(2):
            assert store.match(chain.keys, chain.blocks) == 1
            assert store.info(chain.keys[1]) is None
        assert which(get(store, chain.keys[0]), chain.keys[0]) == "exact"
        assert not put(store, chain, 2)
        assert len(store.entries()) == 1
    finally:
        if am_root:
            os.seteuid(0)
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o755)
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files_in(folder)} == before


def test_a_healthy_store_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    store = SnapshotStore(tmp_path, 2 * 8192, 0)
    for seed in range(4):
        chain = make_chain(1, seed)
        assert put(store, chain, 0)
        assert store.match(chain.keys, chain.blocks) == 1
        get(store, chain.keys[0])
    assert caplog.records == []
