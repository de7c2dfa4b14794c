"""A data folder with stored prefixes whose ids are always the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cache_store import BlockKey, Section, SnapshotStore, attach, chain_keys

MODEL = "smollm2-135m-instruct"


def store_chain(
    store: SnapshotStore, seeds: Sequence[int], tenant: str = "", exact: bool = True
) -> list[BlockKey]:
    """Store one block per seed, 2,000 bytes of KV each: equal leading seeds share their blocks."""
    blocks = [np.arange(192 if i == 0 else 128, dtype=np.uint32) + seed for i, seed in enumerate(seeds)]
    keys = chain_keys(MODEL, tenant.encode(), blocks)
    data = memoryview(bytes(2000))
    for i, key in enumerate(keys):
        meta = {"model": MODEL, "prefill_s": 1.5} | ({"tenant": tenant} if tenant else {})
        sections = [Section("layer.0", "uint8", (2000,), data)]
        assert store.write(key, keys[i - 1] if i else None, blocks[i], sections, exact, meta)
    return keys


def make_data(data: Path) -> list[list[BlockKey]]:
    """Two questions over one document, and a document of another tenant."""
    store = SnapshotStore(data / "snapshots", 1 << 30, 0)
    chains = [
        store_chain(store, [1, 2, 3]),
        store_chain(store, [1, 2, 4, 5]),
        store_chain(store, [7], "anna"),
    ]
    attach(store, chains[0][-1], "self-check", [], {})
    return chains
