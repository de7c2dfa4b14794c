"""The KV of a layer whose queries see only the newest tokens: a window, dense. Knows no model and no file."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from kernels import BLOCK_TOKENS, MAX_QUERIES, CacheView, decode_attention, prefill_attention
from worker.engine.attention import Handle
from worker.engine.shapes import LayerShape

SPARE_TOKENS = BLOCK_TOKENS + MAX_QUERIES
"""Room behind the window: it moves once in so many tokens, not with each."""


@dataclass(frozen=True)
class WindowMark:
    """A moment of one window."""

    k: mx.array
    v: mx.array
    num_held: int
    offset: int


class WindowLayer:
    """One layer's window at the end of a prefix, and what has followed. Mutated by all but `attend`."""

    def __init__(self, shape: LayerShape, dtype: mx.Dtype) -> None:
        if shape.window is None:
            raise ValueError(f"{shape} has no window: a CompressedLayer holds it")
        self.shape, self.window, self._dtype = shape, shape.window, dtype
        self._nothing = mx.zeros((shape.num_kv_heads, 0, shape.head_dim), dtype)
        self.set_prefix(self._nothing, self._nothing, 0)

    def num_kept(self, num_tokens: int) -> int:
        """How many of the first `num_tokens` tokens the next one sees."""
        return min(self.window - 1, num_tokens)

    def set_prefix(self, k: mx.array, v: mx.array, num_tokens: int) -> None:
        """Hold a prefix of `num_tokens`: the keys and values (num_kv_heads, n, head_dim) of its last ones.

        Raises:
            ValueError: if they are not all that the next token sees.
        """
        if k.shape[1] != self.num_kept(num_tokens) or k.shape != v.shape:
            raise ValueError(
                f"keys {k.shape}, values {v.shape} for a window of {self.window} after {num_tokens} tokens: "
                f"expected {self.num_kept(num_tokens)} of them"
            )
        self.prefix_k, self.prefix_v = (x.astype(mx.float16).astype(self._dtype) for x in (k, v))
        self._num_prefix = num_tokens
        self.rewind()

    def end_prefix(self) -> None:
        """Let the prefix end here; what is kept of it is rounded as it is stored."""
        kept = slice(self._num - self.num_kept(self.offset), self._num)
        k, v = (mx.contiguous(x[0, :, kept]) for x in (self._k, self._v))
        self.set_prefix(k, v, self.offset)

    @property
    def num_prefix(self) -> int:
        """Where `rewind` goes back to, in tokens."""
        return self._num_prefix

    def rewind(self) -> None:
        """Forget all that came after the prefix."""
        self.offset, self._num = self._num_prefix, self.prefix_k.shape[1]
        self._k, self._v = (self._with_room(x[None], SPARE_TOKENS) for x in (self.prefix_k, self.prefix_v))

    def clear(self) -> None:
        """Forget everything."""
        self.set_prefix(self._nothing, self._nothing, 0)

    def drop(self, num_tokens: int) -> None:
        """Forget the newest tokens.

        Raises:
            ValueError: if what they had pushed out of the window is gone.
        """
        num_left = self.offset - num_tokens
        if num_tokens < 0 or num_left < self._num_prefix or self._num - num_tokens < self.num_kept(num_left):
            raise ValueError(
                f"cannot drop {num_tokens} tokens: {self._num} are held of a window of {self.window}; "
                "rewind to the prefix instead"
            )
        self.offset, self._num = num_left, self._num - num_tokens

    def mark(self) -> WindowMark:
        """What is held at this moment, for `back_to`. While it is kept, the next update copies the window."""
        return WindowMark(self._k, self._v, self._num, self.offset)

    def back_to(self, mark: WindowMark) -> None:
        """Hold what was held then, whatever has been pushed out of the window since."""
        self._k, self._v, self._num, self.offset = mark.k, mark.v, mark.num_held, mark.offset

    def update_and_fetch(self, k: mx.array, v: mx.array) -> tuple[Handle, Handle]:
        num_new, room = k.shape[2], self._k.shape[2]
        if self._num + num_new > room:
            kept = slice(self._num - self.num_kept(self.offset), self._num)
            self._num = kept.stop - kept.start
            num_spare = max(num_new, SPARE_TOKENS)
            self._k, self._v = (self._with_room(x[:, :, kept], num_spare) for x in (self._k, self._v))
        end = self._num + num_new
        self._k[:, :, self._num : end], self._v[:, :, self._num : end] = k, v
        self._num, self.offset = end, self.offset + num_new
        handle = Handle(self, k)
        return handle, handle

    def attend(self, q: mx.array, scale: float, sinks: mx.array | None = None) -> mx.array:
        """Attend to the window of each query, the queries' own tokens last."""
        num_queries = q.shape[2]
        if num_queries <= MAX_QUERIES:
            lengths = mx.array([self._num], mx.int32)
            return decode_attention(q, self.view(self._k, self._v, lengths), scale, sinks)
        seen = slice(max(0, self._num - num_queries - self.window + 1), self._num)
        k, v = self._k[:, :, seen], self._v[:, :, seen]
        num_seen = k.shape[2]
        if num_seen <= self.window:
            return prefill_attention(q, k, v, scale, sinks)
        own = mx.arange(num_seen - num_queries, num_seen)[:, None]
        position = mx.arange(num_seen)
        mask = (position <= own) & (position > own - self.window)
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)

    def view(self, tail_k: mx.array, tail_v: mx.array, lengths: mx.array) -> CacheView:
        """The dense keys and values (B, num_kv_heads, n, head_dim) of B rows, through this window."""
        no_tiles = mx.zeros((0, self._nothing.shape[0], 1), mx.uint32)
        return CacheView(self._nothing, self._nothing, no_tiles, 0, tail_k, tail_v, lengths, self.window)

    def tail(self) -> tuple[mx.array, mx.array]:
        """All that is held: keys and values (1, num_kv_heads, n, head_dim)."""
        return self._k[:, :, : self._num], self._v[:, :, : self._num]

    def arrays(self) -> list[mx.array]:
        """Everything that a step may have left unevaluated."""
        return [self.prefix_k, self.prefix_v, self._k, self._v]

    def _with_room(self, x: mx.array, num_spare: int) -> mx.array:
        return mx.pad(x, [(0, 0), (0, 0), (0, num_spare), (0, 0)])
