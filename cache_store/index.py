"""What is on disk: blocks, unfinished files and quarantined ones, with their sizes and recency.

A cache of the folder and nothing more: rebuilt from names, sizes, times and the first 128 bytes of
each file, and brought up to date by looking again at the folders whose time has changed, which is
how the work of other processes is seen. Not thread-safe; it removes nothing.

    <root>/v1/<first two hex digits>/<key>.llkv          a block
    <root>/v1/<first two hex digits>/.<key>.<pid>.<random>.tmp   a block being written
    <root>/quarantine/<key>.<time>.llkv                  a bad block, kept to be looked at
"""

from __future__ import annotations

import heapq
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cache_store.errors import BadBlock, UnknownVersion
from cache_store.files import READ_FLAGS
from cache_store.header import FORMAT_VERSION, read_prelude, round_up
from cache_store.key import BlockKey

SUFFIX = ".llkv"
_BLOCK_NAME = re.compile(r"([0-9a-f]{32})\.llkv")
_TEMP_NAME = re.compile(r"\.[0-9a-f]{32}\.\d+\.[0-9a-f]+\.tmp")
_SHARDS = [f"{number:02x}" for number in range(256)]
_DISK_BLOCK = 4096
# A folder changed this recently may change again within one tick of its clock: it is looked at again.
_UNSETTLED_NS = 2_000_000_000


def disk_bytes(num_bytes: int) -> int:
    """What a file of this size takes of the budget."""
    return round_up(num_bytes, _DISK_BLOCK)


@dataclass(slots=True)
class Entry:
    """A stored block as the index knows it."""

    key: BlockKey
    parent: BlockKey | None
    exact: bool
    num_tokens: int
    disk_bytes: int
    used_ns: int
    """Last use, nanoseconds since the epoch."""
    identity: tuple[int, int, int]


@dataclass(slots=True)
class _Folder:
    changed: tuple[int, int] | None = None
    """Inode and time of the folder at the last look; None: look again."""
    entries: dict[BlockKey, Entry] = field(default_factory=dict)
    others: dict[Path, int] = field(default_factory=dict)
    """Unfinished or quarantined files with their disk bytes."""
    disk_bytes: int = 0


class Index:
    def __init__(self, root: Path) -> None:
        self.blocks_folder = root / f"v{FORMAT_VERSION}"
        self.quarantine_folder = root / "quarantine"
        self._shards = {name: _Folder() for name in _SHARDS}
        self._quarantine = _Folder()

    def path(self, key: BlockKey) -> Path:
        name = key.hex
        return self.blocks_folder / name[:2] / (name + SUFFIX)

    @property
    def total_bytes(self) -> int:
        """Everything that counts against the budget: blocks, unfinished files, quarantine."""
        return self._quarantine.disk_bytes + sum(shard.disk_bytes for shard in self._shards.values())

    @property
    def entries(self) -> dict[BlockKey, Entry]:
        return {key: entry for shard in self._shards.values() for key, entry in shard.entries.items()}

    @property
    def unfinished(self) -> list[Path]:
        return [path for shard in self._shards.values() for path in shard.others]

    @property
    def quarantined(self) -> dict[Path, int]:
        """Bad blocks with their disk bytes, oldest first."""
        return dict(sorted(self._quarantine.others.items(), key=lambda item: item[0].name.split(".")[1:2]))

    def touch(self, key: BlockKey, used_ns: int) -> None:
        entry = self._shards[key.hex[:2]].entries.get(key)
        if entry:
            entry.used_ns = max(entry.used_ns, used_ns)

    def look_again(self, shard: str) -> None:
        """The folder of this name was changed by us: do not trust its time."""
        self._shards[shard].changed = None

    def add_quarantined(self, path: Path, num_bytes: int) -> None:
        self._quarantine.others[path] = disk_bytes(num_bytes)
        self._quarantine.disk_bytes += disk_bytes(num_bytes)

    def refresh(self) -> list[Path]:
        """Bring the index up to date with the disk; returns the files that are not what their name says."""
        bad: list[Path] = []
        for name, shard in self._shards.items():
            self._refresh(self.blocks_folder / name, shard, bad)
        self._refresh(self.quarantine_folder, self._quarantine, bad)
        return bad

    def forget(self, path: Path) -> None:
        """A file was removed: take it out without looking at its folder again."""
        folder = self._quarantine if path.parent == self.quarantine_folder else self._shards[path.parent.name]
        match = _BLOCK_NAME.fullmatch(path.name)
        entry = folder.entries.pop(BlockKey.from_hex(match[1]), None) if match else None
        folder.disk_bytes -= entry.disk_bytes if entry else folder.others.pop(path, 0)

    def leaves(self, keep: set[BlockKey]) -> Iterator[Entry]:
        """Blocks in the order to evict them: never one with a stored child, then least recently used.

        The consumer removes each block it is given; a block whose last child went becomes a leaf.
        Blocks in `keep` and their ancestors are not given.
        """
        entries = self.entries
        num_children = Counter(entry.parent for entry in entries.values())
        order = [
            (entry.used_ns, key)
            for key, entry in entries.items()
            if not num_children[key] and key not in keep
        ]
        heapq.heapify(order)
        while order:
            used_ns, key = heapq.heappop(order)
            entry = entries[key]
            latest = self._last_use(entry)
            if latest is not None and latest > used_ns:  # used by another process since it was listed
                entry.used_ns = latest
                heapq.heappush(order, (latest, key))
                continue
            yield entry
            parent = entry.parent
            num_children[parent] -= 1
            if parent in entries and parent not in keep and not num_children[parent]:
                heapq.heappush(order, (entries[parent].used_ns, parent))

    def evictable_bytes(self, keep: set[BlockKey]) -> int:
        """What evicting every block would free, but for `keep` and its ancestors."""
        entries = self.entries
        kept: set[BlockKey] = set()
        for key in keep:
            link: BlockKey | None = key
            while link in entries and link not in kept:
                kept.add(link)
                link = entries[link].parent
        return sum(entry.disk_bytes for key, entry in entries.items() if key not in kept)

    def _last_use(self, entry: Entry) -> int | None:
        try:
            used_ns = os.stat(self.path(entry.key)).st_mtime_ns
        except OSError:
            return None
        return used_ns if used_ns <= time.time_ns() else None  # a time in the future says nothing

    def _refresh(self, path: Path, folder: _Folder, bad: list[Path]) -> None:
        now = time.time_ns()
        try:
            status = os.stat(path)
        except FileNotFoundError:
            folder.changed, folder.disk_bytes = None, 0
            folder.entries.clear()
            folder.others.clear()
            return
        changed = (status.st_ino, status.st_mtime_ns)
        if folder.changed == changed:
            return
        known, folder.entries, folder.others = folder.entries, {}, {}
        with os.scandir(path) as items:
            for item in items:
                try:
                    size = item.stat(follow_symlinks=False).st_size
                    if path == self.quarantine_folder or _TEMP_NAME.fullmatch(item.name):
                        folder.others[path / item.name] = disk_bytes(size)
                    elif match := _BLOCK_NAME.fullmatch(item.name):
                        entry = self._entry(BlockKey.from_hex(match[1]), item, known)
                        folder.entries[entry.key] = entry
                except FileNotFoundError:
                    continue  # removed by another process meanwhile
                except BadBlock:
                    bad.append(path / item.name)
                    folder.others[path / item.name] = disk_bytes(size)
        folder.disk_bytes = sum(entry.disk_bytes for entry in folder.entries.values()) + sum(
            folder.others.values()
        )
        folder.changed = changed if now - status.st_mtime_ns > _UNSETTLED_NS else None

    def _entry(self, key: BlockKey, item: os.DirEntry[str], known: dict[BlockKey, Entry]) -> Entry:
        status = item.stat(follow_symlinks=False)
        identity = (status.st_ino, status.st_size, status.st_mtime_ns)
        old = known.get(key)
        if old and old.identity == identity:
            return old
        # A time in the future (the clock was set back) counts as now, or the block would stay for ever.
        used_ns = min(status.st_mtime_ns, time.time_ns())
        if old:
            used_ns = max(used_ns, old.used_ns)
        path = Path(item.path)
        fd = os.open(path, READ_FLAGS)
        try:
            prelude = read_prelude(fd, path)
        except UnknownVersion:
            return Entry(key, None, False, 0, disk_bytes(status.st_size), used_ns, identity)
        finally:
            os.close(fd)
        if prelude.key != key:
            raise BadBlock(path, "key", key, prelude.key)
        size = disk_bytes(status.st_size)
        return Entry(key, prelude.parent, prelude.exact, prelude.num_tokens, size, used_ns, identity)
