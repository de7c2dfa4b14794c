"""The stored prefixes that workers tell of, and what may be asked of a worker about one.

Each worker lists what lies in its data folder under `holdings_key`, with an expiry. Commands wait for it in
the list `commands_key`; what became of one is seen in the next listing.
"""

from __future__ import annotations

import hashlib
from typing import Literal

from pydantic import BaseModel

HOLDINGS_KEY = "longleaf:prefixes:"
COMMANDS_KEY = "longleaf:prefix-commands:"


class HeldPrefix(BaseModel):
    """A chain of stored blocks that no other block continues."""

    id: str
    """The last block's key, 32 hexadecimal digits."""
    model: str
    owner: str
    """`prefix_owner` of the tenant whose it is."""
    num_tokens: int
    disk_bytes: int
    own_bytes: int
    """What no other prefix shares: removing this one frees it."""
    prefill_s: float
    used_at: float
    """Seconds since the epoch, by the worker's clock."""
    pinned: bool


class Holdings(BaseModel):
    """What one worker keeps, the last used first."""

    worker: str
    prefixes: list[HeldPrefix]
    num_left_out: int = 0
    """Prefixes beyond the bound of a listing."""


class PrefixCommand(BaseModel):
    op: Literal["pin", "unpin", "remove", "forget"]
    """`forget`: everything that is the owner's, pinned or not, and the key that it is encrypted with."""
    id: str = ""
    """Empty where all of them are meant."""
    owner: str
    """A worker does nothing to a prefix of another one."""


def prefix_owner(prefix_salt: str) -> str:
    """What stored blocks say of whose they are: a digest of the tenant's salt, which makes no keys."""
    salt = bytes.fromhex(prefix_salt)
    return hashlib.blake2b(salt, digest_size=8).hexdigest() if salt else ""


def holdings_key(worker: str) -> str:
    return HOLDINGS_KEY + worker


def commands_key(worker: str) -> str:
    return COMMANDS_KEY + worker
