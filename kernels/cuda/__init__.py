"""The KV formats on NVIDIA GPUs: MLX kernels for attention, the codec, and the order of tiles in memory.

Tiles in device memory stand in an order that tensor cores read without shuffling; on disk and on every
other backend they are canonical (kernels/formats.py). Both have the same shape and the same bits:
`to_device_order` when tiles come in, `to_canonical` when they go out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial

import mlx.core as mx

from kernels import codec
from kernels.cache_view import CacheView
from kernels.cuda import launch, plan
from kernels.cuda.device import available, device
from kernels.formats import BLOCK_TOKENS, FORMATS, Format, TileLayout, layout_of_blocks, layout_of_tiles

__all__ = ["FORMATS", "available", "decode", "decode_attention", "encode", "to_canonical", "to_device_order"]


def decode_attention(q: mx.array, view: CacheView, scale: float, sinks: mx.array | None = None) -> mx.array:
    """As `kernels.decode_attention`, over a view whose tiles are in device order.

    float16 and bfloat16 queries take tensor cores, float32 ones a simple kernel in fp32. One launch up to 8
    rows of a KV head, else two. What they leave to merge grows with the number of multiprocessors, not with
    the context.
    """
    dtype, num_blocks, lengths = q.dtype, view.num_blocks, view.tail_lengths
    num_sinks = view.sinks_k.shape[1]
    _, num_kv_heads, num_tail, _ = view.tail_k.shape
    logits = None if sinks is None else sinks.dtype
    shape = (*q.shape, num_kv_heads, num_sinks, num_tail, num_blocks)
    launches = _launches(shape, view.format, dtype, scale, view.window or 0, lengths is not None, logits)
    inputs = [launches.numbers, q, view.tail_k.astype(dtype), view.tail_v.astype(dtype)]
    if num_sinks:
        inputs += [view.sinks_k.astype(dtype), view.sinks_v.astype(dtype)]
    if num_blocks:
        inputs.append(view.tiles)
    if lengths is not None:
        inputs.append(lengths.astype(mx.int32))
    more = [] if sinks is None else [sinks]
    if launches.combine is None:
        return launches.split(inputs=[*inputs, launch.counters(launches.num_groups), *more])[-1]
    return launches.combine(inputs=launches.split(inputs=inputs) + more)[0]


@dataclass(frozen=True)
class _Launches:
    """Of one call shape, all but their inputs. combine: None where the first one merges its partials."""

    numbers: mx.array
    num_groups: int
    split: launch.Kernel
    combine: launch.Kernel | None


@lru_cache(maxsize=4096)
def _launches(
    shape: tuple[int, ...],
    format: Format,
    dtype: mx.Dtype,
    scale: float,
    window: int,
    has_lengths: bool,
    logits: mx.Dtype | None,
) -> _Launches:
    """All layers of a model share it for a token, which keeps the host's part of a call short."""
    batch, num_q_heads, num_queries, head_dim, num_kv_heads, num_sinks, num_tail, num_blocks = shape
    on = device()
    group = num_q_heads // num_kv_heads
    rows = batch * group * num_queries
    build = plan.Simple() if dtype == mx.float32 else plan.build_for(TileLayout(head_dim, format), rows, on)
    cut = plan.cut(build, on, batch, num_kv_heads, group * num_queries, num_sinks, num_tail, num_blocks)
    partials = (num_kv_heads, cut.partials, batch, group, num_queries)
    shapes, dtypes = [(*partials, head_dim), partials], [mx.float32, mx.float32]
    if build.merges:
        shapes, dtypes = [*shapes, shape[:4]], [*dtypes, dtype]
    split = partial(
        launch.split_kernel(
            head_dim, format, dtype, build, scale, window, num_sinks > 0, num_blocks > 0, has_lengths, logits
        ),
        grid=(cut.num_ctas * build.threads, 1, 1),
        threadgroup=(build.threads, 1, 1),
        output_shapes=shapes,
        output_dtypes=dtypes,
    )
    combine = None
    if not build.merges:
        combine = partial(
            launch.combine_kernel(head_dim, format, dtype, logits),
            grid=(rows * launch.COMBINE_THREADS, num_kv_heads, 1),
            threadgroup=(launch.COMBINE_THREADS, 1, 1),
            output_shapes=[shape[:4]],
            output_dtypes=[dtype],
        )
    return _Launches(launch.numbers(cut.shape), num_kv_heads * cut.row_groups, split, combine)


def encode(k: mx.array, v: mx.array, format: Format = "int4c") -> mx.array:
    """As `kernels.encode`, canonical tiles, in one launch.

    The codes are those of kernels/codec.py except where float32 rounds two sums differently: a value within
    an ulp of a code's edge, a group whose two best scales leave errors within an ulp of each other. affine4
    is coded by MLX itself, as on every device.
    """
    num_heads, num_tokens, head_dim = k.shape
    layout, num_blocks = layout_of_blocks(k, v, format), num_tokens // BLOCK_TOKENS
    if not num_blocks:
        return mx.zeros((0, num_heads, layout.tile_words), dtype=mx.uint32)
    if not layout.rotated:
        return codec.encode(k, v, format)
    tiles: mx.array = launch.encode_kernel(head_dim, format, k.dtype)(
        inputs=[k, v.astype(k.dtype)],
        grid=(num_blocks * 256, num_heads, 2),
        threadgroup=(256, 1, 1),
        output_shapes=[(num_blocks, num_heads, layout.tile_words)],
        output_dtypes=[mx.uint32],
    )[0]
    return tiles


def decode(
    tiles: mx.array, head_dim: int, dtype: mx.Dtype = mx.float32, format: Format = "int4c"
) -> tuple[mx.array, mx.array]:
    """As `kernels.decode`, from canonical tiles, in one launch; affine4 in MLX's own operations."""
    layout = layout_of_tiles(tiles, head_dim, format)
    num_blocks, num_heads = tiles.shape[:2]
    out = (num_heads, num_blocks * BLOCK_TOKENS, head_dim)
    if not num_blocks:
        return mx.zeros(out, dtype), mx.zeros(out, dtype)
    if not layout.rotated:
        return codec.decode(tiles, head_dim, dtype, format)
    k, v = launch.decode_kernel(head_dim, format, dtype)(
        inputs=[mx.contiguous(tiles)],
        grid=(num_blocks * 256, num_heads, 2),
        threadgroup=(256, 1, 1),
        output_shapes=[out, out],
        output_dtypes=[dtype, dtype],
    )
    return k, v


def to_device_order(tiles: mx.array, head_dim: int, format: Format = "int4c") -> mx.array:
    """Canonical tiles (num_blocks, num_kv_heads, tile_words) → the same words' bits in device order."""
    return _reorder(tiles, head_dim, format, True)


def to_canonical(tiles: mx.array, head_dim: int, format: Format = "int4c") -> mx.array:
    """The inverse of `to_device_order`, bit for bit."""
    return _reorder(tiles, head_dim, format, False)


def _reorder(tiles: mx.array, head_dim: int, format: Format, to_device: bool) -> mx.array:
    layout_of_tiles(tiles, head_dim, format)
    num_blocks, num_heads = tiles.shape[:2]
    if not num_blocks:
        return tiles
    out: mx.array = launch.reorder_kernel(head_dim, format, to_device)(
        inputs=[mx.contiguous(tiles)],
        grid=(4 * num_blocks * num_heads * 256, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[tiles.shape],
        output_dtypes=[mx.uint32],
    )[0]
    return out
