"""A few milliseconds of attention compared with the reference: is this device's kernel right?"""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from kernels import BLOCK_TOKENS, CacheView, Format, decode_attention, encode, reference, to_canonical


def attention_error(num_q_heads: int, num_kv_heads: int, head_dim: int, format: Format = "int4c") -> float:
    """The largest difference between `decode_attention` and the reference, relative to the largest output.

    Uses a small cache of these shapes with sinks, two blocks and a tail; NaN if the kernel gives one.
    """
    key = mx.random.key(0)

    def normal(*shape: int) -> mx.array:
        nonlocal key
        key, own = mx.random.split(key)
        return mx.random.normal((*shape, head_dim), key=own)

    tiles = encode(normal(num_kv_heads, 2 * BLOCK_TOKENS), normal(num_kv_heads, 2 * BLOCK_TOKENS), format)
    sinks, tail = (num_kv_heads, 64), (1, num_kv_heads, 9)
    view = CacheView(normal(*sinks), normal(*sinks), tiles, 2, normal(*tail), normal(*tail), format=format)
    q = normal(1, num_q_heads, 2)
    canonical = replace(view, tiles=to_canonical(tiles, head_dim, format))
    truth = reference.decode_attention(q, canonical, head_dim**-0.5)
    difference = mx.abs(decode_attention(q, view, head_dim**-0.5) - truth).max()
    return float(difference / mx.abs(truth).max())
