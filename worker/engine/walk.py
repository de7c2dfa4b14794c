"""How a token passes through the modules of each architecture: embed, layers, norm, head.

mlx_lm's models do this in one call with a cache; the prefill walks layer by layer. What an architecture does
beside the plain walk stands here and nowhere else.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.engine.kv_cache import BorrowedLayer

Layer = Callable[[mx.array, mx.array, Any], mx.array]
"""(hidden states (B, n, width), token ids (B, n), the layer's cache) → hidden states."""


@dataclass(frozen=True)
class Walk:
    embed: Callable[[mx.array], mx.array]
    """(B, n) token ids → (B, n, width)."""
    layers: list[Layer]
    modules: list[nn.Module]
    """Where each layer's weights are."""
    norm: Callable[[mx.array], mx.array]
    head: Callable[[mx.array], mx.array]
    """(B, n, width) → (B, n, vocab)."""
    dtype: mx.Dtype
    """Of the hidden states."""


def walk(module: Any, architecture: str) -> Walk:
    """The parts of a module that mlx_lm loaded.

    Args:
        architecture: config.json's `model_type`.
    """
    if architecture in ("gemma3", "gemma4"):
        module = module.language_model
    body = module.model
    # Masks stay None: a cache of ours knows what its queries see.
    layers: list[Layer] = [partial(_plain_layer, layer) for layer in body.layers]
    embed = body.embed_tokens
    head = module.lm_head if "lm_head" in module else body.embed_tokens.as_linear
    if architecture in ("gemma3", "gemma3_text"):
        embed = partial(_gemma3_embed, body)
    if architecture in ("gemma4", "gemma4_text"):
        embed = partial(_gemma4_embed, body)
        layers = [
            partial(_gemma4_layer, body, i, _gemma4_projection(body, i)) for i in range(len(body.layers))
        ]
        head = partial(_gemma4_head, module, head)
    return Walk(embed, layers, list(body.layers), body.norm, head, body.norm.weight.dtype)


def _plain_layer(layer: Any, h: mx.array, tokens: mx.array, cache: Any) -> mx.array:
    out: mx.array = layer(h, None, cache)
    return out


def _gemma3_embed(body: Any, tokens: mx.array) -> mx.array:
    h: mx.array = body.embed_tokens(tokens)
    return h * mx.array(body.args.hidden_size**0.5, mx.bfloat16).astype(h.dtype)


def _gemma4_embed(body: Any, tokens: mx.array) -> mx.array:
    h: mx.array = body.embed_tokens(tokens) * body.embed_scale
    return h


def _gemma4_layer(
    body: Any, index: int, projection: Any, h: mx.array, tokens: mx.array, cache: Any
) -> mx.array:
    layer, shared, offset = body.layers[index], None, None
    if isinstance(cache, BorrowedLayer):
        shared, offset = cache.handles(h), mx.array(cache.offset(h.shape[1]))
        cache = None
    extra = _gemma4_layer_input(body, index, projection, tokens) if projection is not None else None
    out: mx.array = layer(h, None, cache, per_layer_input=extra, shared_kv=shared, offset=offset)[0]
    return out


def _gemma4_layer_input(body: Any, index: int, projection: Any, tokens: mx.array) -> mx.array:
    """What one layer is told of its tokens beside the hidden states, (B, n, hidden_size_per_layer_input).

    Made for one layer at a time: for all of them it would be several times as large as the hidden states.
    """
    known = body.embed_tokens_per_layer(tokens)[..., _gemma4_part(body, index)]
    known = known * body.embed_tokens_per_layer_scale
    seen = projection(_gemma4_embed(body, tokens))
    seen = body.per_layer_projection_norm(seen * body.per_layer_projection_scale)
    out: mx.array = (seen + known) * body.per_layer_input_scale
    return out


def _gemma4_part(body: Any, index: int) -> slice:
    """Where one layer's input stands among those of all layers."""
    return slice(index * body.hidden_size_per_layer_input, (index + 1) * body.hidden_size_per_layer_input)


def _gemma4_projection(body: Any, index: int) -> Any:
    """The rows of the projection for all layers that make one layer's input; None if there is none."""
    if not body.hidden_size_per_layer_input:
        return None
    part = copy.copy(body.per_layer_model_projection)
    for name in ("weight", "scales", "biases"):
        if name in part:
            part[name] = part[name][_gemma4_part(body, index)]
    return part


def _gemma4_head(module: Any, head: Callable[[mx.array], mx.array], h: mx.array) -> mx.array:
    cap, logits = module.final_logit_softcapping, head(h)
    return logits if cap is None else mx.tanh(logits / cap) * cap
