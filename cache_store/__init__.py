"""Blocks of bytes under content keys, kept on disk within a budget, checked on every read.

It knows no model: a block is token ids, named arrays and JSON metadata. FORMAT.md has the bytes.
"""

from cache_store.attachments import attach, attached
from cache_store.block import Section
from cache_store.checkpoints import Checkpoints, Resume
from cache_store.errors import (
    BadBlock,
    CacheStoreError,
    KeyringError,
    MissingBlock,
    NoKey,
    TierDown,
    UnknownVersion,
)
from cache_store.header import BlockInfo, SectionInfo
from cache_store.index import Entry
from cache_store.key import BlockKey, chain_keys
from cache_store.keyring import Keyring
from cache_store.prefixes import (
    StoredPrefix,
    Usage,
    chain_of,
    remove_prefix,
    stored_prefixes,
    usage_by_model,
    verify,
)
from cache_store.store import SnapshotStore
from cache_store.tier import Tier
from cache_store.transfer import BadExport, export_prefixes, import_prefixes

__all__ = [
    "BadBlock",
    "BadExport",
    "BlockInfo",
    "BlockKey",
    "CacheStoreError",
    "Checkpoints",
    "Entry",
    "Keyring",
    "KeyringError",
    "MissingBlock",
    "NoKey",
    "Resume",
    "Section",
    "SectionInfo",
    "SnapshotStore",
    "StoredPrefix",
    "Tier",
    "TierDown",
    "UnknownVersion",
    "Usage",
    "attach",
    "attached",
    "chain_keys",
    "chain_of",
    "export_prefixes",
    "import_prefixes",
    "remove_prefix",
    "stored_prefixes",
    "usage_by_model",
    "verify",
]
