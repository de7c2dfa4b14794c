"""What is on disk: blocks, unfinished files and quarantined ones, with their sizes and recency.

A cache of the folder and nothing more: rebuilt from names, sizes, times and the header of each file,
and brought up to date by looking again at the folders whose time has changed, which is
how the work of other processes is seen. Not thread-safe; it removes nothing.

    <root>/v1/<first two hex digits>/<key>.llkv          a block
    <root>/v1/<first two hex digits>/.<key>.<pid>.<random>.tmp   a block being written
    <root>/quarantine/<key>.<time>.llkv                  a bad block, kept to be looked at
    <root>/checkpoints/<key>.<part>.llkv                 a part of a prefill that is under way
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cache_store import files
from cache_store.errors import BadBlock, UnknownVersion
from cache_store.header import FORMAT_VERSION, SealedHeader, read_header, round_up
from cache_store.key import BlockKey

SUFFIX = ".llkv"
_BLOCK_NAME = re.compile(r"([0-9a-f]{32})\.llkv")
_TEMP_NAME = re.compile(r"\.[0-9a-f]{32}\.\d+\.[0-9a-f]+\.tmp")
_SHARDS = [f"{number:02x}" for number in range(256)]
_DISK_BLOCK = 4096
# Prefill seconds per token of a block that does not say, and the tokens for which an attachment counts.
_UNTOLD_TOKEN_S = 0.001
_ATTACHED_TOKENS = 128
# A folder changed this recently may change again within one tick of its clock: it is looked at again.
_UNSETTLED_NS = 2_000_000_000


def disk_bytes(num_bytes: int) -> int:
    """What a file of this size takes of the budget."""
    return round_up(num_bytes, _DISK_BLOCK)


def checkpoint_of(part: Path) -> str:
    """The hexadecimal key of the checkpoint that a file is a part of."""
    return part.name.partition(".")[0]


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
    model: str = ""
    tenant: str = ""
    attached: str = ""
    """The name under which it is attached to its parent; empty for a block of tokens."""
    prefill_s: float = 0.0
    """What computing it took, and what a hit therefore saves."""
    key_id: bytes = b""
    """Of the key that it is encrypted with; empty for a plain one."""


@dataclass(slots=True)
class _Folder:
    changed: tuple[int, int] | None = None
    """Inode and time of the folder at the last look; None: look again."""
    entries: dict[BlockKey, Entry] = field(default_factory=dict)
    others: dict[Path, int] = field(default_factory=dict)
    """Unfinished or quarantined files with their disk bytes."""
    disk_bytes: int = 0

    def clear(self) -> None:
        """It is not there."""
        self.changed, self.disk_bytes = None, 0
        self.entries.clear()
        self.others.clear()


class Index:
    def __init__(self, root: Path) -> None:
        self.blocks_folder = root / f"v{FORMAT_VERSION}"
        self.quarantine_folder = root / "quarantine"
        self.checkpoints_folder = root / "checkpoints"
        self._shards = {name: _Folder() for name in _SHARDS}
        self._quarantine = _Folder()
        self._checkpoints = _Folder()
        self._folders = {self.blocks_folder / name: shard for name, shard in self._shards.items()} | {
            self.quarantine_folder: self._quarantine,
            self.checkpoints_folder: self._checkpoints,
        }

    def path(self, key: BlockKey) -> Path:
        name = key.hex
        return self.blocks_folder / name[:2] / (name + SUFFIX)

    @property
    def total_bytes(self) -> int:
        """Everything that counts against the budget: blocks, unfinished files, checkpoints, quarantine."""
        return sum(folder.disk_bytes for folder in self._folders.values())

    @property
    def entries(self) -> dict[BlockKey, Entry]:
        return {key: entry for shard in self._shards.values() for key, entry in shard.entries.items()}

    @property
    def unfinished(self) -> list[Path]:
        """Files being written, by the living or the dead."""
        folders = (*self._shards.values(), self._checkpoints)
        return [path for folder in folders for path in folder.others if path.name.startswith(".")]

    @property
    def checkpoints(self) -> dict[Path, int]:
        """The parts of checkpoints with their disk bytes, by name."""
        parts = sorted(self._checkpoints.others.items())
        return {path: num_bytes for path, num_bytes in parts if not path.name.startswith(".")}

    @property
    def quarantined(self) -> dict[Path, int]:
        """Bad blocks with their disk bytes, oldest first."""
        return dict(sorted(self._quarantine.others.items(), key=lambda item: item[0].name.split(".")[1:2]))

    def touch(self, key: BlockKey, used_ns: int) -> None:
        entry = self._shards[key.hex[:2]].entries.get(key)
        if entry:
            entry.used_ns = max(entry.used_ns, used_ns)

    def look_again(self, folder: Path) -> None:
        """This folder was changed by us: do not trust its time."""
        self._folders[folder].changed = None

    def add_quarantined(self, path: Path, num_bytes: int) -> None:
        self._quarantine.others[path] = disk_bytes(num_bytes)
        self._quarantine.disk_bytes += disk_bytes(num_bytes)

    def refresh(self) -> list[Path]:
        """Bring the index up to date with the disk; returns the files that are not what their name says.

        Raises OSError where a folder cannot be listed: what it holds is not known then.
        """
        bad: list[Path] = []
        try:
            names = set(os.listdir(self.blocks_folder))
        except FileNotFoundError:
            names = set()
        for path, folder in self._folders.items():
            if path.parent != self.blocks_folder or path.name in names:
                self._refresh(path, folder, bad)
            else:
                folder.clear()
        return bad

    def forget(self, path: Path) -> None:
        """A file was removed: take it out without looking at its folder again."""
        folder = self._folders[path.parent]
        match = _BLOCK_NAME.fullmatch(path.name)
        entry = folder.entries.pop(BlockKey.from_hex(match[1]), None) if match else None
        folder.disk_bytes -= entry.disk_bytes if entry else folder.others.pop(path, 0)

    def _refresh(self, path: Path, folder: _Folder, bad: list[Path]) -> None:
        now = time.time_ns()
        try:
            status = os.stat(path)
        except FileNotFoundError:
            folder.clear()
            return
        changed = (status.st_ino, status.st_mtime_ns)
        if folder.changed == changed:
            return
        has_blocks, settled = path.parent == self.blocks_folder, now - status.st_mtime_ns > _UNSETTLED_NS
        with os.scandir(path) as items:
            known, folder.entries, folder.others = folder.entries, {}, {}
            folder.changed = None
            for item in items:
                try:
                    size = item.stat(follow_symlinks=False).st_size
                    if not has_blocks or _TEMP_NAME.fullmatch(item.name):
                        folder.others[path / item.name] = disk_bytes(size)
                    elif match := _BLOCK_NAME.fullmatch(item.name):
                        entry = self._entry(BlockKey.from_hex(match[1]), item, known)
                        folder.entries[entry.key] = entry
                except FileNotFoundError:
                    continue  # removed by another process meanwhile
                except (BadBlock, OSError):  # whoever opens it decides which
                    bad.append(path / item.name)
                    folder.others[path / item.name] = disk_bytes(size)
        folder.disk_bytes = sum(entry.disk_bytes for entry in folder.entries.values()) + sum(
            folder.others.values()
        )
        if settled:
            folder.changed = changed

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
        fd = os.open(path, files.READ_FLAGS)
        try:
            header = read_header(fd, path)
            meta = header.meta
        except UnknownVersion:
            return Entry(key, None, False, 0, disk_bytes(status.st_size), used_ns, identity)
        finally:
            files.close(fd)
        prelude = header.prelude
        if prelude.key != key:
            raise BadBlock(path, "key", key, prelude.key)
        return Entry(
            key,
            prelude.parent,
            prelude.exact,
            prelude.num_tokens,
            disk_bytes(status.st_size),
            used_ns,
            identity,
            text_in(meta, "model"),
            text_in(meta, "tenant"),
            text_in(meta, "attached"),
            _seconds(meta, prelude.num_tokens),
            header.key_id if isinstance(header, SealedHeader) else b"",
        )


def text_in(meta: Mapping[str, Any], name: str) -> str:
    """A text of the metadata; empty where there is none."""
    value = meta.get(name, "")
    return value if isinstance(value, str) else ""


def _seconds(meta: dict[str, Any], num_tokens: int) -> float:
    value = meta.get("prefill_s")
    if isinstance(value, int | float) and math.isfinite(value) and value > 0:
        return float(value)
    return _UNTOLD_TOKEN_S * (num_tokens or _ATTACHED_TOKENS)
