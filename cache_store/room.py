"""Room on the disk: a byte budget and a free-disk floor that hold while files are being written.

Owns what is evicted and in which order, and the unfinished files that hold a place. Everything here
runs under the store's lock.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from cache_store import files
from cache_store.index import Index, disk_bytes
from cache_store.key import BlockKey


class Room:
    def __init__(self, folder: Path, index: Index, budget_bytes: int, min_free_bytes: int) -> None:
        self.folder = folder
        self.budget_bytes = budget_bytes
        self.min_free_bytes = min_free_bytes
        self._index = index

    def __str__(self) -> str:
        return (
            f"{self._index.total_bytes} of {self.budget_bytes} budget bytes used, "
            f"{self._free_bytes()} bytes free on disk of which {self.min_free_bytes} must stay free"
        )

    def make(self, num_bytes: int, keep: set[BlockKey]) -> bool:
        """Evict until a file of this size fits budget and floor; False, and nothing evicted, if it cannot.

        keep: blocks that must stay, with their ancestors. The index is fresh.
        """
        if self._short_bytes(num_bytes) > 0:
            self.remove_unfinished()
        spare = sum(self._index.quarantined.values()) + self._index.evictable_bytes(keep)
        if self._short_bytes(num_bytes) > spare:
            return False
        victims = self._victims(keep)
        while self._short_bytes(num_bytes) > 0:
            path = next(victims, None)
            if path is None:
                return False
            files.remove(path)
            self._index.forget(path)
        return True

    def _victims(self, keep: set[BlockKey]) -> Iterator[Path]:
        yield from self._index.quarantined
        for entry in self._index.leaves(keep):
            yield self._index.path(entry.key)

    def _short_bytes(self, num_bytes: int) -> int:
        """Disk bytes that must go before a file of this size fits; the floor binds writes only."""
        wanted = disk_bytes(num_bytes)
        over_budget = self._index.total_bytes + wanted - self.budget_bytes
        below_floor = self.min_free_bytes + wanted - self._free_bytes() if num_bytes else 0
        return max(over_budget, below_floor, 0)

    def _free_bytes(self) -> int:
        """Free bytes on the disk, less what unfinished files of any process have yet to take."""
        disk = os.statvfs(self.folder)
        free = disk.f_bavail * disk.f_frsize
        for path in self._index.unfinished:
            with suppress(FileNotFoundError):
                status = os.stat(path)
                free -= max(status.st_size - status.st_blocks * 512, 0)
        return free

    def remove_unfinished(self) -> None:
        """Delete what dead writers left; a living writer holds the lock of its file."""
        for path in self._index.unfinished:
            try:
                fd = os.open(path, files.READ_FLAGS)
            except FileNotFoundError:
                continue
            try:
                if files.lock_now(fd):
                    files.remove(path)
                    self._index.forget(path)
            finally:
                os.close(fd)

    def reserve(self, temp: Path, num_bytes: int) -> int:
        """Make an unfinished file that has its full size, so that others count it, and its owner's lock."""
        for folder in (temp.parent.parent, temp.parent):
            files.make_folder(folder)
        fd = os.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            self._index.look_again(temp.parent.name)
            if not files.lock_now(fd):
                raise OSError(errno.EAGAIN, "a new file is locked by another process", str(temp))
            os.ftruncate(fd, num_bytes)
        except OSError:
            os.close(fd)
            files.remove(temp)
            raise
        return fd
