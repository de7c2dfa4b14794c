"""File operations that finish what they start: whole reads and writes, directory syncs, locks.

Every call goes through the `os` module, which is where the tests inject faults.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

# POSIX promises 16; Linux and macOS allow 1024.
_MAX_BUFFERS = 512
# Neither a pipe nor a link can stand in for a file of ours.
READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW


@dataclass(frozen=True)
class Contents:
    """What a file is to hold: batches of byte buffers one after another, to be gone through once."""

    num_bytes: int
    batches: Iterable[Sequence[memoryview]]


def read_at(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fill writable byte buffers from `offset` on; returns the bytes read, fewer only at the end of file."""
    pending, wanted, total = list(filter(len, buffers)), sum(map(len, buffers)), 0
    while total < wanted:
        count = os.preadv(fd, pending[:_MAX_BUFFERS], offset + total)
        if count == 0:
            break
        total += count
        if total < wanted:
            pending = _without(pending, count)
    return total


def write(fd: int, contents: Contents) -> None:
    """Write all of it from the file's beginning on."""
    offset = 0
    for batch in contents.batches:
        write_at(fd, batch, offset)
        offset += sum(map(len, batch))


def write_at(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write all buffers (bytes) one after another from `offset` on."""
    pending = [view for view in buffers if view.nbytes]
    while pending:
        count = os.pwritev(fd, pending[:_MAX_BUFFERS], offset)
        offset += count
        pending = _without(pending, count)


def _without(buffers: list[memoryview], count: int) -> list[memoryview]:
    """The buffers that remain once their first `count` bytes are done."""
    for index, view in enumerate(buffers):
        if count < view.nbytes:
            return [view[count:], *buffers[index + 1 :]] if count else buffers[index:]
        count -= view.nbytes
    return []


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        close(fd)


def make_folder(folder: Path) -> None:
    """Create a folder whose own name is durable; its parent exists."""
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        return
    sync_folder(folder.parent)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, made if absent. The kernel frees it when its holder dies."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        close(fd)


def lock_now(fd: int) -> bool:
    """Take an exclusive lock on an open file if nobody holds one."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def close(fd: int) -> None:
    """Close a file from which nothing more is expected: what had to last was synced before."""
    with suppress(OSError):
        os.close(fd)


def remove(path: Path) -> bool:
    """Unlink a file; False if it is already gone."""
    with suppress(FileNotFoundError):
        os.unlink(path)
        return True
    return False
