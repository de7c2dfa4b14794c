"""int4c on NVIDIA GPUs: MLX kernels for attention, for the codec, and for the order of tiles in memory.

Tiles in device memory stand in an order that tensor cores read without shuffling; on disk and on every
other backend they are canonical (kernels/formats.py). Both have the same shape and the same bits:
`to_device_order` when tiles come in, `to_canonical` when they go out.
"""

from __future__ import annotations

import mlx.core as mx

from kernels.cache_view import CacheView
from kernels.cuda import launch, plan
from kernels.cuda.device import available, device
from kernels.formats import BLOCK_TOKENS, TileLayout

__all__ = ["available", "decode", "decode_attention", "encode", "to_canonical", "to_device_order"]


def decode_attention(q: mx.array, view: CacheView, scale: float, sinks: mx.array | None = None) -> mx.array:
    """As `kernels.decode_attention`, over a view whose tiles are in device order.

    float16 and bfloat16 queries take tensor cores, float32 ones a simple kernel in fp32. Two launches; the
    partials between them grow with the number of multiprocessors, not with the context.
    """
    batch, num_q_heads, num_queries, head_dim = q.shape
    num_sinks = view.sinks_k.shape[1]
    _, num_kv_heads, num_tail, _ = view.tail_k.shape
    group = num_q_heads // num_kv_heads
    per_batch = group * num_queries
    on, dtype = device(), q.dtype
    shape = None if dtype == mx.float32 else plan.shape_for(head_dim, batch * per_batch, on)
    rows, threads, step, per_cta, per_sm = (
        (shape.rows, 32 * shape.warps, 16, shape.warps, shape.per_sm)
        if shape
        else (plan.SIMPLE_WARPS, 32 * plan.SIMPLE_WARPS, 32, plan.SIMPLE_PIECES_PER_CTA, 1)
    )
    row_groups = -(-batch * per_batch // rows)
    touched = plan.batches_touched(rows, per_batch, batch)
    ctas, dense_ctas = plan.num_ctas(
        num_kv_heads=num_kv_heads,
        row_groups=row_groups,
        slots=on.num_multiprocessors * per_sm,
        stream_ctas=-(-4 * view.num_blocks // (per_cta if shape else 1)),
        dense_pieces=-(-num_sinks // step) + touched * -(-num_tail // step),
        per_cta=per_cta,
    )
    split, (has_sinks, has_tiles, has_lengths) = launch.split_kernel(
        head_dim,
        dtype,
        shape,
        on.bulk_copies,
        scale,
        view.window or 0,
        num_sinks > 0,
        view.num_blocks > 0,
        view.tail_lengths is not None,
    )
    inputs = [q, view.tail_k.astype(dtype), view.tail_v.astype(dtype)]
    if has_sinks:
        inputs += [view.sinks_k.astype(dtype), view.sinks_v.astype(dtype)]
    if has_tiles:
        # The number of blocks travels as a shape: no copy, no recompilation, no load before the first tile.
        whole = view.num_blocks == view.tiles.shape[0]
        inputs.append(view.tiles if whole else view.tiles[: view.num_blocks])
    if has_lengths:
        assert view.tail_lengths is not None
        inputs.append(view.tail_lengths.astype(mx.int32))
    partials = (num_kv_heads, ctas + dense_ctas, batch, group, num_queries)
    po, pl = split(
        inputs=inputs,
        grid=(row_groups * threads, ctas, num_kv_heads),
        threadgroup=(threads, 1, 1),
        output_shapes=[(*partials, head_dim), partials],
        output_dtypes=[mx.float32, mx.float32],
    )
    combine = launch.combine_kernel(head_dim, dtype, None if sinks is None else sinks.dtype)
    out: mx.array = combine(
        inputs=[po, pl] if sinks is None else [po, pl, sinks],
        grid=(batch * per_batch * 512, num_kv_heads, 1),
        threadgroup=(512, 1, 1),
        output_shapes=[q.shape],
        output_dtypes=[dtype],
    )[0]
    return out


def encode(k: mx.array, v: mx.array) -> mx.array:
    """As `kernels.encode`, canonical tiles, in one launch.

    The codes are those of kernels/codec.py except where float32 rounds two sums differently: a value within
    an ulp of a code's edge, a group whose two best scales leave errors within an ulp of each other.
    """
    num_heads, num_tokens, head_dim = k.shape
    if num_tokens % BLOCK_TOKENS or k.shape != v.shape:
        raise ValueError(
            f"keys {k.shape} and values {v.shape} must have one shape, whole {BLOCK_TOKENS}-token blocks"
        )
    layout, num_blocks = TileLayout(head_dim), num_tokens // BLOCK_TOKENS
    if not num_blocks:
        return mx.zeros((0, num_heads, layout.tile_words), dtype=mx.uint32)
    tiles: mx.array = launch.encode_kernel(head_dim, k.dtype)(
        inputs=[k, v.astype(k.dtype)],
        grid=(num_blocks * 256, num_heads, 2),
        threadgroup=(256, 1, 1),
        output_shapes=[(num_blocks, num_heads, layout.tile_words)],
        output_dtypes=[mx.uint32],
    )[0]
    return tiles


def decode(tiles: mx.array, head_dim: int, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array]:
    """As `kernels.decode`, from canonical tiles, in one launch."""
    num_blocks, num_heads = _check(tiles, head_dim)
    out = (num_heads, num_blocks * BLOCK_TOKENS, head_dim)
    if not num_blocks:
        return mx.zeros(out, dtype), mx.zeros(out, dtype)
    k, v = launch.decode_kernel(head_dim, dtype)(
        inputs=[mx.contiguous(tiles)],
        grid=(num_blocks * 256, num_heads, 2),
        threadgroup=(256, 1, 1),
        output_shapes=[out, out],
        output_dtypes=[dtype, dtype],
    )
    return k, v


def to_device_order(tiles: mx.array, head_dim: int) -> mx.array:
    """Canonical tiles (num_blocks, num_kv_heads, tile_words) → the same words' bits in device order."""
    return _reorder(tiles, head_dim, True)


def to_canonical(tiles: mx.array, head_dim: int) -> mx.array:
    """The inverse of `to_device_order`, bit for bit."""
    return _reorder(tiles, head_dim, False)


def _reorder(tiles: mx.array, head_dim: int, to_device: bool) -> mx.array:
    num_blocks, num_heads = _check(tiles, head_dim)
    if not num_blocks:
        return tiles
    out: mx.array = launch.reorder_kernel(head_dim, to_device)(
        inputs=[mx.contiguous(tiles)],
        grid=(num_blocks * num_heads * 256, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[tiles.shape],
        output_dtypes=[mx.uint32],
    )[0]
    return out


def _check(tiles: mx.array, head_dim: int) -> tuple[int, int]:
    layout = TileLayout(head_dim)
    if tiles.dtype != mx.uint32 or tiles.shape[-1] != layout.tile_words:
        raise ValueError(
            f"tiles {tiles.shape} {tiles.dtype} are not int4c tiles of head size {head_dim}: "
            f"expected uint32 with {layout.tile_words} words"
        )
    return tiles.shape[0], tiles.shape[1]
