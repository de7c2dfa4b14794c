"""Arrays in, arrays out: the KV codec and the attention that reads it. Knows no model, file or job."""

from __future__ import annotations

import mlx.core as mx

from kernels import cuda, slices
from kernels.cache_view import CacheView
from kernels.dispatch import backend, cpu_library, disable_native, reads_device_order
from kernels.formats import BLOCK_TOKENS, FORMATS, Format, TileLayout
from kernels.slices import has_fused_prefill

MAX_QUERIES = 16
"""The most query tokens that one call of `decode_attention` takes."""

__all__ = [
    "BLOCK_TOKENS",
    "FORMATS",
    "MAX_QUERIES",
    "CacheView",
    "Format",
    "TileLayout",
    "decode",
    "decode_attention",
    "disable_native",
    "encode",
    "from_canonical",
    "has_fused_prefill",
    "prefill_attention",
    "to_canonical",
]


def decode_attention(q: mx.array, view: CacheView, scale: float, sinks: mx.array | None = None) -> mx.array:
    """Causal attention of each row's newest 1 to 16 tokens over one layer's compressed cache.

    Args:
        q: (B, num_q_heads, Sq, head_dim) after RoPE, any float dtype; query head h reads KV head
            h // (num_q_heads / num_kv_heads).
        view: the cache, whose blocks all B rows share.
        scale: multiplies q · k.
        sinks: (num_q_heads,) extra logits that take weight and give no value (gpt-oss), or None.

    Returns:
        (B, num_q_heads, Sq, head_dim) of q's dtype.

    Raises:
        ValueError: if a shape doesn't fit; the message names both sides.
    """
    _check(q, view)
    return backend(view.format).decode_attention(q, view, scale, sinks).astype(q.dtype)


def prefill_attention(
    q: mx.array, k: mx.array, v: mx.array, scale: float, sinks: mx.array | None = None
) -> mx.array:
    """Causal attention of a sequence's newest tokens over dense keys and values, their own included.

    The same inputs give the same bits, whatever the number of threads. It is evaluated at once where MLX
    would lay out more scores than `kernels.slices` has room for.

    Args:
        q: (1, num_q_heads, Sq, head_dim) after RoPE, any float dtype; query head h reads KV head
            h // (num_q_heads / num_kv_heads), query i the keys 0 to T - Sq + i.
        k, v: (1, num_kv_heads, T, head_dim) with T >= Sq; slices of a larger buffer are read in place.
        scale: multiplies q · k.
        sinks: as for `decode_attention`.

    Returns:
        (1, num_q_heads, Sq, head_dim) of q's dtype.

    Raises:
        ValueError: if a shape doesn't fit; the message names both sides.
    """
    _check_dense(q, k, v)
    library = cpu_library()
    if library and sinks is None and library.takes(q, k, v):
        return library.prefill_attention(q, k, v, scale)
    return slices.causal_attention(q, k, v, scale, sinks)


def encode(k: mx.array, v: mx.array, format: Format = "int4c") -> mx.array:
    """Encode whole blocks of keys (after RoPE) and values.

    Args:
        k, v: (num_kv_heads, 128 * num_blocks, head_dim), any float dtype.

    Returns:
        tiles: (num_blocks, num_kv_heads, tile_words) uint32, in the order that this device reads.

    Raises:
        ValueError: if the token count is not a multiple of 128 or the head size has no form in this format.
    """
    return from_canonical(backend(format).encode(k, v, format), k.shape[-1], format)


def decode(
    tiles: mx.array, head_dim: int, dtype: mx.Dtype = mx.float32, format: Format = "int4c"
) -> tuple[mx.array, mx.array]:
    """Decode tiles, in the order that this device reads, to keys and values.

    Returns:
        k, v: (num_kv_heads, 128 * num_blocks, head_dim) of `dtype`, computed in float32.

    Raises:
        ValueError: if the last axis isn't the tile size of this head size.
    """
    return backend(format).decode(to_canonical(tiles, head_dim, format), head_dim, dtype, format)


def from_canonical(tiles: mx.array, head_dim: int, format: Format = "int4c") -> mx.array:
    """Tiles as kernels/formats.py lays them out, in the order that this device reads; same shape and bits."""
    return cuda.to_device_order(tiles, head_dim, format) if reads_device_order(format) else tiles


def to_canonical(tiles: mx.array, head_dim: int, format: Format = "int4c") -> mx.array:
    """The way back: tiles as every other device and the disk have them."""
    return cuda.to_canonical(tiles, head_dim, format) if reads_device_order(format) else tiles


def _check_dense(q: mx.array, k: mx.array, v: mx.array) -> None:
    batch, num_q_heads, num_queries, head_dim = q.shape
    rows, num_kv_heads, num_tokens, kv_dim = k.shape
    if k.shape != v.shape or batch != rows or num_q_heads % num_kv_heads or head_dim != kv_dim:
        raise ValueError(
            f"queries {q.shape} do not fit keys {k.shape} and values {v.shape}: expected both to be "
            f"({batch}, a divisor of {num_q_heads}, T, {head_dim})"
        )
    if not 1 <= num_queries <= num_tokens:
        raise ValueError(
            f"{num_queries} query tokens over {num_tokens} keys: expected 1 to {num_tokens}, "
            "since a query's own key is among them"
        )


def _check(q: mx.array, view: CacheView) -> None:
    batch, num_q_heads, num_queries, head_dim = q.shape
    rows, num_kv_heads, num_tail, tail_dim = view.tail_k.shape
    if batch != rows or num_q_heads % num_kv_heads or head_dim != tail_dim:
        raise ValueError(
            f"queries {q.shape} do not fit a tail {view.tail_k.shape}: expected ({rows}, a multiple of "
            f"{num_kv_heads}, Sq, {tail_dim})"
        )
    if not 1 <= num_queries <= min(MAX_QUERIES, num_tail):
        raise ValueError(
            f"{num_queries} query tokens: decode attention takes 1 to {MAX_QUERIES}, "
            f"and no more than the tail holds ({num_tail})"
        )
    if not 0 <= view.num_blocks <= view.tiles.shape[0]:
        raise ValueError(
            f"num_blocks {view.num_blocks} is outside the {view.tiles.shape[0]} tiles that are there"
        )
    if view.window is not None and (view.num_blocks or view.sinks_k.shape[1]):
        raise ValueError(f"window {view.window}: a windowed layer keeps its whole cache in the tail")
