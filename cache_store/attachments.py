"""A few more arrays beside a stored block, readable apart from it: a window's state, a self-check's logits.

An attachment is a block of no tokens under a key of its own, with the block as its parent. So nothing
that is stored is rewritten, it is checked like every block, and it goes before its parent when room is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cache_store.block import Section
from cache_store.errors import BadBlock
from cache_store.header import BlockInfo
from cache_store.key import BlockKey, attached_key
from cache_store.store import SnapshotStore

_OWNER = ("model", "tenant")


def attach(
    store: SnapshotStore, key: BlockKey, name: str, sections: Sequence[Section], meta: Mapping[str, Any]
) -> bool:
    """Store sections with a block under a name; True if they are stored now.

    What was attached to the same block under the name is kept; what was attached to a continued block is
    replaced once the block is exact. The attachment belongs to the block's model and tenant. False as for
    `SnapshotStore.write`, and where the block is not stored. Raises ValueError as `write` does.
    """
    block = store.info(key)
    if block is None:
        return False
    owner = {word: block.meta[word] for word in _OWNER if word in block.meta}
    own = {**meta, **owner, "attached": name}
    return store.write(attached_key(key, name), key, np.zeros(0, np.uint32), sections, block.exact, own)


def attached(store: SnapshotStore, key: BlockKey, name: str) -> tuple[BlockInfo, list[memoryview]] | None:
    """What is attached to a block under a name, its sections as bytes, all checked; None for a miss.

    What was computed with a continued block is a miss once an exact one has replaced that.
    """
    block, child = store.info(key), attached_key(key, name)
    if not store.match([child], [np.zeros(0, np.uint32)]):  # marks it used, as its block is
        return None
    info = store.info(child)
    if block is None or info is None or info.exact != block.exact:
        return None
    buffers = [memoryview(bytearray(section.num_bytes)) for section in info.sections]
    try:
        return store.read(child, buffers), buffers
    except BadBlock:
        return None
