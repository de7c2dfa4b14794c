"""The two stages of prefill.

Stage one runs the reusable prefix layer by layer: all chunks pass through one layer with exact keys and
values, which are then encoded into blocks; a layer with a window holds no more than that. Stage two runs what
follows against the decoded blocks, whether they were just made or restored, so a cold and a restored run are
the same computation.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import mlx.core as mx
import numpy as np

from kernels import encode
from worker.dense import dense_for_now
from worker.engine.checkpoints import Checkpoint
from worker.engine.kv_cache import (
    SINK_TOKENS,
    BorrowedLayer,
    CompressedLayer,
    ExactLayer,
    KVCache,
    blocks_end,
    with_room,
)
from worker.engine.model import Model
from worker.engine.report import Report
from worker.engine.window import WindowLayer

CHUNK_TOKENS = 2048
"""Tokens in one prefill step: the grain of progress and cancel."""
CPU_CHUNK_TOKENS = 256
"""On a CPU larger chunks gain under 5 % (bench/prefill_attention.py) and leave a cancelled job waiting
longer. Where MLX's attention stands in for ours they lose: it lays out scores, masked ones too."""

DENSE_TOKENS = 512
"""On CUDA, tokens from which a layer's weights are made dense for the pass."""


def prefill_prefix(
    model: Model,
    cache: KVCache,
    tokens: np.ndarray,
    num_spare: int,
    report: Report,
    checkpoint: Checkpoint | None = None,
) -> None:
    """Stage one: extend `cache` from the blocks that it holds to all of `tokens`, exactly.

    Args:
        cache: holds the first blocks of the prefix, or nothing; no tail. Mutated.
        tokens: the whole prefix, (64 + 128 * num_blocks,).
        num_spare: blocks to reserve behind the prefix for what follows.
        report: asked to stop, and told of progress, after each chunk of each layer.
        checkpoint: of this prefix from this start; gone on from and written where given, not removed.
    """
    start, end = blocks_end(cache.num_blocks), len(tokens)
    ids = mx.array(tokens[start:])[None]
    bounds = _chunks(end - start)
    hidden = [model.embed(ids[:, a:b]) for a, b in bounds]
    num_layers = num_prefix_layers(cache)
    first_layer = 0
    if checkpoint:
        first_layer, hidden = checkpoint.resume(cache, num_layers, hidden, num_spare)
    if first_layer:
        report.progress("restore", start + (end - start) * first_layer // num_layers, end, start)
    for index in range(first_layer, num_layers):
        layer, kept = model.layers[index], cache.layers[index]
        assert not isinstance(kept, BorrowedLayer), f"layer {index} borrows before one that does not"
        exact: ExactLayer | WindowLayer = kept if isinstance(kept, WindowLayer) else _exact(kept, start, end)
        with _fast_weights(model, index, end - start):
            for i, (a, b) in enumerate(bounds):
                report.check()
                hidden[i] = layer(hidden[i], ids[:, a:b], exact)
                finish(hidden[i], exact.arrays())
                # Every layer counts as its share of the tokens, so the bar moves evenly.
                num_done = ((end - start) * index + b) // num_layers
                report.progress("prefill", start + num_done, end, start)
        if isinstance(exact, WindowLayer):
            exact.end_prefix()
        elif isinstance(kept, CompressedLayer):
            _compress(exact, kept, start, num_spare)
        finish(kept.arrays())
        if checkpoint:
            checkpoint.layer_done(cache, index, num_layers, hidden)
    mx.clear_cache()


def num_prefix_layers(cache: KVCache) -> int:
    """How many layers stage one passes through.

    What the last ones compute is asked for by nobody if they keep nothing of their own.
    """
    return max(i for i, kept in enumerate(cache.layers) if not isinstance(kept, BorrowedLayer)) + 1


def prefill_suffix(
    model: Model, cache: KVCache, tokens: np.ndarray, cached_tokens: int, report: Report
) -> mx.array:
    """Stage two: run what follows the prefix; return the logits (1, vocab) after the last token.

    Args:
        cached_tokens: how much of the prefix was not computed for this request; for the report only.
    """
    start = cache.num_tokens
    ids = mx.array(tokens)[None]
    for a, b in _chunks(len(tokens)):
        report.check()
        h = model.embed(ids[:, a:b])
        for layer, layer_cache in zip(model.layers, cache.layers, strict=True):
            h = layer(h, ids[:, a:b], layer_cache)
            # One by one: a GPU would hold every layer's decoded keys and values until all are done.
            finish(h)
        mx.eval(cache.arrays())
        report.progress("prefill", start + b, start + len(tokens), cached_tokens)
    return model.logits(h)


def finish(*arrays: mx.array | list[mx.array]) -> None:
    """Evaluate, and wait until MLX has let go of what that took.

    On a GPU a thread of its own does so, a moment after the arrays are there. What comes in between finds the
    layer's buffers in use and copies them, or takes its memory beside that of the layer before.
    """
    mx.eval(*arrays)
    mx.synchronize()


def _fast_weights(model: Model, index: int, num_tokens: int) -> AbstractContextManager[None]:
    """A layer's weights in the form in which this device multiplies many tokens fastest."""
    if mx.cuda.is_available() and num_tokens >= DENSE_TOKENS:
        return dense_for_now(model.modules[index], model.dtype)
    return nullcontext()


def _chunks(num_tokens: int) -> list[tuple[int, int]]:
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    step = CPU_CHUNK_TOKENS if on_cpu else CHUNK_TOKENS
    return [(a, min(a + step, num_tokens)) for a in range(0, num_tokens, step)]


def _exact(compressed: CompressedLayer, start: int, end: int) -> ExactLayer:
    """A layer with room for `end` exact tokens, and what is known of the first `start`."""
    exact = ExactLayer(end, compressed.shape, compressed.dtype)
    if start:
        exact.seed(*compressed.decoded())
    return exact


def _compress(exact: ExactLayer, compressed: CompressedLayer, start: int, num_spare: int) -> None:
    """Encode what the exact layer holds beyond `start` and hand it to the compressed one."""
    k, v = (x[0] for x in exact.held())  # (H, T, D)
    first = max(start, SINK_TOKENS)
    tiles = encode(k[:, first:], v[:, first:], compressed.shape.format)
    sinks = k[:, :SINK_TOKENS], v[:, :SINK_TOKENS]
    if start:
        tiles = mx.concatenate([compressed.tiles[: compressed.num_blocks], tiles])
        sinks = compressed.sinks_k, compressed.sinks_v
    compressed.set_prefix(*sinks, with_room(tiles, num_spare), tiles.shape[0])
