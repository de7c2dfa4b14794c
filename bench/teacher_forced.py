"""One window of text through a model, its KV held in one way or another: the logits of every scored token.

Knows how a KV format enters a run, and no metric. Chunk-major runs hold coded keys and values densely and
attend to those, so a codec needs no attention of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from cache_store import SnapshotStore
from kernels import Format, decode, encode
from worker.engine import snapshots
from worker.engine.attention import Handle
from worker.engine.kv_cache import BorrowedLayer, ExactLayer, KVCache, blocks_end, whole_blocks
from worker.engine.model import Model
from worker.engine.prefill import prefill_prefix
from worker.engine.report import Silent
from worker.engine.snapshots import Prefix
from worker.engine.window import WindowLayer

CHUNK_TOKENS = 256
MLX_LM_STEP = 2048
"""mlx_lm's prefill_step_size, as it is by default."""

Codec = Callable[[mx.array, mx.array], tuple[mx.array, mx.array]]
"""Keys and values (num_kv_heads, n, head_dim) as a format gives them back; same shapes and dtype."""


@dataclass(frozen=True)
class Window:
    """A piece of a text: a prefix, a suffix whose tokens are scored, and the token after it."""

    tokens: np.ndarray
    num_prefix: int

    @property
    def fed(self) -> np.ndarray:
        return self.tokens[:-1]

    @property
    def targets(self) -> np.ndarray:
        """(num_suffix,) what each scored position should predict."""
        return self.tokens[self.num_prefix + 1 :]

    @property
    def num_coded(self) -> int:
        """Tokens of the prefix that a job would hold as sinks and blocks; what follows them is its tail."""
        return blocks_end(whole_blocks(self.num_prefix))


class CodedLayer(ExactLayer):
    """Keys and values pass a codec as they arrive, so every query meets them coded, its own included."""

    codec: Codec | None = None

    def update_and_fetch(self, k: mx.array, v: mx.array) -> tuple[Handle, Handle]:
        if self.codec:
            k, v = (x[None] for x in self.codec(k[0], v[0]))
        return super().update_and_fetch(k, v)

    def recode(self, codec: Codec) -> None:
        """Pass all that is held through `codec`."""
        k, v = (x[0] for x in self.held())
        self.offset = 0
        self.seed(*codec(k, v))


def as_float16(k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
    return k.astype(mx.float16).astype(k.dtype), v.astype(mx.float16).astype(v.dtype)


def as_tiles(format: Format) -> Codec:
    """Of whole blocks of 128 tokens."""

    def codec(k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        return decode(encode(k, v, format), k.shape[-1], k.dtype, format)

    return codec


def as_mlx(bits: int = 4, group_size: int = 64) -> Codec:
    """What `mlx_lm`'s QuantizedKVCache keeps."""

    def coded(x: mx.array) -> mx.array:
        parts = mx.quantize(x, group_size=group_size, bits=bits)
        return mx.dequantize(*parts, group_size=group_size, bits=bits)

    return lambda k, v: (coded(k), coded(v))


def exact(model: Model, window: Window) -> np.ndarray:
    """The truth: keys and values as the model computes them. Logits (num_suffix, vocab) float32."""
    return _scores(model, window, _advance(model, _layers(model, len(window.fed)), window.fed))


def chunk_major(model: Model, window: Window, codec: Codec, first: int, last: int) -> np.ndarray:
    """Tokens `first` to `last` are coded as they arrive; those before are sinks, those behind exact."""
    layers = _layers(model, len(window.fed))
    hidden = []
    for start, end, how in ((0, first, as_float16), (first, last, codec), (last, len(window.fed), None)):
        _code(layers, how)
        hidden += _advance(model, layers, window.fed[start:end])
    return _scores(model, window, hidden)


def mlx_lm_generate(model: Model, window: Window, codec: Codec) -> np.ndarray:
    """As mlx_lm.generate with quantized_kv_start=0: its first step runs exactly and is coded afterwards."""
    num_first = min(window.num_prefix, MLX_LM_STEP)
    layers = _layers(model, len(window.fed))
    _advance(model, layers, window.fed[:num_first])
    for layer in layers:
        if isinstance(layer, CodedLayer):
            layer.recode(codec)
    _code(layers, codec)
    return _scores(model, window, _advance(model, layers, window.fed[num_first:]))


def layer_major(model: Model, window: Window, cache: KVCache) -> np.ndarray:
    """As a job runs: the prefix exactly and then into blocks, the rest against them. Mutates `cache`."""
    prefill_prefix(model, cache, window.tokens[: window.num_coded], 0, Silent())
    return suffix(model, window, cache)


def suffix(model: Model, window: Window, cache: KVCache) -> np.ndarray:
    """What follows the blocks that `cache` holds. Mutates it."""
    return _scores(model, window, _advance(model, cache.layers, window.fed[window.num_coded :]))


def through_disk(window: Window, cache: KVCache, fresh: KVCache, store: SnapshotStore) -> None:
    """Fill `fresh` with the blocks of `cache` as a restart would: from files."""
    prefix = Prefix("quality", window.tokens[: window.num_coded])
    snapshots.save(store, prefix, cache, 0, True, "quality")
    num_read, _ = snapshots.restore(store, prefix, prefix.num_blocks, fresh, 0, Silent())
    if num_read != prefix.num_blocks:
        raise RuntimeError(f"{num_read} of {prefix.num_blocks} blocks came back: is the disk full?")


def _layers(model: Model, num_tokens: int) -> list[Any]:
    """Caches that hold everything, or their window, as it comes: one for each layer of the model."""
    layers: list[Any] = []
    for shape in model.shapes:
        if shape.source is not None:
            layers.append(BorrowedLayer(layers[shape.source]))
        elif shape.window:
            layers.append(WindowLayer(shape, model.dtype))
        else:
            layers.append(CodedLayer(num_tokens, shape, model.dtype))
    return layers


def _code(layers: list[Any], codec: Codec | None) -> None:
    """Pass what arrives from here on through `codec`; windows stay exact in every format."""
    for layer in layers:
        if isinstance(layer, CodedLayer):
            layer.codec = codec


def _advance(model: Model, layers: list[Any], tokens: np.ndarray) -> list[mx.array]:
    """Feed tokens to a model whose layers keep their KV in `layers`: hidden states (1, n, width) by chunk."""
    ids = mx.array(tokens)[None]
    hidden = []
    for start in range(0, len(tokens), CHUNK_TOKENS):
        some = ids[:, start : start + CHUNK_TOKENS]
        h = model.embed(some)
        for layer, layer_cache in zip(model.layers, layers, strict=True):
            h = layer(h, some, layer_cache)
            mx.eval(h)
        hidden.append(h)
    return hidden


def _scores(model: Model, window: Window, hidden: list[mx.array]) -> np.ndarray:
    """`Model.logits` gives those of a row's last position: each scored position becomes a row."""
    rows = mx.concatenate(hidden, axis=1)[0, -len(window.targets) :, None]
    return np.array(model.logits(rows))
