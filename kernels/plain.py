"""The codec and decode attention in MLX's own operations, for any device: what the others fall back to."""

from __future__ import annotations

import mlx.core as mx

from kernels import reference, unfused
from kernels.cache_view import CacheView
from kernels.codec import decode, encode
from kernels.formats import FORMATS

__all__ = ["FORMATS", "decode", "decode_attention", "encode"]


def decode_attention(q: mx.array, view: CacheView, scale: float, sinks: mx.array | None = None) -> mx.array:
    """As `kernels.decode_attention`, whose checks have passed."""
    attend = unfused.decode_attention if unfused.supports(q.shape[-1]) else reference.decode_attention
    return attend(q, view, scale, sinks)
