"""Room on the disk: a byte budget and a free-disk floor that hold while files are being written.

Owns what is evicted and in which order, and the unfinished files that hold a place. Everything here
runs under the store's lock.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from cache_store import files
from cache_store.eviction import victims, with_ancestors
from cache_store.index import Entry, Index, checkpoint_of, disk_bytes
from cache_store.key import BlockKey
from cache_store.pins import Pins


class Room:
    def __init__(
        self, folder: Path, index: Index, pins: Pins, budget_bytes: int, min_free_bytes: int
    ) -> None:
        self.folder = folder
        self.budget_bytes = budget_bytes
        self.min_free_bytes = min_free_bytes
        self._index = index
        self._pins = pins

    def __str__(self) -> str:
        return (
            f"{self._index.total_bytes} of {self.budget_bytes} budget bytes used, "
            f"{self._free_bytes()} bytes free on disk of which {self.min_free_bytes} must stay free"
        )

    def make(self, num_bytes: int, keep: set[BlockKey], over: Path | None = None) -> bool:
        """Evict until a file of this size fits budget and floor; False, and nothing evicted, if it cannot.

        keep: blocks that must stay beside the pinned ones, with their ancestors and their checkpoints. The
        index is fresh.
        over: a file of the same size or about, whose room it gets.
        """
        if over:
            with suppress(FileNotFoundError):
                num_bytes = max(num_bytes - os.stat(over).st_size, 0)
        if self._short_bytes(num_bytes) > 0:
            self.remove_unfinished()
        if self._short_bytes(num_bytes) <= 0:
            return True
        entries = self._index.entries
        keep = keep | self._pins.keys()
        kept = with_ancestors(entries, keep)
        spare = sum(self._index.quarantined.values()) + sum(self._checkpoints(keep).values())
        spare += sum(entry.disk_bytes for key, entry in entries.items() if key not in kept)
        # At a start nothing is written: what can go then goes, though it be too little.
        if num_bytes and self._short_bytes(num_bytes) > spare:
            return False
        for path in self._victims(entries, keep):
            files.remove(path)
            self._index.forget(path)
            if self._short_bytes(num_bytes) <= 0:
                return True
        return False

    def _victims(self, entries: dict[BlockKey, Entry], keep: set[BlockKey]) -> Iterator[Path]:
        yield from self._index.quarantined
        yield from self._checkpoints(keep)
        for entry in victims(entries, keep, self._last_use):
            yield self._index.path(entry.key)

    def _checkpoints(self, keep: set[BlockKey]) -> dict[Path, int]:
        """Parts of checkpoints with their disk bytes: those together that belong together, oldest first."""
        kept = {key.hex for key in keep}
        parts = {p: n for p, n in self._index.checkpoints.items() if checkpoint_of(p) not in kept}
        latest: dict[str, int] = {}
        for path in parts:
            with suppress(OSError):
                used_ns = min(os.stat(path).st_mtime_ns, time.time_ns())
                latest[checkpoint_of(path)] = max(latest.get(checkpoint_of(path), 0), used_ns)
        order = sorted(parts, key=lambda path: (latest.get(checkpoint_of(path), 0), path))
        return {path: parts[path] for path in order}

    def _last_use(self, entry: Entry) -> int | None:
        try:
            used_ns = os.stat(self._index.path(entry.key)).st_mtime_ns
        except OSError:
            return None
        return used_ns if used_ns <= time.time_ns() else None  # a time in the future says nothing

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
                files.close(fd)

    def reserve(self, temp: Path, num_bytes: int, over: Path | None = None) -> int:
        """Make an unfinished file that has its full size, so that others count it, and its owner's lock.

        over: a file to make it of, where it is still there.
        """
        for folder in (temp.parent.parent, temp.parent):
            files.make_folder(folder)
        if over:
            with suppress(FileNotFoundError):
                os.rename(over, temp)
        fd = os.open(temp, os.O_RDWR | os.O_CREAT | (0 if over else os.O_EXCL), 0o600)
        try:
            self._index.look_again(temp.parent)
            if not files.lock_now(fd):
                raise OSError(errno.EAGAIN, "a new file is locked by another process", str(temp))
            os.ftruncate(fd, num_bytes)
        except OSError:
            files.close(fd)
            files.remove(temp)
            raise
        return fd
