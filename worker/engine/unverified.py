"""Whether a model that nobody has verified computes here what it computes in mlx_lm.

The engine walks a model's layers by itself, and mlx_lm's models differ in what they do beside: scale the
embeddings, cap or divide the logits, attend in another way. What a verified architecture shows in tests, one
that is not shows with its own weights while it is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache as PlainCache
from mlx_lm.models.cache import make_prompt_cache

from worker.engine.errors import EngineError
from worker.engine.kv_cache import KVCache
from worker.engine.shapes import LayerShape
from worker.engine.walk import walk
from worker.engine.weights import weights_bytes

log = logging.getLogger("worker.engine")

MAX_DIVERGENCE = 0.01
"""KL divergence of the next token from mlx_lm's, in nats. Eleven architectures with random weights that are a
plain walk are below 2e-6, or 3e-5 in float16; two that scale embeddings or logits have 0.9 and more."""
MAX_WEIGHTS = 1.15
"""By what the planner expects: it would let a request begin that doesn't fit."""
_NUM_TOKENS, _NUM_DECODED = 200, 8
_NUM_LAYERS = 4
"""At a time, in float32: of many layers in 16 bits the rounding alone may grow to what a difference makes."""


def require_same_model(
    model_id: str, module: nn.Module, config: dict[str, Any], shapes: Sequence[LayerShape]
) -> None:
    """Run tokens through mlx_lm's model and through the engine's walk, a chunk and then one by one.

    A few layers at a time are the whole model meanwhile; afterwards it is as it was.

    Args:
        config: a text config that `architectures.refusal` accepts.
        shapes: of that config.

    Raises:
        EngineError: `unsupported_architecture` where they differ, where the walk ends in an error, where
            mlx_lm's cache has windows or states, or where weights take more than memory is predicted with.
    """
    kinds = {type(cache) for cache in make_prompt_cache(module)} - {PlainCache}
    if kinds:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise _refused(model_id, config, f"mlx_lm keeps more for it than all keys and values ({names})")
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    expected = weights_bytes(config, on_cpu)
    num_bytes = sum(array.nbytes for _, array in tree_flatten(module.parameters()))
    if num_bytes > MAX_WEIGHTS * expected:
        reason = f"its weights take {num_bytes:,} bytes where memory is planned for {expected:,}"
        raise _refused(model_id, config, reason)
    tokens = mx.random.randint(0, config["vocab_size"], (1, _NUM_TOKENS), key=mx.random.key(0))
    try:
        found = [
            _divergence(_by_mlx_lm(module, tokens), _by_us(module, config, some, tokens))
            for some in _some_at_a_time(module, shapes)
        ]
    except Exception as error:  # whatever an unknown module does with what it doesn't expect
        reason = f"{type(error).__name__}: {error}"
        raise _refused(model_id, config, f"its layers can't be walked one by one ({reason})") from error
    for nats in found:
        if not nats < MAX_DIVERGENCE:
            reason = f"it computes something else than in mlx_lm ({nats:.2g} nats; limit {MAX_DIVERGENCE})"
            raise _refused(model_id, config, reason)
    log.warning(
        "the architecture %r is not verified; %d layers at a time are %.1g nats from mlx_lm's own",
        config["model_type"],
        _NUM_LAYERS,
        max(found),
    )


def _some_at_a_time(module: nn.Module, shapes: Sequence[LayerShape]) -> Iterator[Sequence[LayerShape]]:
    """Leave some of the layers in the model, in float32; their shapes. It is whole again at the end."""
    body, layers = module.model, module.model.layers
    try:
        for start in range(0, len(layers), _NUM_LAYERS):
            body.layers = layers[start : start + _NUM_LAYERS]
            kept = module.parameters()
            module.set_dtype(mx.float32)
            try:
                yield shapes[start : start + _NUM_LAYERS]
            finally:
                module.update(kept)
    finally:
        body.layers = layers


def _divergence(exact: mx.array, other: mx.array) -> float:
    """KL divergence of (1, vocab) logits, in nats."""
    log_p, log_q = (x - mx.logsumexp(x, axis=-1, keepdims=True) for x in (exact, other.astype(mx.float32)))
    return abs(float((mx.exp(log_p) * (log_p - log_q)).sum()))


def _pieces(tokens: mx.array) -> Iterator[mx.array]:
    """A chunk, and then token by token."""
    ends = range(_NUM_TOKENS - _NUM_DECODED, _NUM_TOKENS + 1)
    return (tokens[:, start:end] for start, end in pairwise([0, *ends]))


def _by_mlx_lm(module: nn.Module, tokens: mx.array) -> mx.array:
    """The logits after the last token."""
    cache = make_prompt_cache(module)
    for piece in _pieces(tokens):
        logits: mx.array = module(piece, cache=cache)[:, -1]
        mx.eval(logits)
    return logits.astype(mx.float32)


def _by_us(
    module: nn.Module, config: dict[str, Any], shapes: Sequence[LayerShape], tokens: mx.array
) -> mx.array:
    """The same."""
    parts = walk(module, config["model_type"])
    cache = KVCache(shapes, parts.dtype)
    for piece in _pieces(tokens):
        hidden = parts.embed(piece)
        for layer, layer_cache in zip(parts.layers, cache.layers, strict=True):
            hidden = layer(hidden, piece, layer_cache)
        mx.eval(hidden)
    return parts.head(parts.norm(hidden[:, -1:]))[:, -1]


def _refused(model_id: str, config: dict[str, Any], reason: str) -> EngineError:
    architecture = config["model_type"]
    return EngineError(
        "unsupported_architecture",
        f"Model {model_id} has the architecture {architecture!r}, which is not verified, and {reason}; "
        "choose another model.",
        architecture=architecture,
    )
