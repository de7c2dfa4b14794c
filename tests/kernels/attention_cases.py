"""Caches and queries that the backends' tests share."""

import mlx.core as mx
import numpy as np

from kernels import BLOCK_TOKENS, CacheView
from kernels.codec import encode, unpack
from kernels.formats import rotation


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


def decode_in_float64(tiles, head_dim, format="int4c"):
    """(num_kv_heads, tokens, D) keys and values of tiles, exactly."""
    parts = unpack(tiles, head_dim, format)
    layout = parts.layout

    def wide(x):
        return np.array(x).astype(np.float64)

    def numbers(codes, scales, biases, bits):
        shifts = np.arange(0, 32, bits, dtype=np.uint32)
        unpacked = np.array(codes)[..., None] >> shifts & 2**bits - 1
        x = unpacked.reshape(*codes.shape[:-1], head_dim)
        x = x * wide(scales).repeat(layout.group_size, axis=-1)
        return x + wide(biases).repeat(layout.group_size, axis=-1)

    k = numbers(parts.k_codes, parts.k_scales, parts.k_biases, layout.k_bits)
    v = numbers(parts.v_codes, parts.v_scales, parts.v_biases, layout.v_bits)
    if layout.rotated:
        # Entries of R in double precision: the signs are exact, the size isn't.
        basis = np.sign(np.array(rotation(head_dim), np.float64)).T / np.sqrt(head_dim)
        k, v = k @ basis + wide(parts.k_mean)[:, :, None], v @ basis
    return [x.transpose(1, 0, 2, 3).reshape(x.shape[1], -1, head_dim) for x in (k, v)]
