"""The KV formats in plain MLX ops: keys and values to tiles and back. Knows layouts, not the attention."""

from __future__ import annotations

import mlx.core as mx

from kernels.formats import (
    BLOCK_TOKENS,
    Format,
    TileLayout,
    layout_of_blocks,
    layout_of_tiles,
    midrise,
    rotation,
)

_SCALE_STEPS = tuple(0.24 + 0.02 * i for i in range(12))
"""Candidate scales as shares of a group's RMS. The best one for a Gaussian is 0.335 (16 levels)."""
_FLOAT16_MAX = 65504.0


def encode(k: mx.array, v: mx.array, format: Format = "int4c") -> mx.array:
    """Encode whole blocks of keys (after RoPE) and values.

    Args:
        k, v: (num_kv_heads, 128 * num_blocks, head_dim), any float dtype.

    Returns:
        tiles: (num_blocks, num_kv_heads, tile_words) uint32.

    Raises:
        ValueError: if the token count is not a multiple of 128 or the head size has no form in this format.
    """
    num_heads, num_tokens, head_dim = k.shape
    layout = layout_of_blocks(k, v, format)
    if num_tokens == 0:
        return mx.zeros((0, num_heads, layout.tile_words), dtype=mx.uint32)
    k, v = _blocks(k), _blocks(v)  # (NB, H, 128, D) float32
    if layout.rotated:
        mean = _float16(k.mean(axis=2, keepdims=True))
        parts = [
            *_quantize((k - mean.astype(mx.float32)) @ rotation(head_dim), layout, layout.k_bits),
            mean,
            *_quantize(v @ rotation(head_dim), layout, layout.v_bits),
        ]
    else:
        parts = [*_quantize_affine(k, layout), *_quantize_affine(v, layout)]
    flat = [p.reshape(num_tokens // BLOCK_TOKENS, num_heads, -1).view(mx.uint32) for p in parts]
    return mx.concatenate(flat, axis=-1)


def decode(
    tiles: mx.array, head_dim: int, dtype: mx.Dtype = mx.float32, format: Format = "int4c"
) -> tuple[mx.array, mx.array]:
    """Decode tiles (num_blocks, num_kv_heads, tile_words) to keys and values.

    Returns:
        k, v: (num_kv_heads, 128 * num_blocks, head_dim) of `dtype`, computed in float32.
    """
    parts = unpack(tiles, head_dim, format)
    layout = parts.layout
    k = _dequantize(parts.k_codes, parts.k_scales, parts.k_biases, layout, layout.k_bits)
    v = _dequantize(parts.v_codes, parts.v_scales, parts.v_biases, layout, layout.v_bits)
    if layout.rotated:
        basis = rotation(head_dim).T
        k, v = k @ basis + parts.k_mean.astype(mx.float32)[:, :, None], v @ basis
    return _tokens(k).astype(dtype), _tokens(v).astype(dtype)


class TileParts:
    """The parts of tiles as arrays.

    k_codes, v_codes: (NB, H, 128, D * bits / 32) uint32.
    k_scales, v_scales, k_biases, v_biases: (NB, H, 128, G) float32, x ≈ c * scale + bias.
    k_mean: (NB, H, D) float16, what a rotated format's keys were centred on.
    """

    def __init__(self, tiles: mx.array, layout: TileLayout) -> None:
        self.layout = layout
        self._tiles, self._at = tiles, 0
        self.k_codes = self._rows(layout.k_codes_words)
        self.k_scales = self._groups()
        if layout.rotated:
            self.k_mean = self._take(layout.k_offset_words).view(mx.float16)
            self.k_biases = self.k_scales * -midrise(layout.k_bits)
        else:
            self.k_biases = self._groups()
        self.v_codes = self._rows(layout.v_codes_words)
        self.v_scales = self._groups()
        self.v_biases = self.v_scales * -midrise(layout.v_bits) if layout.rotated else self._groups()

    def _take(self, num_words: int) -> mx.array:
        start, self._at = self._at, self._at + num_words
        return self._tiles[:, :, start : self._at]

    def _groups(self) -> mx.array:
        raw = self._take(self.layout.scales_words).view(mx.float16)
        shape = (*raw.shape[:2], BLOCK_TOKENS, self.layout.num_groups)
        return raw.reshape(shape).astype(mx.float32)

    def _rows(self, num_words: int) -> mx.array:
        raw = self._take(num_words)
        return raw.reshape(*raw.shape[:2], BLOCK_TOKENS, num_words // BLOCK_TOKENS)


def unpack(tiles: mx.array, head_dim: int, format: Format = "int4c") -> TileParts:
    """Name the parts of tiles (num_blocks, num_kv_heads, tile_words) uint32.

    Raises:
        ValueError: if the last axis isn't the tile size of this head size.
    """
    return TileParts(tiles, layout_of_tiles(tiles, head_dim, format))


def _quantize(x: mx.array, layout: TileLayout, bits: int) -> tuple[mx.array, mx.array]:
    """(NB, H, 128, D) float32 → codes (NB, H, 128, D * bits / 32) uint32, scales (NB, H, 128, G) float16.

    Four bits: for each group the scale with the smallest squared error among `_SCALE_STEPS` of its RMS.
    Eight: the one that reaches the largest value, since a search gains nothing that can be measured.
    """
    grouped = x.reshape(*x.shape[:-1], layout.num_groups, layout.group_size)
    if bits == 8:
        best_scale = _float16(mx.abs(grouped).max(axis=-1, keepdims=True) / midrise(8))
    else:
        best_scale = _search(grouped)
    codes = _code(grouped, best_scale.astype(mx.float32), bits)
    return _pack(codes.reshape(x.shape), bits), best_scale.squeeze(-1)


def _search(grouped: mx.array) -> mx.array:
    rms = mx.sqrt(mx.square(grouped).mean(axis=-1, keepdims=True))
    best_error, best_scale = mx.full(rms.shape, mx.inf), rms.astype(mx.float16)
    for step in _SCALE_STEPS:
        # The error of the scale that will be stored, float16 rounding included.
        stored = _float16(rms * step)
        scale = stored.astype(mx.float32)
        error = mx.square((_code(grouped, scale, 4) - midrise(4)) * scale - grouped)
        error = error.sum(axis=-1, keepdims=True)
        better = error < best_error
        best_error = mx.where(better, error, best_error)
        best_scale = mx.where(better, stored, best_scale)
    return best_scale


def _quantize_affine(x: mx.array, layout: TileLayout) -> tuple[mx.array, mx.array, mx.array]:
    """As `mx.quantize` has it: codes, and float16 scales and biases (NB, H, 128, G)."""
    codes, scales, biases = mx.quantize(x, group_size=layout.group_size, bits=4)
    return codes, _float16(scales), _float16(biases)


def _code(x: mx.array, scale: mx.array, bits: int) -> mx.array:
    """The code of each value, as float32. A group of zeros has scale 0 and any code stands for 0."""
    middle = 2 ** (bits - 1)
    return mx.clip(mx.floor(x / mx.maximum(scale, 1e-30)) + middle, 0, 2 * middle - 1)


def _pack(codes: mx.array, bits: int) -> mx.array:
    words = codes.astype(mx.uint32).reshape(*codes.shape[:-1], -1, 32 // bits)
    return mx.left_shift(words, mx.arange(0, 32, bits, dtype=mx.uint32)).sum(axis=-1)


def _dequantize(
    codes: mx.array, scales: mx.array, biases: mx.array, layout: TileLayout, bits: int
) -> mx.array:
    shifts = mx.arange(0, 32, bits, dtype=mx.uint32)
    numbers = mx.bitwise_and(mx.right_shift(codes[..., None], shifts), 2**bits - 1)
    shape = (*codes.shape[:-1], layout.num_groups, layout.group_size)
    numbers = numbers.reshape(shape).astype(mx.float32)
    if layout.rotated:
        # The difference is exact, where a sum of two products would round twice.
        values = (numbers - midrise(bits)) * scales[..., None]
    else:
        values = numbers * scales[..., None] + biases[..., None]
    return values.reshape(*codes.shape[:-1], layout.head_dim)


def _float16(x: mx.array) -> mx.array:
    return mx.clip(x, -_FLOAT16_MAX, _FLOAT16_MAX).astype(mx.float16)


def _blocks(x: mx.array) -> mx.array:
    """(H, 128 * NB, D) → (NB, H, 128, D) float32."""
    heads, _, dim = x.shape
    return x.reshape(heads, -1, BLOCK_TOKENS, dim).transpose(1, 0, 2, 3).astype(mx.float32)


def _tokens(x: mx.array) -> mx.array:
    """(NB, H, 128, D) → (H, 128 * NB, D)."""
    nb, heads, _, dim = x.shape
    return x.transpose(1, 0, 2, 3).reshape(heads, nb * BLOCK_TOKENS, dim)
