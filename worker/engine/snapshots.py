"""Moves a prefix's KV between memory and the snapshot store. The only place that knows both.

Layers that see a window only have no blocks. What they hold at a prefix's end is attached to its last block,
so a prefix is restored up to the longest block that has it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from typing import Any

import mlx.core as mx
import numpy as np

from cache_store import BadBlock, BlockKey, Section, SnapshotStore, attach, attached, chain_keys
from kernels import BLOCK_TOKENS, from_canonical, to_canonical
from worker.engine.kv_cache import SINK_TOKENS, CompressedLayer, KVCache, blocks_end, whole_blocks
from worker.engine.report import Report

MOVED_TOGETHER = 16
"""Blocks that change order or memory at a time, since a copy must not be one of the whole cache."""
_WINDOWS = "windows"


class Prefix:
    """A prefix cut into the store's blocks: the first carries the sinks too."""

    def __init__(
        self, fingerprint: str, tokens: np.ndarray, salt: bytes = b"", store: SnapshotStore | None = None
    ) -> None:
        """
        Args:
            salt: the tenant's own, empty for the default one; chains of another salt share no key.
            store: where it is looked for; if it encrypts, its keys are of the tenant's key there too.
        """
        self.tenant = tenant_name(salt)
        self.num_blocks = whole_blocks(len(tokens))
        self.tokens = tokens[: blocks_end(self.num_blocks)]
        ends = [blocks_end(i) for i in range(self.num_blocks + 1)]
        self.blocks = [self.tokens[a:b] for a, b in itertools.pairwise(ends)]
        self.keys = chain_keys(fingerprint, store.salt(self.tenant, salt) if store else salt, self.blocks)


def tenant_name(salt: bytes) -> str:
    """What the blocks of a salt say of whose they are; empty for the default tenant.

    A digest: with the salt itself a reader of the folder could make a tenant's keys.
    """
    return hashlib.blake2b(salt, digest_size=8).hexdigest() if salt else ""


def num_common(a: Sequence[BlockKey], b: Sequence[BlockKey]) -> int:
    """How many leading keys two chains share. Keys are chained, so an equal one vouches for all before it."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def num_restorable(store: SnapshotStore, prefix: Prefix, with_windows: bool) -> int:
    """How many of the prefix's first blocks the store can bring back.

    Args:
        with_windows: whether the model needs the windows at their end too.
    """
    num_blocks = store.match(prefix.keys, prefix.blocks)
    if with_windows:
        having = {entry.parent for entry in store.entries() if entry.attached == _WINDOWS}
        while num_blocks and prefix.keys[num_blocks - 1] not in having:
            num_blocks -= 1
    return num_blocks


def restore(
    store: SnapshotStore, prefix: Prefix, num_blocks: int, cache: KVCache, num_spare: int, report: Report
) -> tuple[int, bool]:
    """Read the first `num_blocks` blocks into `cache`, and the windows at their end.

    A block that turns out bad ends the prefix there: what stands before it is kept, if no window is missing.

    Returns:
        how many blocks the cache holds now, and whether all of them are exact.
    """
    layers = cache.compressed
    room = _InPlace if reads_host_memory() else _Staged
    tiles = room(layers, num_blocks, num_spare)
    sinks = [np.zeros(_dense_shape(layer, SINK_TOKENS), np.float16) for layer in layers]
    exact = True
    num_read = 0
    places = (
        tiles.place(i) + [_bytes(layer_sinks) for layer_sinks in sinks if i == 0] for i in range(num_blocks)
    )
    with suppress(BadBlock), closing(store.read_each(prefix.keys[:num_blocks], places)) as blocks:
        for info in blocks:
            report.check()
            exact &= info.exact
            num_read += 1
            tiles.read(num_read)
            report.progress("restore", blocks_end(num_read), len(prefix.tokens), blocks_end(num_read))
    del places
    if num_read and cache.windows and not _restore_windows(store, prefix, num_read, cache):
        return 0, True
    if num_read:
        for layer, layer_tiles, layer_sinks in zip(layers, tiles.finish(num_read), sinks, strict=True):
            k, v = mx.array(layer_sinks)
            layer.set_prefix(k, v, layer_tiles, num_read)
        mx.eval(cache.arrays())
    return num_read, exact


def reads_host_memory() -> bool:
    """Whether MLX computes on memory that numpy can write to: everywhere but on an NVIDIA card."""
    return not mx.cuda.is_available()


class _InPlace:
    """The tiles of all layers in MLX's own memory: a file is read to the place where the kernel wants it."""

    def __init__(self, layers: Sequence[CompressedLayer], num_blocks: int, num_spare: int) -> None:
        self._tiles = [_empty_tiles(layer, num_blocks + num_spare) for layer in layers]
        mx.eval(self._tiles)
        self._places = [_bytes(np.array(tiles, copy=False)) for tiles in self._tiles]
        self._block_bytes = [len(place) // (num_blocks + num_spare) for place in self._places]

    def place(self, block: int) -> list[memoryview]:
        places = zip(self._places, self._block_bytes, strict=True)
        return [place[block * size : (block + 1) * size] for place, size in places]

    def read(self, num_blocks: int) -> None:
        """So many blocks have been read in all."""

    def finish(self, num_blocks: int) -> list[mx.array]:
        self._places.clear()
        return self._tiles


class _Staged:
    """The tiles of all layers in a device's own memory; some blocks at a time pass through the host's."""

    def __init__(self, layers: Sequence[CompressedLayer], num_blocks: int, num_spare: int) -> None:
        self._shapes = [layer.shape for layer in layers]
        self._tiles = [_empty_tiles(layer, num_blocks + num_spare) for layer in layers]
        self._batches: dict[int, list[np.ndarray]] = {}
        self._num_moved = 0

    def place(self, block: int) -> list[memoryview]:
        # The store reads ahead, so a batch begins while the one before it is not read to its end.
        batch, within = divmod(block, MOVED_TOGETHER)
        if not within:
            self._batches[batch] = [
                np.empty((MOVED_TOGETHER, *tiles.shape[1:]), np.uint32) for tiles in self._tiles
            ]
        return [_bytes(tiles[within]) for tiles in self._batches[batch]]

    def read(self, num_blocks: int) -> None:
        """So many blocks have been read in all."""
        if num_blocks - self._num_moved == MOVED_TOGETHER:
            self._move(num_blocks)

    def finish(self, num_blocks: int) -> list[mx.array]:
        if num_blocks > self._num_moved:
            self._move(num_blocks)
        return self._tiles

    def _move(self, end: int) -> None:
        start = self._num_moved
        staged = self._batches.pop(start // MOVED_TOGETHER)
        for tiles, new, shape in zip(self._tiles, staged, self._shapes, strict=True):
            tiles[start:end] = from_canonical(mx.array(new[: end - start]), shape.head_dim, shape.format)
        mx.eval(self._tiles)
        self._num_moved = end


def _restore_windows(store: SnapshotStore, prefix: Prefix, num_blocks: int, cache: KVCache) -> bool:
    """Read the windows after `num_blocks` blocks; whether they are there."""
    found = attached(store, prefix.keys[num_blocks - 1], _WINDOWS)
    if found is None:
        return False
    info, buffers = found
    for window, section, data in zip(cache.windows, info.sections, buffers, strict=True):
        k, v = mx.array(np.frombuffer(data, np.float16).reshape(section.shape))
        window.set_prefix(k, v, blocks_end(num_blocks))
    return True


def save(
    store: SnapshotStore,
    prefix: Prefix,
    cache: KVCache,
    first: int,
    exact: bool,
    model_id: str,
    prefill_s: float | None = None,
) -> int:
    """Write the prefix's blocks from `first` on, and its windows; return how many blocks are stored now.

    It ends at the first block that finds no room: one whose parent is missing could never be matched.

    Args:
        prefill_s: what computing these blocks took; each is worth its share when room is made.
    """
    layers = cache.compressed
    about: dict[str, str | float] = {"model": model_id}
    if prefix.tenant:
        about["tenant"] = prefix.tenant
    if prefill_s is not None:
        about["prefill_s"] = round(prefill_s / max(1, prefix.num_blocks - first), 6)
    num_stored = 0
    for i in range(first, prefix.num_blocks):
        if num_stored % MOVED_TOGETHER == 0:
            tiles = _canonical(cache, i)
        sections = [
            Section(f"layer.{n}", "uint32", t.shape[1:], _bytes(t[num_stored % MOVED_TOGETHER]))
            for n, t in enumerate(tiles)
        ]
        if i == 0:
            sections += _dense_sections("sinks", [(layer.sinks_k, layer.sinks_v) for layer in layers])
        meta = {**about, "first_token": blocks_end(i), "block_tokens": BLOCK_TOKENS}
        parent = prefix.keys[i - 1] if i else None
        if not store.write(prefix.keys[i], parent, prefix.blocks[i], sections, exact, meta):
            break
        num_stored += 1
    if cache.windows and first + num_stored == prefix.num_blocks:
        sections = _dense_sections("window", [(w.prefix_k, w.prefix_v) for w in cache.windows])
        attach_to_end(store, prefix, _WINDOWS, sections, exact, {"block_tokens": BLOCK_TOKENS})
    return num_stored


def attach_to_end(
    store: SnapshotStore,
    prefix: Prefix,
    name: str,
    sections: Sequence[Section],
    exact: bool,
    meta: Mapping[str, Any],
) -> None:
    """Attach to a prefix's last block what was computed with it.

    Where the disk holds a better block than ours, which would not fit it, nothing.
    """
    last = store.info(prefix.keys[-1])
    if last and last.exact == exact:
        attach(store, prefix.keys[-1], name, sections, meta)


def _canonical(cache: KVCache, first: int) -> list[np.ndarray]:
    """Some blocks of every layer from `first` on as the disk has them, (n, num_kv_heads, tile_words) each."""
    some = slice(first, first + MOVED_TOGETHER)
    canonical = [to_canonical(c.tiles[some], c.shape.head_dim, c.shape.format) for c in cache.compressed]
    mx.eval(canonical)
    return [np.array(tiles, copy=False) for tiles in canonical]


def _empty_tiles(layer: CompressedLayer, num_blocks: int) -> mx.array:
    return mx.zeros((num_blocks, *layer.tiles.shape[1:]), mx.uint32)


def _dense_shape(layer: CompressedLayer, num_tokens: int) -> tuple[int, ...]:
    """Of keys and values as they are stored."""
    return (2, layer.shape.num_kv_heads, num_tokens, layer.shape.head_dim)


def _dense_sections(name: str, pairs: Sequence[tuple[mx.array, mx.array]]) -> list[Section]:
    stacked = [mx.stack([k, v]).astype(mx.float16) for k, v in pairs]
    mx.eval(stacked)
    return [
        Section(f"{name}.{n}", "float16", x.shape, _bytes(np.array(x, copy=False)))
        for n, x in enumerate(stacked)
    ]


def _bytes(array: np.ndarray) -> memoryview:
    """The array's own memory."""
    return array.data.cast("B")
