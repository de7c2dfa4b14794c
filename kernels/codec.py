"""int4c in plain MLX ops: keys and values to tiles and back. Knows the layout, not the attention."""

from __future__ import annotations

import mlx.core as mx

from kernels.formats import BLOCK_TOKENS, MIDRISE, TileLayout, layout_of_blocks, layout_of_tiles, rotation

_SCALE_STEPS = tuple(0.24 + 0.02 * i for i in range(12))
"""Candidate scales as shares of a group's RMS. The best one for a Gaussian is 0.335 (16 levels)."""
_FLOAT16_MAX = 65504.0


def encode(k: mx.array, v: mx.array) -> mx.array:
    """Encode whole blocks of keys (after RoPE) and values.

    Args:
        k, v: (num_kv_heads, 128 * num_blocks, head_dim), any float dtype.

    Returns:
        tiles: (num_blocks, num_kv_heads, tile_words) uint32.

    Raises:
        ValueError: if the token count is not a multiple of 128 or the head size has no int4c form.
    """
    num_heads, num_tokens, head_dim = k.shape
    layout = layout_of_blocks(k, v)
    if num_tokens == 0:
        return mx.zeros((0, num_heads, layout.tile_words), dtype=mx.uint32)
    k, v = _blocks(k), _blocks(v)  # (NB, H, 128, D) float32
    mean = mx.clip(k.mean(axis=2, keepdims=True), -_FLOAT16_MAX, _FLOAT16_MAX).astype(mx.float16)
    k_codes, k_scales = _quantize((k - mean.astype(mx.float32)) @ rotation(head_dim), layout)
    v_codes, v_scales = _quantize(v @ rotation(head_dim), layout)
    parts = [k_codes, k_scales, mean, v_codes, v_scales]
    flat = [p.reshape(num_tokens // BLOCK_TOKENS, num_heads, -1).view(mx.uint32) for p in parts]
    return mx.concatenate(flat, axis=-1)


def decode(tiles: mx.array, head_dim: int, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array]:
    """Decode tiles (num_blocks, num_kv_heads, tile_words) to keys and values.

    Returns:
        k, v: (num_kv_heads, 128 * num_blocks, head_dim) of `dtype`, computed in float32.
    """
    parts = unpack(tiles, head_dim)
    layout = TileLayout(head_dim)
    basis = rotation(head_dim).T
    k = (
        _dequantize(parts.k_codes, parts.k_scales, layout) @ basis
        + parts.k_mean.astype(mx.float32)[:, :, None]
    )
    v = _dequantize(parts.v_codes, parts.v_scales, layout) @ basis
    return _tokens(k).astype(dtype), _tokens(v).astype(dtype)


class TileParts:
    """The five parts of tiles as arrays: codes (NB, H, 128, D/8) uint32, scales (NB, H, 128, G) float16,
    mean (NB, H, D) float16."""

    def __init__(self, tiles: mx.array, layout: TileLayout) -> None:
        nb, heads = tiles.shape[:2]
        a = layout.codes_words
        b = a + layout.scales_words
        c = layout.k_words
        d = c + layout.codes_words
        codes = (nb, heads, BLOCK_TOKENS, layout.head_dim // 8)
        scales = (nb, heads, BLOCK_TOKENS, layout.num_groups)
        self.k_codes = tiles[:, :, :a].reshape(codes)
        self.k_scales = tiles[:, :, a:b].view(mx.float16).reshape(scales)
        self.k_mean = tiles[:, :, b:c].view(mx.float16)
        self.v_codes = tiles[:, :, c:d].reshape(codes)
        self.v_scales = tiles[:, :, d:].view(mx.float16).reshape(scales)


def unpack(tiles: mx.array, head_dim: int) -> TileParts:
    """Name the parts of tiles (num_blocks, num_kv_heads, tile_words) uint32.

    Raises:
        ValueError: if the last axis isn't the tile size of this head size.
    """
    return TileParts(tiles, layout_of_tiles(tiles, head_dim))


def _quantize(x: mx.array, layout: TileLayout) -> tuple[mx.array, mx.array]:
    """(NB, H, 128, D) float32 → codes (NB, H, 128, D/8) uint32, scales (NB, H, 128, G) float16.

    For each group the scale with the smallest squared error among `_SCALE_STEPS` of its RMS."""
    grouped = x.reshape(*x.shape[:-1], layout.num_groups, layout.group_size)
    rms = mx.sqrt(mx.square(grouped).mean(axis=-1, keepdims=True))
    best_error, best_scale = mx.full(rms.shape, mx.inf), rms
    for step in _SCALE_STEPS:
        # The error of the scale that will be stored, float16 rounding included.
        scale = mx.minimum(rms * step, _FLOAT16_MAX).astype(mx.float16).astype(mx.float32)
        error = mx.square((_code(grouped, scale) - MIDRISE) * scale - grouped).sum(axis=-1, keepdims=True)
        better = error < best_error
        best_error = mx.where(better, error, best_error)
        best_scale = mx.where(better, scale, best_scale)
    codes = _code(grouped, best_scale).astype(mx.uint32).reshape(*x.shape[:-1], -1, 8)
    shifts = mx.arange(0, 32, 4, dtype=mx.uint32)
    return mx.left_shift(codes, shifts).sum(axis=-1), best_scale.squeeze(-1).astype(mx.float16)


def _code(x: mx.array, scale: mx.array) -> mx.array:
    """The code of each value, as float32. A group of zeros has scale 0 and any code stands for 0."""
    return mx.clip(mx.floor(x / mx.maximum(scale, 1e-30)) + 8, 0, 15)


def _dequantize(codes: mx.array, scales: mx.array, layout: TileLayout) -> mx.array:
    shifts = mx.arange(0, 32, 4, dtype=mx.uint32)
    nibbles = mx.bitwise_and(mx.right_shift(codes[..., None], shifts), 15)  # (NB, H, 128, D/8, 8)
    shape = (*codes.shape[:-1], layout.num_groups, layout.group_size)
    values = (nibbles.reshape(shape).astype(mx.float32) - MIDRISE) * scales[..., None].astype(mx.float32)
    return values.reshape(*codes.shape[:-1], layout.head_dim)


def _blocks(x: mx.array) -> mx.array:
    """(H, 128 * NB, D) → (NB, H, 128, D) float32."""
    heads, _, dim = x.shape
    return x.reshape(heads, -1, BLOCK_TOKENS, dim).transpose(1, 0, 2, 3).astype(mx.float32)


def _tokens(x: mx.array) -> mx.array:
    """(NB, H, 128, D) → (H, 128 * NB, D)."""
    nb, heads, _, dim = x.shape
    return x.transpose(1, 0, 2, 3).reshape(heads, nb * BLOCK_TOKENS, dim)
