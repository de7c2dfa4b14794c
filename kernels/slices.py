"""Attention of many queries over dense keys and values, by MLX's operations, in memory that has a limit.

Where MLX has no fused kernel it lays out the scores of all queries and heads: of a chunk of 2,048 over
131,072 keys, 32 heads in 16 bits, 17 GB. So there scores are laid out for one KV head and a slice of the
queries at a time, over the keys that these see. Keys and values are read where they are; MLX's own way
copies both at every call, the keys turned.
"""

from __future__ import annotations

import mlx.core as mx

SCORES_BYTES = 1 << 29
"""The most that one slice's scores take, however few queries it then has. Fewer queries read keys more often:
at 131,072 tokens and 8 query heads to a KV head these are 256."""
FUSED_HEAD_DIMS = (64, 80, 96, 128)
"""Head sizes for which MLX has a fused kernel of many queries, in 16 bits, on Metal as on CUDA. Metal has one
for 256 too, and lays out the scores all the same."""


def causal_attention(
    q: mx.array, k: mx.array, v: mx.array, scale: float, sinks: mx.array | None = None
) -> mx.array:
    """As `kernels.prefill_attention`; evaluates slice by slice where there is more than one."""
    num_kv_heads, num_keys = k.shape[1:3]
    whole_bytes = q.shape[1] * q.shape[2] * num_keys * q.itemsize
    if has_fused_prefill(q.shape[-1], q.dtype) or whole_bytes <= SCORES_BYTES:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask="causal", sinks=sinks)
    q = q[0] * scale
    group = q.shape[0] // num_kv_heads
    step = max(1, SCORES_BYTES // (group * num_keys * q.itemsize))
    heads = []
    for head in range(num_kv_heads):
        rows = slice(head * group, (head + 1) * group)
        logits = None if sinks is None else sinks[rows]
        parts = []
        for start in range(0, q.shape[1], step):
            part = q[rows, start : start + step]
            seen = num_keys - q.shape[1] + start + part.shape[1]
            parts.append(_attend(part, k[0, head, :seen], v[0, head, :seen], logits))
            # Else all slices' scores are there before the first one's may go; a GPU lets go a moment later.
            mx.eval(parts[-1])
            mx.synchronize()
        heads.append(mx.concatenate(parts, axis=1))
    return mx.concatenate(heads)[None]


def has_fused_prefill(head_dim: int, dtype: mx.Dtype) -> bool:
    """Whether MLX attends with many queries of this kind without laying out scores."""
    on_gpu = mx.default_device().type == mx.gpu
    return on_gpu and head_dim in FUSED_HEAD_DIMS and dtype != mx.float32


def _attend(q: mx.array, k: mx.array, v: mx.array, sinks: mx.array | None) -> mx.array:
    """(num_heads, Sq, head_dim) scaled queries, the newest of the (T, head_dim) keys' and values' tokens."""
    num_heads, num_queries, dim = q.shape
    first = k.shape[0] - num_queries
    rows = q.reshape(-1, dim)
    scores = rows @ k.T
    # Only the slice's own keys can lie ahead of a query. Their scores are computed once more, since one that
    # is read from an array keeps it from being written in place.
    ahead = mx.arange(num_queries) > mx.arange(num_queries)[:, None]
    own = (rows @ k[first:].T).reshape(num_heads, num_queries, num_queries)
    scores[:, first:] = mx.where(ahead, mx.finfo(q.dtype).min, own).reshape(-1, num_queries)
    out = mx.softmax(scores, axis=-1, precise=True) @ v
    if sinks is not None:
        total = mx.logsumexp(scores.astype(mx.float32), axis=-1).reshape(num_heads, num_queries)
        share = mx.sigmoid(total - sinks.astype(mx.float32)[:, None])
        out = out * share.astype(out.dtype).reshape(-1, 1)
    return out.reshape(q.shape)
