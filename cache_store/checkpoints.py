"""Checkpoints of a prefill that is under way, so that a killed one goes on where it was.

A layer-major prefill (all tokens through one layer, then the next) is resumed from the tiles of the
layers that are finished and the hidden states that enter the first one that is not. Both lie beside the
blocks, in files of the block format, until the prefill is done:

    at = store.checkpoints.resume(key)         # key: the last key of the prefix
    if at and at.meta != meta:                 # meta: first token, device, chunk size: what must agree
        store.checkpoints.remove(key)          # its layers would be kept otherwise
    elif at:
        for n in range(at.layer):
            store.checkpoints.read_layer(key, n, [tiles of layer n])         # (num_blocks, heads, words)
        store.checkpoints.read_hidden(key, at.layer, [chunk, chunk, ...])    # (tokens, width) each
    for n in range(at.layer, num_layers):
        ...                                    # run layer n over all chunks, encode its tiles
        if time has passed:
            save_layer for every finished layer that is not saved, then save_hidden(key, n + 1, chunks, meta)
    store.checkpoints.remove(key)              # once the blocks are stored

A save outlives its process once it returns. Nothing waits for the disk: after a power cut a part may be torn,
which its checksums tell. The hidden states are what makes a save count; those of the save before stay beside
them, and the next ones take their place, memory and all. When room is needed checkpoints go before any
block; a save that is answered False has stored nothing that counts, and every finished layer is to be saved
again with the next one.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cache_store import block
from cache_store.block import Section
from cache_store.errors import BadBlock, NoKey
from cache_store.folder import Folder, opened
from cache_store.header import BlockInfo, SectionInfo
from cache_store.index import SUFFIX, checkpoint_of
from cache_store.key import BlockKey, checkpoint_part_key

EXPIRE_S = 3 * 86_400.0
_PART_NAME = re.compile(r"([0-9a-f]{32})\.(hidden|layer)-(\d{5})\.llkv")


@dataclass(frozen=True)
class Resume:
    """Where a prefill can go on."""

    layer: int
    """The first layer that is not finished."""
    meta: Mapping[str, Any]
    """As given with the hidden states."""
    hidden: tuple[SectionInfo, ...]
    """The chunks of hidden states."""


class Checkpoints:
    """The checkpoints of one folder, by the last key of the prefix that is prefilled."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def save_layer(
        self, key: BlockKey, layer: int, sections: Sequence[Section], meta: Mapping[str, Any]
    ) -> bool:
        """Store a finished layer; True if it is stored now. What is stored already is kept.

        False, and logged, where there is no room or the disk fails. Raises ValueError as
        `SnapshotStore.write` does.
        """
        return self._save(key, _layer(layer), sections, meta)

    def save_hidden(
        self, key: BlockKey, layer: int, sections: Sequence[Section], meta: Mapping[str, Any]
    ) -> bool:
        """Store the hidden states that enter a layer, in place of those of the save before the last one.

        False also where a layer before it is not stored: nothing could go on from there.
        """
        parts = self._parts(key)
        if not all(_layer(n) in parts for n in range(layer)):
            return False
        older = sorted(part for part in parts if part.startswith("hidden") and part != _hidden(layer))
        over = self._path(key, older[0]) if len(older) > 1 else None
        return self._save(key, _hidden(layer), sections, meta, over)

    def resume(self, key: BlockKey) -> Resume | None:
        """Where this prefix's prefill can go on; None if nowhere. Reads headers only."""
        parts = self._parts(key)
        for part in sorted((part for part in parts if part.startswith("hidden")), reverse=True):
            layer = int(part[-5:])
            infos = [self._info(key, name) for name in (part, *map(_layer, range(layer)))]
            if all(infos) and infos[0]:
                return Resume(layer, infos[0].meta, infos[0].sections)
        return None

    def read_layer(self, key: BlockKey, layer: int, into: Sequence[memoryview]) -> BlockInfo:
        """Fill one buffer per section and check every byte.

        Raises BadBlock, and removes the part, where it is not whole or the buffers have other sizes.
        """
        return self._read(key, _layer(layer), into)

    def read_hidden(self, key: BlockKey, layer: int, into: Sequence[memoryview]) -> BlockInfo:
        """As `read_layer`, for the hidden states that enter a layer."""
        return self._read(key, _hidden(layer), into)

    def remove(self, key: BlockKey) -> int:
        """Delete a checkpoint; how many parts it had. Hidden states go first: they make it count."""
        return sum(self._remove(self._path(key, part)) for part in sorted(self._parts(key)))

    def keys(self) -> dict[BlockKey, int]:
        """Every checkpoint, with its bytes on disk."""
        found: dict[BlockKey, int] = {}
        with self._folder.mutex:
            self._folder.refresh()
            for path, num_bytes in self._folder.index.checkpoints.items():
                if match := _PART_NAME.fullmatch(path.name):
                    key = BlockKey.from_hex(match[1])
                    found[key] = found.get(key, 0) + num_bytes
        return found

    def remove_expired(self, expire_s: float = EXPIRE_S) -> int:
        """Delete checkpoints that nothing was added to for so long, and foreign files among them.

        One whose time lies as far ahead is as old: the clock was set back. Returns how many files went.
        """
        with self._folder.locked():
            self._folder.refresh()
            paths = list(self._folder.index.checkpoints)
            now, age_s = time.time(), dict[str, float]()
            for path in paths:
                with suppress(FileNotFoundError):
                    age = abs(now - os.stat(path).st_mtime)
                    age_s[checkpoint_of(path)] = min(age, age_s.get(checkpoint_of(path), age))
            expired = [
                path
                for path in paths
                if not _PART_NAME.fullmatch(path.name) or age_s.get(checkpoint_of(path), 0.0) > expire_s
            ]
            return sum(self._remove(path) for path in expired)

    def _path(self, key: BlockKey, part: str) -> Path:
        return self._folder.index.checkpoints_folder / f"{key}.{part}{SUFFIX}"

    def _parts(self, key: BlockKey) -> list[str]:
        """The names of the parts on disk."""
        try:
            names = os.listdir(self._folder.index.checkpoints_folder)
        except OSError:  # what cannot be listed cannot be gone on from
            return []
        matches = filter(None, map(_PART_NAME.fullmatch, names))
        return [f"{match[2]}-{match[3]}" for match in matches if match[1] == key.hex]

    def _save(
        self,
        key: BlockKey,
        part: str,
        sections: Sequence[Section],
        meta: Mapping[str, Any],
        over: Path | None = None,
    ) -> bool:
        own = checkpoint_part_key(key, part)
        try:
            contents = self._folder.contents(own, None, np.zeros(0, np.uint32), sections, False, meta)
        except NoKey as error:
            self._folder.report(None, f"checkpoint not stored: {error}")
            return False
        if self._folder.read_only:
            return False
        path = self._path(key, part)

        def answer() -> bool | None:
            return True if self._info(key, part) else None

        try:
            return self._folder.place(path, contents, {key}, answer, synced=False, over=over)
        except OSError as error:
            self._folder.report(error.errno, f"checkpoint {path.name} was not stored: {error}")
            return False

    def _info(self, key: BlockKey, part: str) -> BlockInfo | None:
        path = self._path(key, part)
        try:
            with opened(path) as (fd, _):
                return self._folder.header(fd, path, checkpoint_part_key(key, part)).info
        except (BadBlock, OSError):
            return None

    def _read(self, key: BlockKey, part: str, into: Sequence[memoryview]) -> BlockInfo:
        path, views = self._path(key, part), block.writable_bytes(into)
        try:
            with opened(path) as (fd, _):
                header = self._folder.header(fd, path, checkpoint_part_key(key, part))
                block.read_payload(fd, header, views)
                return header.info
        except BadBlock:
            self._remove(path)
            raise
        except OSError as error:
            raise BadBlock(path, "checkpoint", "readable bytes", error) from error

    def _remove(self, path: Path) -> bool:
        """False where it is gone or stays: what is left expires."""
        try:
            return self._folder.remove(path)
        except OSError as error:
            self._folder.report(error.errno, f"checkpoint {path.name} was not removed: {error}")
            return False


def _layer(layer: int) -> str:
    return f"layer-{layer:05}"


def _hidden(layer: int) -> str:
    return f"hidden-{layer:05}"
