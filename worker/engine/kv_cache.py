"""The KV of one sequence: exact while its prefix is prefilled, compressed from then on.

A compressed layer holds, in token order, up to 64 sinks (dense, rounded to float16 as they are stored),
whole blocks (int4c tiles in one array whose capacity is reserved ahead), and a dense tail of fewer than
128 tokens. It knows no model and no file.
"""

from __future__ import annotations

import mlx.core as mx

from kernels import (
    BLOCK_TOKENS,
    MAX_QUERIES,
    CacheView,
    TileLayout,
    decode,
    decode_attention,
    encode,
    prefill_attention,
)
from worker.engine.attention import Handle

SINK_TOKENS = 64
"""The first tokens, which every later one attends to strongly: kept dense, outside all statistics."""


def whole_blocks(num_tokens: int) -> int:
    """How many blocks fit behind the sinks in the first `num_tokens` tokens."""
    return max(0, (num_tokens - SINK_TOKENS) // BLOCK_TOKENS)


def blocks_end(num_blocks: int) -> int:
    """The token after the last of `num_blocks` blocks; 0 if there is none."""
    return SINK_TOKENS + num_blocks * BLOCK_TOKENS if num_blocks else 0


def with_room(tiles: mx.array, num_spare: int) -> mx.array:
    """The tiles with `num_spare` unused blocks behind them; a copy."""
    return mx.concatenate([tiles, mx.zeros((num_spare, *tiles.shape[1:]), mx.uint32)])


def attend_dense(
    q: mx.array, k: mx.array, v: mx.array, scale: float, sinks: mx.array | None = None
) -> mx.array:
    """Causal attention over dense keys and values, the queries' own tokens last."""
    if sinks is None:
        return prefill_attention(q, k, v, scale)
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask="causal", sinks=sinks)


class ExactLayer:
    """One layer's exact keys and values while the prefix passes through it.

    Mutated by `update_and_fetch`. The buffers are reserved once, since growing would copy them.
    """

    def __init__(self, num_tokens: int, num_kv_heads: int, head_dim: int, dtype: mx.Dtype) -> None:
        shape = (1, num_kv_heads, num_tokens, head_dim)
        self.keys = mx.zeros(shape, dtype)
        self.values = mx.zeros(shape, dtype)
        self.offset = 0

    def seed(self, k: mx.array, v: mx.array) -> None:
        """Begin with (num_kv_heads, n, head_dim) keys and values that are known already."""
        self.update_and_fetch(k[None], v[None])

    def update_and_fetch(self, k: mx.array, v: mx.array) -> tuple[Handle, Handle]:
        start, self.offset = self.offset, self.offset + k.shape[2]
        self.keys[:, :, start : self.offset] = k
        self.values[:, :, start : self.offset] = v
        handle = Handle(self, k)
        return handle, handle

    def attend(self, q: mx.array, scale: float, sinks: mx.array | None = None) -> mx.array:
        """Attend to everything so far."""
        # The slices must not outlive this call: while one does, the next update copies the buffer.
        k, v = self.keys[:, :, : self.offset], self.values[:, :, : self.offset]
        return attend_dense(q, k, v, scale, sinks)


class CompressedLayer:
    """One layer's sinks, blocks and tail. Mutated by `update_and_fetch`, `attend` and `rewind`."""

    def __init__(self, num_kv_heads: int, head_dim: int, dtype: mx.Dtype) -> None:
        self._heads, self._dim, self._dtype = num_kv_heads, head_dim, dtype
        self.tiles = mx.zeros((0, num_kv_heads, TileLayout(head_dim).tile_words), mx.uint32)
        self.num_blocks = 0
        self.sinks_k, self.sinks_v = self._dense(0), self._dense(0)
        self._tail_k, self._tail_v = (self._dense(BLOCK_TOKENS + MAX_QUERIES)[None] for _ in range(2))
        self._num_tail = 0

    @property
    def offset(self) -> int:
        return int(self.sinks_k.shape[1]) + self.num_blocks * BLOCK_TOKENS + self._num_tail

    def set_prefix(self, sinks_k: mx.array, sinks_v: mx.array, tiles: mx.array, num_blocks: int) -> None:
        """Hold exactly a prefix: sinks (num_kv_heads, 64, head_dim) and the first `num_blocks` of `tiles`.

        The tiles behind those are room for what follows. The array is taken over, not copied.
        """
        self.sinks_k, self.sinks_v = self._as_stored(sinks_k), self._as_stored(sinks_v)
        self.tiles, self.num_blocks, self._num_tail = tiles, num_blocks, 0

    def rewind(self, num_blocks: int) -> None:
        """Forget all that comes after the first `num_blocks` blocks."""
        if not num_blocks:
            self.sinks_k, self.sinks_v = self._dense(0), self._dense(0)
        self.num_blocks, self._num_tail = num_blocks, 0

    def decoded(self) -> tuple[mx.array, mx.array]:
        """Sinks and blocks as dense (num_kv_heads, n, head_dim) keys and values."""
        k, v = decode(self.tiles[: self.num_blocks], self._dim, self._dtype)
        return mx.concatenate([self.sinks_k, k], axis=1), mx.concatenate([self.sinks_v, v], axis=1)

    def update_and_fetch(self, k: mx.array, v: mx.array) -> tuple[Handle, Handle]:
        self._new = k, v
        handle = Handle(self, k)
        return handle, handle

    def attend(self, q: mx.array, scale: float, sinks: mx.array | None = None) -> mx.array:
        """Append the keys and values of the last `update_and_fetch`, and attend to everything."""
        k, v = self._new
        num_new = k.shape[2]
        if num_new <= MAX_QUERIES:
            self._append_to_tail(k, v)
            lengths = mx.array([self._num_tail], mx.int32)
            view = CacheView(
                self.sinks_k, self.sinks_v, self.tiles, self.num_blocks, self._tail_k, self._tail_v, lengths
            )
            out = decode_attention(q, view, scale, sinks)
            if self._num_tail >= BLOCK_TOKENS or (self._num_tail >= SINK_TOKENS and not self._has_sinks):
                self._set_tail(*self._settle(*self._tail()))
            return out
        old_k, old_v = self.decoded()
        tail_k, tail_v = (mx.concatenate([t, n], axis=2) for t, n in zip(self._tail(), (k, v), strict=True))
        out = attend_dense(
            q,
            mx.concatenate([old_k[None], tail_k], axis=2),
            mx.concatenate([old_v[None], tail_v], axis=2),
            scale,
            sinks,
        )
        self._set_tail(*self._settle(tail_k, tail_v))
        return out

    def arrays(self) -> list[mx.array]:
        """Everything that a step may have left unevaluated."""
        return [self.tiles, self.sinks_k, self.sinks_v, self._tail_k, self._tail_v]

    @property
    def _has_sinks(self) -> bool:
        return bool(self.sinks_k.shape[1])

    def _dense(self, num_tokens: int) -> mx.array:
        return mx.zeros((self._heads, num_tokens, self._dim), self._dtype)

    def _as_stored(self, x: mx.array) -> mx.array:
        """Rounded to float16, as the snapshot keeps it: a restored sink equals the one first made."""
        return x.astype(mx.float16).astype(self._dtype)

    def _tail(self) -> tuple[mx.array, mx.array]:
        return self._tail_k[:, :, : self._num_tail], self._tail_v[:, :, : self._num_tail]

    def _append_to_tail(self, k: mx.array, v: mx.array) -> None:
        start, self._num_tail = self._num_tail, self._num_tail + k.shape[2]
        self._tail_k[:, :, start : self._num_tail] = k
        self._tail_v[:, :, start : self._num_tail] = v

    def _set_tail(self, k: mx.array, v: mx.array) -> None:
        self._num_tail = 0
        self._append_to_tail(k, v)

    def _settle(self, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        """Move what fills sinks and whole blocks out of (1, H, n, D) tail tokens; return the rest."""
        if not self._has_sinks and k.shape[2] >= SINK_TOKENS:
            self.sinks_k, self.sinks_v = (self._as_stored(x[0, :, :SINK_TOKENS]) for x in (k, v))
            k, v = k[:, :, SINK_TOKENS:], v[:, :, SINK_TOKENS:]
        num_full = k.shape[2] // BLOCK_TOKENS if self._has_sinks else 0
        if num_full:
            cut = num_full * BLOCK_TOKENS
            self._append_blocks(encode(k[0, :, :cut], v[0, :, :cut]))
            k, v = k[:, :, cut:], v[:, :, cut:]
        return k, v

    def _append_blocks(self, tiles: mx.array) -> None:
        end = self.num_blocks + tiles.shape[0]
        if end > self.tiles.shape[0]:
            num_spare = max(end, 2 * self.tiles.shape[0]) - self.tiles.shape[0]
            self.tiles = with_room(self.tiles, num_spare)
        self.tiles[self.num_blocks : end] = tiles
        self.num_blocks = end


class KVCache:
    """All layers of one sequence."""

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, dtype: mx.Dtype) -> None:
        self.num_kv_heads, self.head_dim, self.dtype = num_kv_heads, head_dim, dtype
        self.layers = [CompressedLayer(num_kv_heads, head_dim, dtype) for _ in range(num_layers)]

    @property
    def num_tokens(self) -> int:
        return self.layers[0].offset

    @property
    def num_blocks(self) -> int:
        return self.layers[0].num_blocks

    def rewind(self, num_blocks: int) -> None:
        for layer in self.layers:
            layer.rewind(num_blocks)

    def arrays(self) -> list[mx.array]:
        return [array for layer in self.layers for array in layer.arrays()]
