"""Decode attention from tiles with MLX's own quantised matmul: right everywhere, fused nowhere.

(c − midrise)·s is MLX's affine form with bias −midrise·s, so `mx.quantized_matmul` reads the codes as they
are. Each block is a split; one softmax over all of them and the dense ends is their combine. Arithmetic is
float32, since −7.5·s isn't a float16 number.
"""

from __future__ import annotations

import mlx.core as mx

from kernels.cache_view import CacheView, tail_mask
from kernels.codec import TileParts, unpack
from kernels.formats import BLOCK_TOKENS, TileLayout, rotation

_MLX_GROUP_SIZES = (32, 64, 128)


def supports(head_dim: int) -> bool:
    """Whether MLX has a quantised matmul for this head size's groups (not for 80, 96 and 112)."""
    return TileLayout(head_dim).group_size in _MLX_GROUP_SIZES


def decode_attention(q: mx.array, view: CacheView, scale: float, sinks: mx.array | None = None) -> mx.array:
    """As `kernels.reference.decode_attention`."""
    batch, num_q_heads, num_queries, head_dim = q.shape
    num_kv_heads, num_sinks = view.sinks_k.shape[:2]
    num_tail, nb = view.tail_k.shape[2], view.num_blocks
    group = num_q_heads // num_kv_heads
    rows = q.astype(mx.float32).reshape(batch, num_kv_heads, group * num_queries, head_dim) * scale
    # The shared part sees one long list of rows per KV head: every K and V is read once for all of them.
    shared = rows.swapaxes(0, 1).reshape(num_kv_heads, -1, head_dim)  # (Hkv, R, D)
    num_rows = shared.shape[1]

    def by_row(x: mx.array) -> mx.array:
        """(B, Hkv, group * Sq, n) → (Hkv, R, n)."""
        return x.swapaxes(0, 1).reshape(num_kv_heads, num_rows, -1)

    tail_scores = rows @ view.tail_k.astype(mx.float32).swapaxes(-1, -2)  # (B, Hkv, group * Sq, num_tail)
    visible = mx.tile(tail_mask(view, num_queries), (1, group, 1))[:, None]
    tail_scores = mx.where(visible, tail_scores, -mx.inf)
    scores = [shared @ view.sinks_k.astype(mx.float32).swapaxes(-1, -2), by_row(tail_scores)]
    if nb:
        parts = unpack(view.tiles[:nb], head_dim, view.format)
        scores.append(_block_scores(shared, parts))
    if sinks is not None:
        logits = mx.repeat(sinks.astype(mx.float32).reshape(num_kv_heads, group), num_queries, axis=1)
        scores.append(mx.tile(logits, (1, batch))[..., None])

    weights = mx.softmax(mx.concatenate(scores, axis=-1), axis=-1)  # (Hkv, R, T)
    first_block = num_sinks + num_tail
    out = weights[..., :num_sinks] @ view.sinks_v.astype(mx.float32)
    if nb:
        out = out + _weighted_values(weights[..., first_block : first_block + nb * BLOCK_TOKENS], parts)
    tail_weights = (
        weights[..., num_sinks:first_block].reshape(num_kv_heads, batch, -1, num_tail).swapaxes(0, 1)
    )
    # A padded tail may hold anything, NaN included.
    tail_v = mx.where(visible.any(axis=2)[..., None], view.tail_v.astype(mx.float32), 0)
    out = out.reshape(num_kv_heads, batch, -1, head_dim).swapaxes(0, 1) + tail_weights @ tail_v
    return out.reshape(q.shape)


def _block_scores(rows: mx.array, parts: TileParts) -> mx.array:
    """(Hkv, R, D) scaled queries → their scores over all blocks, (Hkv, R, NB * 128)."""
    layout, nb = parts.layout, parts.k_codes.shape[0]
    turned = rows @ rotation(layout.head_dim) if layout.rotated else rows
    scores = mx.quantized_matmul(
        mx.broadcast_to(turned[None], (nb, *rows.shape)),
        parts.k_codes,
        parts.k_scales,
        parts.k_biases,
        transpose=True,
        group_size=layout.group_size,
        bits=layout.k_bits,
    )  # (NB, Hkv, R, 128)
    if layout.rotated:
        scores = scores + rows @ parts.k_mean.astype(mx.float32)[..., None]
    return scores.transpose(1, 2, 0, 3).reshape(*rows.shape[:2], -1)


def _weighted_values(weights: mx.array, parts: TileParts) -> mx.array:
    """(Hkv, R, NB * 128) weights → (Hkv, R, D), the values' rotation undone."""
    layout, nb = parts.layout, parts.v_codes.shape[0]
    out = mx.quantized_matmul(
        weights.reshape(*weights.shape[:2], nb, BLOCK_TOKENS).transpose(2, 0, 1, 3),
        parts.v_codes,
        parts.v_scales,
        parts.v_biases,
        transpose=False,
        group_size=layout.group_size,
        bits=layout.v_bits,
    ).sum(axis=0)  # (NB, Hkv, R, D) summed over blocks
    return out @ rotation(layout.head_dim).T if layout.rotated else out
