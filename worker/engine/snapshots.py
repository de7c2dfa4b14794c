"""Moves a prefix's KV between memory and the snapshot store. The only place that knows both."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from cache_store import BadBlock, BlockKey, Section, SnapshotStore, chain_keys
from kernels import BLOCK_TOKENS, from_canonical, to_canonical
from worker.engine.kv_cache import SINK_TOKENS, KVCache, blocks_end, whole_blocks
from worker.engine.report import Report

SAVED_TOGETHER = 16
"""Blocks put into canonical order at a time: where that is a copy, it must not be one of the whole cache."""


class Prefix:
    """A prefix cut into the store's blocks: the first carries the sinks too."""

    def __init__(self, fingerprint: str, tokens: np.ndarray, salt: bytes = b"") -> None:
        self.num_blocks = whole_blocks(len(tokens))
        self.tokens = tokens[: blocks_end(self.num_blocks)]
        ends = [blocks_end(i) for i in range(self.num_blocks + 1)]
        self.blocks = [self.tokens[a:b] for a, b in itertools.pairwise(ends)]
        self.keys = chain_keys(fingerprint, salt, self.blocks)


def num_common(a: Sequence[BlockKey], b: Sequence[BlockKey]) -> int:
    """How many leading keys two chains share. Keys are chained, so an equal one vouches for all before it."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def restore(
    store: SnapshotStore, prefix: Prefix, num_blocks: int, cache: KVCache, num_spare: int, report: Report
) -> tuple[int, bool]:
    """Read the first `num_blocks` blocks into `cache`.

    A block that turns out bad ends the prefix there: what stands before it is kept.

    Returns:
        how many blocks the cache holds now, and whether all of them are exact.
    """
    num_layers, heads, dim = len(cache.layers), cache.num_kv_heads, cache.head_dim
    words = cache.layers[0].tiles.shape[2]
    shape = (num_blocks + num_spare, heads, words)
    tiles = [mx.zeros(shape, mx.uint32) for _ in range(num_layers)]
    sinks = mx.zeros((num_layers, 2, heads, SINK_TOKENS, dim), mx.float16)
    mx.eval(tiles, sinks)
    # numpy sees MLX's own memory here: the file is read to the place where the kernel wants it.
    tile_views = [np.array(t, copy=False) for t in tiles]
    sink_view = np.array(sinks, copy=False)
    exact = True
    num_read = 0
    for i, key in enumerate(prefix.keys[:num_blocks]):
        report.check()
        into = [_bytes(view[i]) for view in tile_views]
        if i == 0:
            into.append(_bytes(sink_view))
        try:
            exact &= store.read(key, into).exact
        except BadBlock:
            break
        num_read += 1
        report.progress("restore", blocks_end(num_read), len(prefix.tokens), blocks_end(num_read))
    del tile_views, sink_view
    if num_read:
        for layer, layer_tiles, (k, v) in zip(cache.layers, tiles, sinks, strict=True):
            layer.set_prefix(k, v, from_canonical(layer_tiles, dim), num_read)
        mx.eval(cache.arrays())
    return num_read, exact


def save(store: SnapshotStore, prefix: Prefix, cache: KVCache, first: int, exact: bool, model_id: str) -> int:
    """Write the prefix's blocks from `first` on; return how many are stored now.

    It ends at the first block that finds no room: one whose parent is missing could never be matched.
    """
    shape = tuple(cache.layers[0].tiles.shape[1:])
    num_stored = 0
    for i in range(first, prefix.num_blocks):
        if num_stored % SAVED_TOGETHER == 0:
            tiles = _canonical(cache, i)
        sections = [
            Section(f"layer.{n}", "uint32", shape, _bytes(t[num_stored % SAVED_TOGETHER]))
            for n, t in enumerate(tiles)
        ]
        if i == 0:
            stacked = mx.stack([mx.stack([c.sinks_k, c.sinks_v]) for c in cache.layers]).astype(mx.float16)
            mx.eval(stacked)
            sections.append(Section("sinks", "float16", stacked.shape, _bytes(np.array(stacked, copy=False))))
        meta = {"model": model_id, "first_token": blocks_end(i), "block_tokens": BLOCK_TOKENS}
        parent = prefix.keys[i - 1] if i else None
        if not store.write(prefix.keys[i], parent, prefix.blocks[i], sections, exact, meta):
            break
        num_stored += 1
    return num_stored


def _canonical(cache: KVCache, first: int) -> list[np.ndarray]:
    """Some blocks of every layer from `first` on as the disk has them, (n, num_kv_heads, tile_words) each."""
    some = slice(first, first + SAVED_TOGETHER)
    canonical = [to_canonical(layer.tiles[some], cache.head_dim) for layer in cache.layers]
    mx.eval(canonical)
    return [np.array(tiles, copy=False) for tiles in canonical]


def _bytes(array: np.ndarray) -> memoryview:
    """The array's own memory."""
    return array.data.cast("B")
