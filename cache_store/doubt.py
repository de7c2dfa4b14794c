"""Blocks whose bytes are as they were written and which are wrong all the same: what follows says so."""

from __future__ import annotations

import os
from contextlib import suppress

from cache_store.errors import BadBlock
from cache_store.key import BlockKey
from cache_store.store import SnapshotStore


def quarantine_chain(store: SnapshotStore, root: BlockKey, what: str, expected: object, found: object) -> int:
    """Move a chain's first block to quarantine, and all that was built on it; how many blocks went.

    It is logged once, in the words of a BadBlock. Where nothing may be written the first block stays where it
    is and is a miss from then on, and so is all that needs it. The shared tier is not asked for any of it.
    """
    store.distrust(root)
    folder, num_moved = store._folder, 0
    # Children first: a writer that comes between finds the first block, or none of them.
    for key in [] if store.read_only else reversed(_descendants(store, root)):
        with suppress(OSError), folder.locked():
            folder.quarantine.take(key, os.stat(folder.index.path(key)).st_size)
            num_moved += 1
    with suppress(BadBlock), folder.reading(root) as (_, header):
        num_moved += not store.read_only
        raise BadBlock(header.path, what, expected, found)
    return num_moved


def _descendants(store: SnapshotStore, root: BlockKey) -> list[BlockKey]:
    """Every stored block after a first one, parents before their children."""
    children: dict[BlockKey | None, list[BlockKey]] = {}
    for entry in store.entries():
        children.setdefault(entry.parent, []).append(entry.key)
    found = [root]
    for key in found:
        # A forged chain may be a ring.
        found += [child for child in children.pop(key, []) if child != root]
    return found[1:]
