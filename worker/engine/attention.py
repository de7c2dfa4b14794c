"""The place where a model's attention reaches our KV cache.

`mlx_lm` has no hook, but every architecture calls one module-level function with what
`cache.update_and_fetch` returned. Our cache returns a `Handle` instead of keys, and `install` puts a
dispatcher that knows it in that function's place. It must run before an architecture is imported,
since those bind the name at import.
"""

from __future__ import annotations

import sys
from typing import Protocol

import mlx.core as mx
from mlx_lm.models import base

_dense_attention = base.scaled_dot_product_attention


class Owner(Protocol):
    def attend(self, q: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        """Attention of the queries over all that the cache holds, their own tokens last."""


class Handle:
    """Stands for the keys (or values) of a layer that attends by itself."""

    def __init__(self, owner: Owner, like: mx.array) -> None:
        self.owner = owner
        self.dtype = like.dtype
        self.shape = like.shape


def install() -> None:
    """Route attention over handles to their owner.

    Raises:
        RuntimeError: if an architecture was imported before, since it would keep the old function.
    """
    if base.scaled_dot_product_attention is _attend:
        return
    early = [
        name
        for name, module in sys.modules.items()
        if name.startswith("mlx_lm.models.")
        and getattr(module, "scaled_dot_product_attention", None) is _dense_attention
        and module is not base
    ]
    if early:
        raise RuntimeError(f"the attention hook must be installed before {', '.join(early)} is imported")
    base.scaled_dot_product_attention = _attend


def _attend(queries, keys, values, cache, scale, mask, sinks=None):  # type: ignore[no-untyped-def]
    if isinstance(keys, Handle):
        # Causality follows from the cache's own order, so the mask says nothing new.
        return keys.owner.attend(queries, scale, sinks)
    return _dense_attention(queries, keys, values, cache, scale=scale, mask=mask, sinks=sinks)
