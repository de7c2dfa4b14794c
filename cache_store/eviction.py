"""Which block goes first when room is needed: the one whose bytes save the least.

A block is worth its prefill seconds per byte, halved for every day since its last use. Halving keeps the
order of two blocks the same at all times, so no clock takes part. A shared base outlives what was built
on it: a block is given only when none of its children is left.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator

from cache_store.index import Entry
from cache_store.key import BlockKey

HALF_LIFE_NS = 86_400 * 10**9


def score(entry: Entry) -> float:
    """Order of worth: the lowest goes first. log2 of seconds per byte, plus days of the last use."""
    return math.log2(max(entry.prefill_s, 1e-9) / max(entry.disk_bytes, 1)) + entry.used_ns / HALF_LIFE_NS


def with_ancestors(entries: dict[BlockKey, Entry], keys: set[BlockKey]) -> set[BlockKey]:
    """These stored blocks and every stored block before them."""
    found: set[BlockKey] = set()
    for key in keys:
        link: BlockKey | None = key
        while link in entries and link not in found:
            found.add(link)
            link = entries[link].parent
    return found


def victims(
    entries: dict[BlockKey, Entry], keep: set[BlockKey], last_use: Callable[[Entry], int | None]
) -> Iterator[Entry]:
    """Blocks in the order to evict them; those in `keep` and their ancestors are not given.

    The consumer removes each block it is given. last_use: asked before a block is given, since another
    process may have used it after it was listed; nanoseconds since the epoch, None where it cannot be told.
    """
    kept = with_ancestors(entries, keep)
    num_children = Counter(entry.parent for entry in entries.values())
    order = [
        (score(entry), key) for key, entry in entries.items() if not num_children[key] and key not in kept
    ]
    heapq.heapify(order)
    while order:
        _, key = heapq.heappop(order)
        entry = entries[key]
        latest = last_use(entry)
        if latest is not None and latest > entry.used_ns:
            entry.used_ns = latest
            heapq.heappush(order, (score(entry), key))
            continue
        yield entry
        parent = entry.parent
        num_children[parent] -= 1
        if parent in entries and parent not in kept and not num_children[parent]:
            heapq.heappush(order, (score(entries[parent]), parent))
