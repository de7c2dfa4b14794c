"""One snapshot folder: how its files are opened, checked, put in place and taken away.

Owns the lock, the index, the room and what becomes of a bad file. Several processes may share a folder;
they meet in the file system only (a lock for what must not interleave, renames for the rest). It knows
neither chains of tokens nor what a file is for.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cache_store import files
from cache_store.block import Section, layout
from cache_store.errors import BadBlock, MissingBlock, NoKey, UnknownVersion
from cache_store.files import Contents
from cache_store.header import Header, SealedHeader, read_header
from cache_store.index import Index, text_in
from cache_store.key import BlockKey, TokenIds
from cache_store.keyring import Keyring
from cache_store.pins import Pins
from cache_store.quarantine import Quarantine
from cache_store.room import Room
from cache_store.seal import encrypted, open_header

log = logging.getLogger("cache_store")


class Folder:
    def __init__(
        self,
        root: Path,
        budget_bytes: int,
        min_free_bytes: int,
        quarantine_bytes: int,
        touch_every_s: float,
        keyring: Keyring | None,
    ) -> None:
        self.root = root
        self.keyring = keyring
        self.index = Index(root)
        self.pins = Pins(root)
        self.room = Room(root, self.index, self.pins, budget_bytes, min_free_bytes)
        self.quarantine = Quarantine(self.index, min(quarantine_bytes, budget_bytes // 10))
        self.read_only = False
        self._touch_every_ns = int(touch_every_s * 1e9)
        self.mutex = threading.RLock()
        self._lock_depth = 0
        self._unmoved: dict[BlockKey, tuple[int, int]] = {}  # bad files that could not be moved: inode, time
        self._reported: set[int | None] = set()
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self.locked():
                self.refresh()
                self.room.remove_unfinished()
                if not self.room.make(0, set()):
                    log.warning("pinned blocks exceed the budget, nothing is stored: %s", self.room)
        except OSError as error:
            self.read_only = True
            log.warning("snapshots in %s are for reading only until the next start: %s", root, error)
            with suppress(OSError):
                self.refresh()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude the other threads and processes on this folder; may be nested."""
        with self.mutex:
            if self._lock_depth:
                yield
                return
            with files.locked(self.root / "lock"):
                self._lock_depth += 1
                try:
                    yield
                finally:
                    self._lock_depth -= 1

    def refresh(self) -> None:
        """Bring the index up to date; blocks that are not what they should be go to quarantine."""
        with self.mutex:
            for path in self.index.refresh():
                with suppress(BadBlock), self.reading(BlockKey.from_hex(path.stem)):
                    pass

    @contextmanager
    def reading(self, key: BlockKey) -> Iterator[tuple[int, Header]]:
        """Open a block with its header checked. Any BadBlock raised inside moves the file to quarantine."""
        path = self.index.path(key)
        with opened(path) as (fd, status):
            try:
                if self._unmoved.get(key) == (status.st_ino, status.st_mtime_ns):
                    raise MissingBlock(path)
                yield fd, self.header(fd, path, key)
            except (MissingBlock, UnknownVersion, NoKey):
                raise
            except BadBlock as error:
                self._quarantine(key, status, error)
                raise
            except OSError as error:
                bad = BadBlock(path, "block file", "readable bytes", error)
                if error.errno == errno.EIO:  # the disk's fault; others (no memory, say) are not the block's
                    self._quarantine(key, status, bad)
                raise bad from error

    def header(self, fd: int, path: Path, key: BlockKey) -> Header:
        """The header of an open file, if it has this key; BadBlock otherwise."""
        header = read_header(fd, path)
        if isinstance(header, SealedHeader):
            header = open_header(header, self.keyring)
        if header.prelude.key != key:
            raise BadBlock(path, "key", key, header.prelude.key)
        return header

    def contents(
        self,
        key: BlockKey,
        parent: BlockKey | None,
        token_ids: TokenIds,
        sections: Sequence[Section],
        exact: bool,
        meta: Mapping[str, Any],
    ) -> Contents:
        """The file of a block, encrypted where there is a keyring.

        Raises ValueError for what does not fit the format, NoKey where the tenant has no key.
        """
        plain = layout(key, parent, token_ids, sections, exact, meta)
        if self.keyring is None:
            return Contents(sum(map(len, plain)), [plain])
        tenant = text_in(meta, "tenant")
        data_key = self.keyring.get(tenant)
        if data_key is None:
            raise NoKey(self.index.path(key), "key of its tenant", "one", "none")
        return encrypted(plain, meta, data_key)

    def touch(self, key: BlockKey, fd: int) -> None:
        """Note that a block is used."""
        now = time.time_ns()
        with self.mutex:
            self.index.touch(key, now)
        if not self.read_only and abs(now - os.fstat(fd).st_mtime_ns) >= self._touch_every_ns:
            with suppress(OSError):  # recency is a hint
                os.utime(fd, ns=(now, now))

    def place(
        self,
        path: Path,
        contents: Contents,
        keep: set[BlockKey],
        answer: Callable[[], bool | None],
        *,
        synced: bool = True,
        over: Path | None = None,
    ) -> bool:
        """Write a file, whole, or leave what is there; True if it stands there now.

        keep: blocks that must not be evicted for it, with their ancestors and checkpoints.
        answer: asked under the lock before room is made and again before the file is put in its place:
            None goes on, anything else is the answer of this call.
        synced: whether it outlives a power cut; without, this process alone, and what was torn is found by
            its checksums.
        over: a file in the same folder that is given up for it: its memory and its place on disk are used.
        Raises OSError where the disk fails, ENOSPC where budget or free-disk floor cannot be held.
        """
        num_bytes = contents.num_bytes
        temp = path.with_name(f".{path.stem}.{os.getpid()}.{secrets.token_hex(8)}.tmp")
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self.locked():
            self.refresh()
            known = answer()
            if known is not None:
                return known
            if not self.room.make(num_bytes, keep, over):
                raise OSError(errno.ENOSPC, f"{num_bytes} bytes do not fit: {self.room}")
            fd = self.room.reserve(temp, num_bytes, over)
        placed = False
        try:
            files.write(fd, contents)
            if synced:
                os.fsync(fd)
            with self.locked():
                known = answer()
                if known is not None:  # another process was first
                    return known
                os.rename(temp, path)
                placed = True
                self.index.look_again(path.parent)
            if synced:
                files.sync_folder(path.parent)
        except BaseException:
            if placed:
                with suppress(OSError):
                    files.remove(path)
            raise
        finally:
            if not placed:
                with suppress(OSError):
                    files.remove(temp)
            files.close(fd)
        self._reported.clear()
        return True

    def remove(self, path: Path) -> bool:
        """Delete a file; False if it is not there."""
        with self.locked():
            removed = files.remove(path)
            self.index.look_again(path.parent)
        return removed

    def remove_apart(self, unwanted: Callable[[Path], bool]) -> None:
        """Delete what lies in quarantine or belongs to a checkpoint, and is unwanted."""
        with self.locked():
            self.refresh()
            for path in [*self.index.quarantined, *self.index.checkpoints]:
                if unwanted(path):
                    self.remove(path)

    def report(self, kind: int | None, message: str) -> None:
        """Warn once per kind of failure until a write succeeds."""
        if kind not in self._reported:
            self._reported.add(kind)
            log.warning("%s", message)

    def _quarantine(self, key: BlockKey, status: os.stat_result, why: BadBlock) -> None:
        """Move a bad block away, unless another process has put a new one in its place meanwhile."""
        path = self.index.path(key)
        log.warning("bad block: %s", why)
        try:
            with self.locked():
                if os.stat(path, follow_symlinks=False).st_ino == status.st_ino:
                    self.quarantine.take(key, status.st_size)
        except FileNotFoundError:
            return
        except OSError as error:
            self._unmoved[key] = (status.st_ino, status.st_mtime_ns)
            log.warning("bad block %s stays where it is, and is not used: %s", path, error)


@contextmanager
def opened(path: Path) -> Iterator[tuple[int, os.stat_result]]:
    """A file of ours, open for reading. Raises MissingBlock, or BadBlock where it cannot be opened."""
    try:
        fd = os.open(path, files.READ_FLAGS)
    except FileNotFoundError:
        raise MissingBlock(path) from None
    except OSError as error:
        raise BadBlock(path, "block file", "a file that opens", error) from error
    try:
        try:
            status = os.fstat(fd)
        except OSError as error:
            raise BadBlock(path, "block file", "a file that tells its size", error) from error
        yield fd, status
    finally:
        files.close(fd)
