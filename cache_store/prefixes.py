"""Stored prefixes as a person sees them: chains of blocks, listed, checked, removed.

A prefix is a block together with every block before it; what is listed is every block that no other
continues. It knows the index and nothing of files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cache_store.errors import BadBlock, MissingBlock
from cache_store.eviction import with_ancestors
from cache_store.index import Entry
from cache_store.key import BlockKey
from cache_store.store import SnapshotStore


@dataclass(frozen=True)
class StoredPrefix:
    """A chain of stored blocks, from its first to `key`."""

    key: BlockKey
    num_tokens: int
    num_blocks: int
    disk_bytes: int
    own_bytes: int
    """What no other prefix shares: removing this one frees it. Attachments count."""
    model: str
    tenant: str
    prefill_s: float
    used_ns: int
    exact: bool
    pinned: bool
    whole: bool
    """False where a block before it is missing, so that it cannot be matched."""
    readable: bool
    """False where a block of it is encrypted and its key is not here."""


@dataclass(frozen=True)
class Usage:
    """Blocks, their bytes on disk, and the prefill seconds that they stand for."""

    num_blocks: int = 0
    disk_bytes: int = 0
    prefill_s: float = 0.0


def usage_by_model(store: SnapshotStore) -> dict[str, Usage]:
    """What the blocks of each model take and save, by the model that their metadata names."""
    usage: dict[str, Usage] = {}
    for entry in store.entries():
        known = usage.get(entry.model, Usage())
        usage[entry.model] = Usage(
            known.num_blocks + 1, known.disk_bytes + entry.disk_bytes, known.prefill_s + entry.prefill_s
        )
    return usage


def stored_prefixes(store: SnapshotStore) -> list[StoredPrefix]:
    """Every stored prefix, the last used first. Raises OSError where the folder cannot be listed."""
    entries = {entry.key: entry for entry in store.entries()}
    tokens = {key: entry for key, entry in entries.items() if not entry.attached}
    continued = {entry.parent for entry in tokens.values()}
    pinned = with_ancestors(entries, store.pins())
    readable = store.readable(entries.values())
    num_sharing: Counter[BlockKey] = Counter()
    chains = {key: chain_of(entries, key) for key in tokens if key not in continued}
    for chain in chains.values():
        num_sharing.update(entry.key for entry in chain)
    attached_bytes: Counter[BlockKey] = Counter()
    for entry in entries.values():
        if entry.attached and entry.parent:
            attached_bytes[entry.parent] += entry.disk_bytes
    found = [_prefix(chain, num_sharing, attached_bytes, pinned, readable) for chain in chains.values()]
    return sorted(found, key=lambda prefix: (-prefix.used_ns, prefix.key))


def chain_of(entries: dict[BlockKey, Entry], key: BlockKey) -> list[Entry]:
    """The stored blocks of a prefix, first to last."""
    chain: list[Entry] = []
    link: BlockKey | None = key
    while link in entries and len(chain) < len(entries):  # a forged chain may be a ring
        chain.append(entries[link])
        link = entries[link].parent
    return chain[::-1]


def remove_prefix(store: SnapshotStore, key: BlockKey) -> int:
    """Delete a prefix's blocks but those that another one shares; how many blocks of tokens went."""
    entries = {entry.key: entry for entry in store.entries()}
    num_children = Counter(entry.parent for entry in entries.values() if not entry.attached)
    num_removed = 0
    for entry in reversed(chain_of(entries, key)):
        if num_children[entry.key]:
            break
        for child in entries.values():
            if child.attached and child.parent == entry.key:
                store.remove(child.key)
        num_removed += store.remove(entry.key)
        num_children[entry.parent] -= 1
    return num_removed


def verify(
    store: SnapshotStore, keys: Sequence[BlockKey] | None = None
) -> Iterator[tuple[BlockKey, BadBlock | None]]:
    """Read every byte of blocks (all where None); each key with what is wrong, which quarantined it."""
    for key in keys if keys is not None else [entry.key for entry in store.entries()]:
        yield key, _error(store, key)


def _error(store: SnapshotStore, key: BlockKey) -> BadBlock | None:
    try:
        info = store.header_of(key)
        store.read(key, [memoryview(bytearray(section.num_bytes)) for section in info.sections])
    except MissingBlock:
        return None  # evicted meanwhile
    except BadBlock as error:
        return error
    return None


def _prefix(
    chain: Sequence[Entry],
    num_sharing: Counter[BlockKey],
    attached_bytes: Counter[BlockKey],
    pinned: set[BlockKey],
    readable: set[BlockKey],
) -> StoredPrefix:
    last = chain[-1]
    disk_bytes = [entry.disk_bytes + attached_bytes[entry.key] for entry in chain]
    own = (n for n, entry in zip(disk_bytes, chain, strict=True) if num_sharing[entry.key] == 1)
    return StoredPrefix(
        key=last.key,
        num_tokens=sum(entry.num_tokens for entry in chain),
        num_blocks=len(chain),
        disk_bytes=sum(disk_bytes),
        own_bytes=sum(own),
        model=last.model,
        tenant=last.tenant,
        prefill_s=sum(entry.prefill_s for entry in chain),
        used_ns=last.used_ns,
        exact=all(entry.exact for entry in chain),
        pinned=last.key in pinned,
        whole=chain[0].parent is None,
        readable=all(entry.key in readable for entry in chain),
    )
