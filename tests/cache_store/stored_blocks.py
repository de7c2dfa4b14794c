"""Chains of small blocks whose bytes follow from their key, so that any reader can tell right from wrong."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from cache_store import BadBlock, BlockKey, Section, SnapshotStore, chain_keys
from cache_store.files import locked

Array = npt.NDArray[Any]
SHAPES: list[tuple[str, str, tuple[int, ...]]] = [
    ("layers.0.k", "uint8", (2, 5, 7)),
    ("layers.0.scales", "float16", (3,)),
    ("empty", "float32", (0, 4)),
    ("mean", "float32", ()),
    ("layers.1.k", "uint8", (1, 129)),
]


@dataclass(frozen=True)
class Chain:
    keys: list[BlockKey]
    blocks: list[Array]


def make_chain(num_blocks: int, seed: int = 0, fingerprint: str = "model", salt: bytes = b"") -> Chain:
    """Random token ids: 192 in the first block, 128 in later ones."""
    rng = np.random.default_rng(seed)
    blocks = [rng.integers(0, 50_000, 128 if i else 192, dtype=np.uint32) for i in range(num_blocks)]
    return Chain(chain_keys(fingerprint, salt, blocks), blocks)


def arrays_of(key: BlockKey, exact: bool = True, pad_bytes: int = 0) -> list[Array]:
    """The arrays that belong to a key; an exact block holds other bytes than a continued one."""
    rng = np.random.default_rng([*key.digest, exact])
    shapes = [*SHAPES, ("pad", "uint8", (pad_bytes,))] if pad_bytes else SHAPES
    arrays = []
    for _, dtype, shape in shapes:
        raw = rng.integers(0, 256, (*shape, np.dtype(dtype).itemsize), dtype=np.uint8)
        arrays.append(raw.view(dtype).reshape(shape))
    return arrays


def sections_of(arrays: Sequence[Array]) -> list[Section]:
    names = [name for name, _, _ in SHAPES] + ["pad"]
    return [Section(names[i], str(array.dtype), array.shape, array.data) for i, array in enumerate(arrays)]


def put(
    store: SnapshotStore, chain: Chain, index: int, exact: bool = True, pad_bytes: int = 0, **meta: Any
) -> bool:
    """Write block `index` of a chain; meta: what its metadata says beside the index."""
    key = chain.keys[index]
    parent = chain.keys[index - 1] if index else None
    sections = sections_of(arrays_of(key, exact, pad_bytes))
    return store.write(key, parent, chain.blocks[index], sections, exact, {"index": index, **meta})


def get(store: SnapshotStore, key: BlockKey) -> list[Array]:
    """Read a block of any size into fresh arrays; BadBlock where it cannot be."""
    info = store.info(key)
    if info is None:
        raise BadBlock(Path(key.hex), "block", "one", "none")
    arrays = [np.empty(section.shape, section.dtype) for section in info.sections]
    store.read(key, [array.data for array in arrays])
    return arrays


def same(found: Sequence[Array], wanted: Sequence[Array]) -> bool:
    return len(found) == len(wanted) and all(
        a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in zip(found, wanted, strict=True)
    )


def which(arrays: Sequence[Array], key: BlockKey) -> str:
    """`exact` or `continued` where every byte is that of the key, else `wrong`."""
    pad_bytes = arrays[len(SHAPES)].size if len(arrays) > len(SHAPES) else 0
    for exact in (True, False):
        if same(arrays, arrays_of(key, exact, pad_bytes)):
            return "exact" if exact else "continued"
    return "wrong"


def path_of(folder: Path, key: BlockKey) -> Path:
    return folder / "v1" / key.hex[:2] / f"{key.hex}.llkv"


def files_in(folder: Path) -> list[Path]:
    return [Path(base) / name for base, _, names in os.walk(folder) for name in names if name != "lock"]


def disk_usage(folder: Path, take_lock: bool = False) -> int:
    """Bytes on disk by whole pages, unfinished files and quarantine included.

    take_lock: hold the store's lock, where other processes are at work, to see one moment.
    """
    if take_lock:
        with locked(folder / "lock"):
            return disk_usage(folder)
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in files_in(folder))


def reseal(raw: bytearray) -> bytes:
    """Give changed header bytes checksums that hold, as a forger would."""
    payload_offset = int.from_bytes(raw[24:32], "little")
    raw[112:120] = xxhash.xxh3_64_intdigest(bytes(raw[128:payload_offset])).to_bytes(8, "little")
    raw[120:128] = xxhash.xxh3_64_intdigest(bytes(raw[:120])).to_bytes(8, "little")
    return bytes(raw)
