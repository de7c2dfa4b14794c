"""The snapshot store: which blocks are kept in a folder, and what becomes of those that are bad.

Owns policy: budget, eviction, atomic replacement, quarantine. Several processes may share a folder;
they meet in the file system only (a lock for what must not interleave, renames for the rest).
It knows no model and not what the bytes mean.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cache_store import block, files
from cache_store.block import Section
from cache_store.errors import BadBlock, MissingBlock, UnknownVersion
from cache_store.header import BlockInfo, Header, read_header
from cache_store.index import Entry, Index
from cache_store.key import BlockKey, TokenIds, as_token_ids
from cache_store.pins import Pins
from cache_store.quarantine import Quarantine
from cache_store.room import Room

log = logging.getLogger(__name__)

# With these at start the folder serves reading until the process starts again.
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT}

# Two keep a core copying while another one hashes; more gain nothing on page cache or NVMe.
_READERS = 2


@dataclass(frozen=True)
class Usage:
    """Blocks, their bytes on disk, and the prefill seconds that they stand for."""

    num_blocks: int = 0
    disk_bytes: int = 0
    prefill_s: float = 0.0


class SnapshotStore:
    """Blocks of KV in a folder, under a byte budget.

    folder: made if absent; one that cannot be written is used for reading only.
    budget_bytes: blocks, unfinished files and quarantine together, each rounded up to 4096, never exceed it
        (where it was lowered below what is pinned, nothing is written any more).
    min_free_bytes: a write that would leave less than this free on the disk evicts first, or is not made.
    quarantine_bytes: bad blocks kept to be looked at, oldest removed first (at most a tenth of the budget).
    touch_every_s: a block's use is noted on disk at most this often.
    """

    def __init__(
        self,
        folder: Path,
        budget_bytes: int,
        min_free_bytes: int = 1 << 30,
        *,
        quarantine_bytes: int = 64 << 20,
        touch_every_s: float = 60.0,
    ) -> None:
        if budget_bytes < 0 or min_free_bytes < 0:
            raise ValueError(
                f"budget {budget_bytes} and free-disk floor {min_free_bytes} must not be negative"
            )
        self.folder = folder
        self.read_only = False
        self._touch_every_ns = int(touch_every_s * 1e9)
        self._index = Index(folder)
        self._pins = Pins(folder)
        self._bad_blocks = Quarantine(self._index, min(quarantine_bytes, budget_bytes // 10))
        self._room = Room(folder, self._index, self._pins, budget_bytes, min_free_bytes)
        self._mutex = threading.RLock()
        self._lock_depth = 0
        self._unmoved: dict[BlockKey, tuple[int, int]] = {}  # bad files that could not be moved: inode, time
        self._reported: set[int | None] = set()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self._locked():
                self._refresh()
                self._room.remove_unfinished()
                if not self._room.make(0, set()):
                    log.warning("pinned blocks exceed the budget, nothing is stored: %s", self._room)
        except OSError as error:
            if error.errno not in _READ_ONLY:
                raise
            self.read_only = True
            log.warning("snapshots in %s are for reading only: %s", folder, error)
            self._refresh()

    @property
    def total_bytes(self) -> int:
        """Disk bytes that count against the budget now, other processes' files included."""
        with self._mutex:
            self._refresh()
            return self._index.total_bytes

    def entries(self) -> list[Entry]:
        """The stored blocks, in no order."""
        with self._mutex:
            self._refresh()
            return list(self._index.entries.values())

    def usage(self) -> dict[str, Usage]:
        """What the blocks of each model take and save, by the model that their metadata names."""
        usage: dict[str, Usage] = {}
        for entry in self.entries():
            known = usage.get(entry.model, Usage())
            usage[entry.model] = Usage(
                known.num_blocks + 1, known.disk_bytes + entry.disk_bytes, known.prefill_s + entry.prefill_s
            )
        return usage

    def match(self, keys: Sequence[BlockKey], blocks: Sequence[npt.NDArray[Any]]) -> int:
        """How many leading blocks of a chain are stored; marks them used.

        Each is confirmed on its token ids and its parent; one that differs goes to quarantine.
        keys, blocks: as given to and by chain_keys, from the root of the chain on.
        """
        for position, (key, ids) in enumerate(zip(keys, blocks, strict=True)):
            wanted = as_token_ids(ids)
            try:
                with self._reading(key) as (fd, header):
                    if position and header.prelude.parent != keys[position - 1]:
                        raise BadBlock(header.path, "parent", keys[position - 1], header.prelude.parent)
                    self._confirm(header, wanted)
                    self._touch(key, fd)
            except BadBlock:
                return position
        return len(keys)

    def info(self, key: BlockKey) -> BlockInfo | None:
        """What the block's header says; None for a miss. Reads no payload."""
        try:
            with self._reading(key) as (_, header):
                return header.info
        except BadBlock:
            return None

    def read(self, key: BlockKey, into: Sequence[memoryview]) -> BlockInfo:
        """Fill one buffer per section, in the order they were written, and check every byte.

        into: writable contiguous buffers of exactly the sections' sizes; after an error their contents
        are undefined. Raises BadBlock (MissingBlock where there is no file): the block is a miss from
        then on. Raises ValueError for a buffer that cannot be written.
        """
        views = [memoryview(buffer) for buffer in into]
        if any(view.readonly or not view.c_contiguous for view in views):
            raise ValueError("buffers to read into must be writable and contiguous")
        views = [view.cast("B") if view.nbytes else memoryview(bytearray()) for view in views]
        with self._reading(key) as (fd, header):
            info = header.info
            block.read_payload(fd, header, views)
            return info

    def read_each(
        self, keys: Sequence[BlockKey], into: Iterable[Sequence[memoryview]]
    ) -> Iterator[BlockInfo]:
        """Read blocks as `read` does, some at a time ahead of the caller, and give them in order.

        into: the buffers of each block; asked for shortly before they are filled. Raises what `read`
        raises, at the block that is bad; the buffers from that block on are undefined then.
        """
        pool = ThreadPoolExecutor(_READERS, "snapshots")
        ahead: deque[Future[BlockInfo]] = deque()
        try:
            for key, buffers in zip(keys, into, strict=True):
                ahead.append(pool.submit(self.read, key, buffers))
                if len(ahead) > 2 * _READERS:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            # No thread may still write into the buffers once the caller has control of them again.
            pool.shutdown(cancel_futures=True)

    def write(
        self,
        key: BlockKey,
        parent: BlockKey | None,
        tokens: npt.NDArray[Any],
        sections: Sequence[Section],
        exact: bool,
        meta: Mapping[str, Any],
    ) -> bool:
        """Store a block, all of it or nothing; True if it is stored now, durably.

        A block that is already there is not written again, except that an exact one replaces a
        continued one. Of the metadata the store itself reads `model`, `tenant` (texts) and `prefill_s`
        (what computing this block took: a block is worth its seconds per byte).
        False where budget or free-disk floor cannot be held, the parent is not stored, the folder is
        read-only, a newer format version holds the place, or the disk fails
        (logged once per kind of failure).
        Raises ValueError for sections or metadata that do not fit the format; no OSError.
        """
        ids = as_token_ids(tokens)
        buffers = block.layout(key, parent, ids, sections, exact, meta)
        if self.read_only:
            return False
        try:
            stored = self._stored(key, ids, exact)
            if stored is None:
                stored = self._write(key, parent, ids, exact, buffers)
        except OSError as error:
            self._report(error.errno, f"snapshot {key} was not stored: {error}")
            return False
        if stored:
            self._reported.clear()
        return stored

    def pin(self, key: BlockKey) -> None:
        """Keep a block and every block before it from eviction, in every process, until `unpin`.

        A block that is not stored yet is pinned once it is. Raises OSError where the folder cannot be
        written.
        """
        with self._locked():
            self._pins.add(key)

    def unpin(self, key: BlockKey) -> bool:
        """Let a block be evicted again; False where it was not pinned."""
        with self._locked():
            return self._pins.remove(key)

    def pins(self) -> set[BlockKey]:
        """The keys that were pinned; the blocks before them are pinned with them."""
        return self._pins.keys()

    def remove(self, key: BlockKey) -> bool:
        """Delete a block and its pin; False if it is not there. Descendants stay until they are evicted."""
        with self._locked():
            self._pins.remove(key)
            path = self._index.path(key)
            removed = files.remove(path)
            self._index.look_again(key.hex[:2])
        return removed

    def remove_tenant(self, tenant: str) -> int:
        """Delete every block and pin of a tenant, and what of its is in quarantine; how many blocks went.

        A quarantined file that does not say whose it is goes too. A write that another process has begun
        may still come after. Raises OSError where a file cannot be removed.
        """
        with self._locked():
            self._refresh()
            owned = [entry.key for entry in self._index.entries.values() if entry.tenant == tenant]
            for key in owned:
                self.remove(key)
            self._bad_blocks.remove_tenant(tenant)
        return len(owned)

    # Writing

    def _stored(self, key: BlockKey, ids: TokenIds, exact: bool) -> bool | None:
        """True: the disk holds this block or a better one. False: it may not be replaced. None: write it."""
        try:
            with self._reading(key) as (fd, header):
                self._confirm(header, ids)
                if exact and not header.prelude.exact:
                    return None
                self._touch(key, fd)
                return True
        except UnknownVersion as error:
            self._report(None, f"snapshot not stored: {error}")
            return False
        except BadBlock:
            return None

    def _write(
        self, key: BlockKey, parent: BlockKey | None, ids: TokenIds, exact: bool, buffers: list[memoryview]
    ) -> bool:
        num_bytes = sum(view.nbytes for view in buffers)
        path = self._index.path(key)
        temp = path.with_name(f".{key}.{os.getpid()}.{secrets.token_hex(8)}.tmp")
        keep = {key, parent} if parent else {key}
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._locked():
            self._refresh()
            if parent and not os.path.lexists(self._index.path(parent)):
                return False  # no match could ever reach it
            if not self._room.make(num_bytes, keep):
                self._report(errno.ENOSPC, f"snapshot {key} of {num_bytes} bytes not stored: {self._room}")
                return False
            fd = self._room.reserve(temp, num_bytes)
        placed = False
        try:
            files.write_at(fd, buffers, 0)
            os.fsync(fd)
            with self._locked():
                stored = self._stored(key, ids, exact)
                if stored is not None:  # another process was first
                    return stored
                os.rename(temp, path)
                placed = True
                self._index.look_again(key.hex[:2])
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
            os.close(fd)
        return True

    # Reading

    @contextmanager
    def _reading(self, key: BlockKey) -> Iterator[tuple[int, Header]]:
        """Open a block with its header checked. Any BadBlock raised inside moves the file to quarantine."""
        path = self._index.path(key)
        try:
            fd = os.open(path, files.READ_FLAGS)
        except FileNotFoundError:
            raise MissingBlock(path) from None
        except OSError as error:
            raise BadBlock(path, "block file", "a file that opens", error) from error
        try:
            status = os.fstat(fd)
            if self._unmoved.get(key) == (status.st_ino, status.st_mtime_ns):
                raise MissingBlock(path)
            header = read_header(fd, path)
            if header.prelude.key != key:
                raise BadBlock(path, "key", key, header.prelude.key)
            yield fd, header
        except (MissingBlock, UnknownVersion):
            raise
        except BadBlock as error:
            self._quarantine(key, fd, error)
            raise
        except OSError as error:
            bad = BadBlock(path, "block file", "readable bytes", error)
            if error.errno == errno.EIO:  # the disk's fault; others (no memory, say) are not the block's
                self._quarantine(key, fd, bad)
            raise bad from error
        finally:
            os.close(fd)

    @staticmethod
    def _confirm(header: Header, wanted: TokenIds) -> None:
        if not np.array_equal(header.token_ids, wanted):
            raise BadBlock(header.path, "token ids", wanted[:8].tolist(), header.token_ids[:8].tolist())

    def _touch(self, key: BlockKey, fd: int) -> None:
        now = time.time_ns()
        with self._mutex:
            self._index.touch(key, now)
        if not self.read_only and abs(now - os.fstat(fd).st_mtime_ns) >= self._touch_every_ns:
            with suppress(OSError):  # recency is a hint
                os.utime(fd, ns=(now, now))

    def _quarantine(self, key: BlockKey, fd: int, why: BadBlock) -> None:
        """Move a bad block away, unless another process has put a new one in its place meanwhile."""
        path, status = self._index.path(key), os.fstat(fd)
        log.warning("bad block: %s", why)
        try:
            with self._locked():
                if os.stat(path, follow_symlinks=False).st_ino == status.st_ino:
                    self._bad_blocks.take(key, status.st_size)
        except FileNotFoundError:
            return
        except OSError as error:
            self._unmoved[key] = (status.st_ino, status.st_mtime_ns)
            log.warning("bad block %s stays where it is, and is not used: %s", path, error)

    # The folder

    def _refresh(self) -> None:
        for path in self._index.refresh():
            with suppress(BadBlock), self._reading(BlockKey.from_hex(path.stem)):
                pass

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclude the other threads and processes on this folder; may be nested."""
        with self._mutex:
            if self._lock_depth:
                yield
                return
            with files.locked(self.folder / "lock"):
                self._lock_depth += 1
                try:
                    yield
                finally:
                    self._lock_depth -= 1

    def _report(self, kind: int | None, message: str) -> None:
        """Warn once per kind of failure until a write succeeds."""
        if kind not in self._reported:
            self._reported.add(kind)
            log.warning("%s", message)
