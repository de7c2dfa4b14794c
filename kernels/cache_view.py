"""What decode attention reads: one layer's keys and values, dense at both ends and tiles between."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from kernels.formats import Format


@dataclass(frozen=True)
class CacheView:
    """One layer's KV in token order: sinks, blocks, tail.

    The B rows of a batch share sinks and blocks (one document) and have a tail each.

    sinks_k, sinks_v: (num_kv_heads, num_sinks, head_dim) dense, all of them visible.
    tiles: (capacity, num_kv_heads, tile_words) uint32, of which the first `num_blocks` count.
    tail_k, tail_v: (B, num_kv_heads, num_tail, head_dim) dense.
    tail_lengths: (B,) int32, how many of a row's tail tokens count; None if all of them do. A row's last
        Sq tokens are the queries' own.
    window: a query sees only the newest `window` tokens, its own included; None for no limit. Only for
        a layer whose whole cache is its tail.
    format: of the tiles.
    """

    sinks_k: mx.array
    sinks_v: mx.array
    tiles: mx.array
    num_blocks: int
    tail_k: mx.array
    tail_v: mx.array
    tail_lengths: mx.array | None = None
    window: int | None = None
    format: Format = "int4c"


def tail_mask(view: CacheView, num_queries: int) -> mx.array:
    """Which tail tokens each query sees: (B, Sq, num_tail) bool."""
    batch, _, num_tail, _ = view.tail_k.shape
    lengths = mx.full((batch,), num_tail) if view.tail_lengths is None else view.tail_lengths
    own = (
        lengths[:, None, None] - num_queries + mx.arange(num_queries)[:, None]
    )  # (B, Sq, 1) its own position
    position = mx.arange(num_tail)
    visible = position <= own
    return visible if view.window is None else visible & (position > own - view.window)
