"""Work on a folder that other processes work on too, and check everything that is seen.

Usage: share_folder.py FOLDER SEED ROUNDS BUDGET_BYTES
Exits 1 at the first wrong byte or the first moment over budget; prints counts of what happened.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
from stored_blocks import disk_usage, get, make_chain, put, which

from cache_store import BadBlock, MissingBlock, SnapshotStore


def main(folder: str, seed: str, rounds: str, budget_bytes: str) -> None:
    rng = np.random.default_rng(int(seed))
    store = SnapshotStore(Path(folder), int(budget_bytes), 0, touch_every_s=0)
    chains = [make_chain(4, seed) for seed in range(5)]
    seen: Counter[str] = Counter()
    for _ in range(int(rounds)):
        chain, index = chains[rng.integers(5)], int(rng.integers(4))
        key, exact = chain.keys[index], bool(rng.integers(2))
        action = rng.integers(12)
        if action < 6:
            # Sizes differ between keys, not between the writers of one: a reader sized its buffers before.
            pad_bytes = (1 + key.digest[0] % 2) * 5000
            written = put(store, chain, index, exact, pad_bytes=pad_bytes)
            seen["written" if written else "refused"] += 1
        elif action < 11:
            matched = store.match(chain.keys, chain.blocks)
            seen["matched"] += matched
            for stored in chain.keys[:matched]:
                try:
                    found = which(get(store, stored), stored)
                    if found == "wrong":
                        sys.exit(f"wrong bytes under {stored}")
                    seen["read"] += 1
                except MissingBlock:
                    seen["evicted before it was read"] += 1
                except BadBlock as error:
                    if error.what != "block":
                        sys.exit(f"a good block was called bad: {error}")
                    seen["evicted before it was read"] += 1
        else:
            seen["removed"] += store.remove(key)
        used = disk_usage(Path(folder), take_lock=True)
        if used > int(budget_bytes):
            sys.exit(f"{used} bytes on disk, budget {budget_bytes}")
    print(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
