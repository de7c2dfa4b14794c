"""Whether a model that nobody has verified computes here what it computes in mlx_lm.

The engine walks a model's layers by itself, and mlx_lm's models differ in what they do beside: scale the
embeddings, cap or divide the logits, attend in another way. What a verified architecture shows in tests, one
that is not shows with its own weights while it is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from worker.engine.errors import EngineError
from worker.engine.kv_cache import KVCache
from worker.engine.shapes import LayerShape
from worker.engine.walk import walk
from worker.engine.weights import weights_bytes

log = logging.getLogger("worker.engine")

MAX_DIVERGENCE = 0.05
"""KL divergence of the next token, in nats. Of eleven architectures with random float32 weights that are a
plain walk all were below 2e-6, of two that scale embeddings or logits 2.4 and 2.7; 16 bits round by more."""
MAX_WEIGHTS = 1.15
"""By what the planner expects: it would let a request begin that doesn't fit."""
_NUM_TOKENS, _NUM_DECODED = 200, 8


def require_same_model(
    model_id: str, module: nn.Module, config: dict[str, Any], shapes: Sequence[LayerShape]
) -> None:
    """Run tokens through mlx_lm's model and through the engine's walk, a chunk and then one by one.

    Args:
        config: a text config that `architectures.refusal` accepts.
        shapes: of that config.

    Raises:
        EngineError: `unsupported_architecture` where they differ, where the walk ends in an error, where
            mlx_lm's cache has windows or states, or where weights take more than memory is predicted with.
    """
    from mlx_lm.models.cache import KVCache as PlainCache
    from mlx_lm.models.cache import make_prompt_cache

    kinds = {type(cache) for cache in make_prompt_cache(module)} - {PlainCache}
    if kinds:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise _refused(model_id, config, f"mlx_lm keeps more for it than all keys and values ({names})")
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    expected = weights_bytes(config, on_cpu)
    found = sum(array.nbytes for _, array in tree_flatten(module.parameters()))
    if found > MAX_WEIGHTS * expected:
        reason = f"its weights take {found:,} bytes where memory is planned for {expected:,}"
        raise _refused(model_id, config, reason)
    tokens = mx.random.randint(0, config["vocab_size"], (1, _NUM_TOKENS), key=mx.random.key(0))
    try:
        theirs = module(tokens)[:, -1].astype(mx.float32)
        ours = _walked(module, config, shapes, tokens)
    except Exception as error:  # whatever an unknown module does with what it doesn't expect
        reason = f"{type(error).__name__}: {error}"
        raise _refused(model_id, config, f"its layers can't be walked one by one ({reason})") from error
    log_p, log_q = (x - mx.logsumexp(x, axis=-1, keepdims=True) for x in (theirs, ours))
    divergence = float((mx.exp(log_p) * (log_p - log_q)).sum())
    if not divergence < MAX_DIVERGENCE:
        reason = (
            f"it computes something else than in mlx_lm ({divergence:.2g} nats, {MAX_DIVERGENCE} allowed)"
        )
        raise _refused(model_id, config, reason)
    log.warning(
        "the architecture %r is not verified; after %d tokens this model is %.1g nats from mlx_lm's own",
        config["model_type"],
        _NUM_TOKENS,
        abs(divergence),
    )


def _walked(
    module: nn.Module, config: dict[str, Any], shapes: Sequence[LayerShape], tokens: mx.array
) -> mx.array:
    """The logits after the last token."""
    parts = walk(module, config["model_type"])
    cache = KVCache(shapes, parts.dtype)
    ends = [*range(_NUM_TOKENS - _NUM_DECODED, _NUM_TOKENS + 1)]
    for start, end in pairwise([0, *ends]):
        hidden = parts.embed(tokens[:, start:end])
        for layer, layer_cache in zip(parts.layers, cache.layers, strict=True):
            hidden = layer(hidden, tokens[:, start:end], layer_cache)
        mx.eval(hidden)
    return parts.head(parts.norm(hidden[:, -1:]))[:, -1].astype(mx.float32)


def _refused(model_id: str, config: dict[str, Any], reason: str) -> EngineError:
    architecture = config["model_type"]
    return EngineError(
        "unsupported_architecture",
        f"Model {model_id} has the architecture {architecture!r}, which is not verified, and {reason}; "
        "choose another model.",
        architecture=architecture,
    )
