"""Bad blocks, kept apart to be looked at, oldest removed first where they grow too many.

Everything here runs under the store's lock.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from cache_store import files
from cache_store.errors import BadBlock
from cache_store.header import AnyHeader, SealedHeader, read_header
from cache_store.index import SUFFIX, Index, text_in
from cache_store.key import BlockKey


class Quarantine:
    def __init__(self, index: Index, max_bytes: int) -> None:
        self._index = index
        self._max_bytes = max_bytes

    def take(self, key: BlockKey, num_bytes: int) -> None:
        """Move a block out of its place."""
        path = self._index.path(key)
        target = self._index.quarantine_folder / f"{key}.{time.time_ns()}{SUFFIX}"
        files.make_folder(target.parent)
        os.rename(path, target)
        self._index.forget(path)
        self._index.add_quarantined(target, num_bytes)
        kept = self._index.quarantined
        while sum(kept.values()) > self._max_bytes:
            oldest = next(iter(kept))
            files.remove(oldest)
            self._index.forget(oldest)
            del kept[oldest]


def tenant_of(path: Path) -> str | None:
    """Whose a file of ours is; None where its header does not say."""
    header = _header_of(path)
    return text_in(header.meta, "tenant") if header else None


def is_encrypted(path: Path) -> bool:
    """Whether a file of ours says that it is."""
    return isinstance(_header_of(path), SealedHeader)


def _header_of(path: Path) -> AnyHeader | None:
    """None where there is none that can be read."""
    try:
        fd = os.open(path, files.READ_FLAGS)
    except OSError:
        return None
    try:
        return read_header(fd, path)
    except (BadBlock, OSError):
        return None
    finally:
        files.close(fd)
