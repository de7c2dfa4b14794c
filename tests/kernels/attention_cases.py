"""Caches and queries that the backends' tests share."""

import mlx.core as mx

from kernels import BLOCK_TOKENS, CacheView
from kernels.codec import encode


def make_view(
    num_blocks,
    num_kv_heads=2,
    head_dim=64,
    num_sinks=64,
    num_tail=20,
    spare=0,
    batch=1,
    dtype=mx.float32,
    format="int4c",
):
    mx.random.seed(0)

    def dense(*leading):
        return mx.random.normal((*leading, head_dim)).astype(dtype)

    blocks = (num_kv_heads, BLOCK_TOKENS * num_blocks)
    tiles = encode(dense(*blocks), dense(*blocks), format)
    if spare:
        # Whatever stands beyond num_blocks must not be read: all ones is NaN in every scale.
        garbage = mx.full((spare, *tiles.shape[1:]), 0xFFFFFFFF, dtype=mx.uint32)
        tiles = mx.concatenate([tiles, garbage])
    sinks, tail = (num_kv_heads, num_sinks), (batch, num_kv_heads, num_tail)
    return CacheView(
        dense(*sinks), dense(*sinks), tiles, num_blocks, dense(*tail), dense(*tail), format=format
    )


def queries(num_q_heads, num_queries, head_dim, dtype=mx.float32, size=1.0, batch=1):
    return (size * mx.random.normal((batch, num_q_heads, num_queries, head_dim))).astype(dtype)
