"""What can be wrong with a stored block, in one hierarchy.

    CacheStoreError
    ├── BadBlock              this key cannot be read: treat it as a miss and prefill
    │   ├── MissingBlock      no such file (never written, or evicted since it was matched)
    │   ├── UnknownVersion    written by a newer Longleaf; left where it is
    │   └── NoKey             encrypted under a key that is not here; left where it is
    ├── KeyringError          no folder of keys, or a key that cannot be made in it
    └── TierDown              the shared tier does not do what it was asked; no match or write raises it

`SnapshotStore` alone decides what an error means for the file: a plain BadBlock was moved to
quarantine before it was raised (or, where nothing may be written, is remembered as bad).
"""

from __future__ import annotations

from pathlib import Path


class CacheStoreError(Exception):
    """Base of every error that the store raises on purpose."""


class BadBlock(CacheStoreError):
    """A stored block that must not be used."""

    def __init__(self, path: Path, what: str, expected: object, found: object) -> None:
        self.path = path
        self.what = what
        self.expected = expected
        self.found = found
        super().__init__(f"{path}: {what}: expected {expected}, found {found}; prefill these tokens again")


class MissingBlock(BadBlock):
    """The block is not on disk."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "block file", "a file", "none")


class UnknownVersion(BadBlock):
    """The block has a format version that this code does not read."""


class NoKey(BadBlock):
    """The block is encrypted, and its tenant has no key here, or another one."""


class KeyringError(CacheStoreError):
    """There is no such folder of keys, or a key cannot be made in it."""


class TierDown(CacheStoreError):
    """The shared tier cannot be reached, is too slow, or refuses."""
