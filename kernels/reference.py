"""The readable float32 truth that every backend is compared with."""

from __future__ import annotations

import mlx.core as mx

from kernels.cache_view import CacheView, tail_mask
from kernels.codec import decode


def decode_attention(q: mx.array, view: CacheView, scale: float, sinks: mx.array | None = None) -> mx.array:
    """Causal attention of each row's newest Sq tokens over one layer's cache, in float32.

    Args and errors as `kernels.decode_attention`.

    Returns:
        (B, num_q_heads, Sq, head_dim) float32.
    """
    batch, _, num_queries, head_dim = q.shape
    shared_k, shared_v = decode(view.tiles[: view.num_blocks], head_dim, format=view.format)
    k = _tokens(view.sinks_k, shared_k, view.tail_k)  # (B, Hkv, 1, T, D)
    v = _tokens(view.sinks_v, shared_v, view.tail_v)
    num_kv_heads = k.shape[1]
    rows = q.astype(mx.float32).reshape(
        batch, num_kv_heads, -1, num_queries, head_dim
    )  # (B, Hkv, group, Sq, D)
    scores = scale * (rows @ k.swapaxes(-1, -2))  # (B, Hkv, group, Sq, T)
    in_tail = tail_mask(view, num_queries)  # (B, Sq, num_tail)
    before = mx.ones((batch, num_queries, k.shape[3] - in_tail.shape[-1]), dtype=mx.bool_)
    visible = mx.concatenate([before, in_tail], axis=-1)[:, None, None]
    scores = mx.where(visible, scores, -mx.inf)
    top = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        logits = sinks.astype(mx.float32).reshape(num_kv_heads, -1, 1, 1)
        top = mx.maximum(top, logits)
    weights = mx.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + mx.exp(logits - top)
    return ((weights @ mx.where(visible[..., None].any(axis=3), v, 0)) / total).reshape(q.shape)


def _tokens(sinks: mx.array, blocks: mx.array, tail: mx.array) -> mx.array:
    """(H, n, D), (H, m, D), (B, H, t, D) → (B, H, 1, n + m + t, D) float32."""
    shared = mx.concatenate([sinks.astype(mx.float32), blocks], axis=1)
    shared = mx.broadcast_to(shared, (tail.shape[0], *shared.shape))
    return mx.concatenate([shared, tail.astype(mx.float32)], axis=2)[:, :, None]
