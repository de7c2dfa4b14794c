"""MLX's own attention of many queries over dense keys and values, in memory that does not grow with them.

Where MLX has no fused kernel it lays out the scores of all queries: of a chunk of 2,048 over 131,072 keys, 32
heads in 16 bits, 17 GB. So there queries are taken a slice at a time, each over the keys that it sees.
"""

from __future__ import annotations

import mlx.core as mx

SCORES_BYTES = 1 << 29
"""The most that one slice's scores take, however few queries it then has. Fewer queries read keys more often:
at 131,072 tokens and 32 heads these are 64."""
FUSED_HEAD_DIMS = (64, 80, 128)
"""Head sizes for which MLX has a fused kernel of many queries, in 16 bits, on Metal as on CUDA. Metal has one
for 256 too, and lays out the scores all the same."""


def causal_attention(
    q: mx.array, k: mx.array, v: mx.array, scale: float, sinks: mx.array | None = None
) -> mx.array:
    """As `kernels.prefill_attention`; evaluates slice by slice where there is more than one."""
    num_heads, num_queries = q.shape[1:3]
    num_older = k.shape[2] - num_queries
    step = num_queries
    if not _fused(q):
        step = max(1, SCORES_BYTES // (q.shape[0] * num_heads * k.shape[2] * q.itemsize))
    parts = []
    for start in range(0, num_queries, step):
        seen = num_older + min(start + step, num_queries)
        part = q[:, :, start : start + step], k[:, :, :seen], v[:, :, :seen]
        parts.append(mx.fast.scaled_dot_product_attention(*part, scale=scale, mask="causal", sinks=sinks))
        if step < num_queries:
            mx.eval(parts[-1])  # else all slices' scores are there before the first one's may go
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


def _fused(q: mx.array) -> bool:
    on_gpu = mx.default_device().type == mx.gpu
    return on_gpu and q.shape[-1] in FUSED_HEAD_DIMS and q.dtype != mx.float32
