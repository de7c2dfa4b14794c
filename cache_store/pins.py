"""Pins: blocks that no eviction may take, with every block before them.

A pin is an empty file under the block's key, so that every process sees it and it outlives them all. It
may stand for a block that is not stored: once that block is written, it is pinned.
"""

from __future__ import annotations

import os
from pathlib import Path

from cache_store import files
from cache_store.key import KEY_BYTES, BlockKey


class Pins:
    def __init__(self, root: Path) -> None:
        self.folder = root / "pins"

    def keys(self) -> set[BlockKey]:
        try:
            with os.scandir(self.folder) as items:
                names = [item.name for item in items]
        except FileNotFoundError:
            return set()
        return {BlockKey.from_hex(name) for name in names if _is_key(name)}

    def add(self, key: BlockKey) -> None:
        files.make_folder(self.folder)
        files.close(os.open(self.folder / key.hex, os.O_WRONLY | os.O_CREAT, 0o600))
        files.sync_folder(self.folder)

    def remove(self, key: BlockKey) -> bool:
        """False where there is no such pin."""
        return files.remove(self.folder / key.hex)


def _is_key(name: str) -> bool:
    return len(name) == 2 * KEY_BYTES and not set(name) - set("0123456789abcdef")
