"""Block keys: a hash chain over token ids, so that a key names a whole prefix and not one block.

Owns how keys are made. It knows nothing of files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

KEY_BYTES = 16
TokenIds = npt.NDArray[np.uint32]

# blake2b's personalisation keeps the uses of the hash apart: no root is ever also a link.
_ROOT = b"longleaf-kv-root"
_LINK = b"longleaf-kv-link"
_NOTE = b"longleaf-kv-note"
_PART = b"longleaf-kv-part"


@dataclass(frozen=True, order=True, slots=True)
class BlockKey:
    """16 bytes that name a block together with every token before it."""

    digest: bytes

    def __post_init__(self) -> None:
        if len(self.digest) != KEY_BYTES:
            raise ValueError(f"a block key has {KEY_BYTES} bytes, not {len(self.digest)}")

    @classmethod
    def from_hex(cls, text: str) -> BlockKey:
        return cls(bytes.fromhex(text))

    @property
    def hex(self) -> str:
        return self.digest.hex()

    def __str__(self) -> str:
        return self.hex


def as_token_ids(ids: npt.NDArray[Any]) -> TokenIds:
    """Token ids as contiguous little-endian uint32; ValueError where they are not 1-D integers in range."""
    array = np.asarray(ids)
    if array.ndim != 1 or array.dtype.kind not in "ui":
        raise ValueError(f"token ids must be a 1-D integer array, not {array.ndim}-D {array.dtype}")
    if array.dtype != np.uint32 and array.size and (array.min() < 0 or array.max() > 0xFFFFFFFF):
        raise ValueError(f"token ids must fit uint32, found {array.min()} to {array.max()}")
    return np.ascontiguousarray(array, dtype="<u4")


def chain_keys(fingerprint: str, salt: bytes, blocks: Sequence[npt.NDArray[Any]]) -> list[BlockKey]:
    """One key per block: h0 = H(fingerprint, salt), h_i = H(h_{i-1}, token ids of block i).

    Equal leading blocks give equal leading keys; another fingerprint, tenant salt, order or block
    boundary gives others. Blocks: 1-D integer arrays of token ids. Raises ValueError for other arrays.
    """
    name = fingerprint.encode()
    root = len(name).to_bytes(8, "little") + name + salt  # length first: name and salt cannot run together
    link = hashlib.blake2b(root, digest_size=KEY_BYTES, person=_ROOT).digest()
    keys = []
    for ids in blocks:
        keys.append(_next(link, ids))
        link = keys[-1].digest
    return keys


def _next(link: bytes, ids: npt.NDArray[Any]) -> BlockKey:
    ids_bytes = as_token_ids(ids).tobytes()
    return BlockKey(hashlib.blake2b(link + ids_bytes, digest_size=KEY_BYTES, person=_LINK).digest())


def attached_key(key: BlockKey, name: str) -> BlockKey:
    """The key of what is attached to a block under a name; no chain of tokens has it."""
    digest = hashlib.blake2b(key.digest + name.encode(), digest_size=KEY_BYTES, person=_NOTE).digest()
    return BlockKey(digest)


def checkpoint_part_key(key: BlockKey, part: str) -> BlockKey:
    """The key in the header of a checkpoint's part: no part passes for another, or for a block."""
    digest = hashlib.blake2b(key.digest + part.encode(), digest_size=KEY_BYTES, person=_PART).digest()
    return BlockKey(digest)
