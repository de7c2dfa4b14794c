"""The KV of one sequence: exact while its prefix is prefilled, compressed from then on.

A compressed layer holds, in token order, up to 64 sinks (dense, rounded to float16 as they are stored),
whole blocks (int4c tiles in one array whose capacity is reserved ahead), and a dense tail of 2048 tokens.
What follows the prefix stays exact in the tail; once it exceeds that, the next step first encodes its oldest
whole blocks. Layers that see a window only are in window.py. It knows no model and no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import mlx.core as mx

from kernels import (
    BLOCK_TOKENS,
    MAX_QUERIES,
    CacheView,
    Format,
    TileLayout,
    decode,
    decode_attention,
    encode,
    has_fused_prefill,
    prefill_attention,
)
from worker.engine.attention import Handle, Owner
from worker.engine.shapes import LayerShape
from worker.engine.window import WindowLayer, WindowMark

SINK_TOKENS = 64
"""The first tokens, which every later one attends to strongly: kept dense, outside all statistics."""
TAIL_TOKENS = 2048
"""What follows the prefix stays dense up to here, so a question and its answer usually meet no 4 bits."""
FIRST_ROOM = BLOCK_TOKENS + MAX_QUERIES
"""Tokens that a tail's buffer holds at first; it doubles."""


@lru_cache(maxsize=4)
def _length(num_tokens: int) -> mx.array:
    """One tail's length, for all layers of a step: an array of its own for each is time of the host."""
    return mx.array([num_tokens], mx.int32)


def whole_blocks(num_tokens: int) -> int:
    """How many blocks fit behind the sinks in the first `num_tokens` tokens."""
    return max(0, (num_tokens - SINK_TOKENS) // BLOCK_TOKENS)


def blocks_end(num_blocks: int) -> int:
    """The token after the last of `num_blocks` blocks; 0 if there is none."""
    return SINK_TOKENS + num_blocks * BLOCK_TOKENS if num_blocks else 0


def with_room(tiles: mx.array, num_spare: int) -> mx.array:
    """The tiles with `num_spare` unused blocks behind them; a copy."""
    return mx.concatenate([tiles, mx.zeros((num_spare, *tiles.shape[1:]), mx.uint32)])


class ExactLayer:
    """One layer's exact keys and values while the prefix passes through it.

    Mutated by `update_and_fetch`. The buffers are reserved once, since growing would copy them. Where cuDNN
    reads them they hold token after token, not head after head, so that no stride tells how many they hold:
    cuDNN makes a plan for every combination of lengths and strides, 40 to 65 ms each, and so finds those of
    the documents before.
    """

    on_cuda = bool(mx.cuda.is_available())

    def __init__(self, num_tokens: int, shape: LayerShape, dtype: mx.Dtype) -> None:
        self._heads, self._dim = shape.num_kv_heads, shape.head_dim
        self._by_token = self.on_cuda and has_fused_prefill(shape.head_dim, dtype)
        buffer = (num_tokens, self._heads) if self._by_token else (self._heads, num_tokens)
        self._k, self._v = (mx.zeros((1, *buffer, self._dim), dtype) for _ in "kv")
        self.offset = 0

    def seed(self, k: mx.array, v: mx.array) -> None:
        """Begin with (num_kv_heads, n, head_dim) keys and values that are known already."""
        self.update_and_fetch(k[None], v[None])

    def update_and_fetch(self, k: mx.array, v: mx.array) -> tuple[Handle, Handle]:
        start, self.offset = self.offset, self.offset + k.shape[2]
        for buffer, new in ((self._k, k), (self._v, v)):
            if self._by_token:
                buffer[:, start : self.offset] = new.swapaxes(1, 2)
            else:
                buffer[:, :, start : self.offset] = new
        handle = Handle(self, k)
        return handle, handle

    def held(self) -> tuple[mx.array, mx.array]:
        """Keys and values (1, num_kv_heads, n, head_dim) so far, views of the buffers.

        They must not outlive what comes next: while one does, an update copies the buffer.
        """
        return self._view(self._k), self._view(self._v)

    def attend(self, q: mx.array, scale: float, sinks: mx.array | None = None) -> mx.array:
        """Attend to everything so far."""
        return prefill_attention(q, *self.held(), scale, sinks)

    def arrays(self) -> list[mx.array]:
        """Everything that a step may have left unevaluated."""
        return [self._k, self._v]

    def _view(self, x: mx.array) -> mx.array:
        if not self._by_token:
            return x[:, :, : self.offset]
        token = self._heads * self._dim
        # A stride over the one sequence too, which a slice would take from the capacity.
        return mx.as_strided(x, (1, self._heads, self.offset, self._dim), (token, self._dim, token, 1))


class CompressedLayer:
    """One layer's sinks, blocks and tail. Mutated by `update_and_fetch`, `rewind` and `drop`."""

    def __init__(self, shape: LayerShape, dtype: mx.Dtype) -> None:
        self.shape, self.dtype = shape, dtype
        self._format: Format = shape.format
        num_words = TileLayout(shape.head_dim, self._format).tile_words
        self.tiles = mx.zeros((0, shape.num_kv_heads, num_words), mx.uint32)
        self.num_blocks = 0
        self.sinks_k, self.sinks_v = self._dense(0), self._dense(0)
        self._empty_tail()

    @property
    def offset(self) -> int:
        return int(self.sinks_k.shape[1]) + self.num_blocks * BLOCK_TOKENS + self._num_tail

    def set_prefix(self, sinks_k: mx.array, sinks_v: mx.array, tiles: mx.array, num_blocks: int) -> None:
        """Hold exactly a prefix: sinks (num_kv_heads, 64, head_dim) and the first `num_blocks` of `tiles`.

        The tiles behind those are room for what follows. The array is taken over, not copied.
        """
        self.sinks_k, self.sinks_v = self._as_stored(sinks_k), self._as_stored(sinks_v)
        self.tiles, self.num_blocks = tiles, num_blocks
        self._empty_tail()

    def rewind(self, num_blocks: int) -> None:
        """Forget all that comes after the first `num_blocks` blocks."""
        if not num_blocks:
            self.sinks_k, self.sinks_v = self._dense(0), self._dense(0)
        self.num_blocks = num_blocks
        self._empty_tail()

    def drop(self, num_tokens: int) -> None:
        """Forget the newest tokens.

        Raises:
            ValueError: if the tail holds fewer: what is encoded can only be rewound to a block.
        """
        if not 0 <= num_tokens <= self._num_tail:
            raise ValueError(
                f"cannot drop {num_tokens} tokens: the tail holds {self._num_tail}; rewind to a block instead"
            )
        self._num_tail -= num_tokens

    def decoded(self) -> tuple[mx.array, mx.array]:
        """Sinks and blocks as dense (num_kv_heads, n, head_dim) keys and values."""
        tiles = self.tiles[: self.num_blocks]
        k, v = decode(tiles, self.shape.head_dim, self.dtype, self._format)
        return mx.concatenate([self.sinks_k, k], axis=1), mx.concatenate([self.sinks_v, v], axis=1)

    def tail(self) -> tuple[mx.array, mx.array]:
        """What is dense behind the blocks: keys and values (1, num_kv_heads, n, head_dim)."""
        return self._tail_k[:, :, : self._num_tail], self._tail_v[:, :, : self._num_tail]

    def view(self, tail_k: mx.array, tail_v: mx.array, lengths: mx.array) -> CacheView:
        """Sinks and blocks with the tails (B, num_kv_heads, n, head_dim) of B rows behind them."""
        return CacheView(
            self.sinks_k,
            self.sinks_v,
            self.tiles,
            self.num_blocks,
            tail_k,
            tail_v,
            lengths,
            format=self._format,
        )

    def update_and_fetch(self, k: mx.array, v: mx.array) -> tuple[Handle, Handle]:
        # Here and not behind attention, since several layers may attend to one cache.
        if self._num_tail > TAIL_TOKENS:
            self._settle()
        self._append_to_tail(k, v)
        handle = Handle(self, k)
        return handle, handle

    def attend(self, q: mx.array, scale: float, sinks: mx.array | None = None) -> mx.array:
        """Attend to everything, the queries' own tokens last."""
        if q.shape[2] <= MAX_QUERIES:
            view = self.view(self._tail_k, self._tail_v, _length(self._num_tail))
            return decode_attention(q, view, scale, sinks)
        old, tail = self.decoded(), self.tail()
        k, v = (mx.concatenate([o[None], t], axis=2) for o, t in zip(old, tail, strict=True))
        return prefill_attention(q, k, v, scale, sinks)

    def arrays(self) -> list[mx.array]:
        """Everything that a step may have left unevaluated."""
        return [self.tiles, self.sinks_k, self.sinks_v, self._tail_k, self._tail_v]

    def _dense(self, num_tokens: int) -> mx.array:
        return mx.zeros((self.shape.num_kv_heads, num_tokens, self.shape.head_dim), self.dtype)

    def _as_stored(self, x: mx.array) -> mx.array:
        """Rounded to float16, as the snapshot keeps it: a restored sink equals the one first made."""
        return x.astype(mx.float16).astype(self.dtype)

    def _empty_tail(self) -> None:
        # A small buffer again: the same steps then find the same sizes, and give the same bits.
        self._tail_k, self._tail_v = (self._dense(FIRST_ROOM)[None] for _ in range(2))
        self._num_tail = 0

    def _append_to_tail(self, k: mx.array, v: mx.array) -> None:
        start, end = self._num_tail, self._num_tail + k.shape[2]
        room = self._tail_k.shape[2]
        if end > room:
            num_more = max(end, min(2 * room, TAIL_TOKENS + MAX_QUERIES)) - room
            more = self._dense(num_more)[None]
            self._tail_k, self._tail_v = (
                mx.concatenate([t, more], axis=2) for t in (self._tail_k, self._tail_v)
            )
        self._tail_k[:, :, start:end] = k
        self._tail_v[:, :, start:end] = v
        self._num_tail = end

    def _settle(self) -> None:
        """Encode the oldest whole blocks of a tail over its limit, behind the sinks."""
        k, v = self.tail()
        if not self.sinks_k.shape[1]:
            self.sinks_k, self.sinks_v = (self._as_stored(x[0, :, :SINK_TOKENS]) for x in (k, v))
            k, v = k[:, :, SINK_TOKENS:], v[:, :, SINK_TOKENS:]
        cut = -(-max(0, k.shape[2] - TAIL_TOKENS) // BLOCK_TOKENS) * BLOCK_TOKENS
        if cut:
            self._append_blocks(encode(k[0, :, :cut], v[0, :, :cut], self._format))
        self._empty_tail()
        self._append_to_tail(k[:, :, cut:], v[:, :, cut:])

    def _append_blocks(self, tiles: mx.array) -> None:
        end = self.num_blocks + tiles.shape[0]
        if end > self.tiles.shape[0]:
            num_spare = max(end, 2 * self.tiles.shape[0]) - self.tiles.shape[0]
            self.tiles = with_room(self.tiles, num_spare)
        self.tiles[self.num_blocks : end] = tiles
        self.num_blocks = end


class Lender(Owner, Protocol):
    """A layer whose keys and values another one reads."""

    @property
    def offset(self) -> Any:
        """How many tokens it holds; an array where they are those of several rows."""


class BorrowedLayer:
    """A layer without keys and values of its own: its queries read another's, updated before it."""

    def __init__(self, source: Lender) -> None:
        self.source = source

    def handles(self, like: mx.array) -> tuple[Handle, Handle]:
        handle = Handle(self.source, like)
        return handle, handle

    def offset(self, num_new: int) -> Any:
        """The position of the first of `num_new` tokens that the other layer holds already."""
        return self.source.offset - num_new


@dataclass(frozen=True)
class CacheMark:
    """A moment of one sequence."""

    num_tokens: int
    windows: list[WindowMark]


class KVCache:
    """All layers of one sequence."""

    def __init__(self, shapes: Sequence[LayerShape], dtype: mx.Dtype) -> None:
        self.dtype = dtype
        self.compressed: list[CompressedLayer] = []
        self.windows: list[WindowLayer] = []
        self.layers: list[CompressedLayer | WindowLayer | BorrowedLayer] = []
        """One for each layer of the model; `compressed` and `windows` are those that own what they hold."""
        for shape in shapes:
            self.layers.append(self._make(shape))

    def _make(self, shape: LayerShape) -> CompressedLayer | WindowLayer | BorrowedLayer:
        if shape.source is not None:
            source = self.layers[shape.source]
            assert not isinstance(source, BorrowedLayer), f"layer {shape.source} has nothing to lend"
            return BorrowedLayer(source)
        if shape.window:
            self.windows.append(WindowLayer(shape, self.dtype))
            return self.windows[-1]
        self.compressed.append(CompressedLayer(shape, self.dtype))
        return self.compressed[-1]

    @property
    def num_tokens(self) -> int:
        return self.compressed[0].offset

    @property
    def num_blocks(self) -> int:
        return self.compressed[0].num_blocks

    def can_rewind(self, num_blocks: int) -> bool:
        """Whether `rewind` can: whether the windows at the end of the first `num_blocks` blocks are here."""
        return not num_blocks or all(w.num_prefix == blocks_end(num_blocks) for w in self.windows)

    def rewind(self, num_blocks: int) -> None:
        """Forget all that comes after the first `num_blocks` blocks.

        Raises:
            ValueError: if the windows at their end are gone.
        """
        if not self.can_rewind(num_blocks):
            raise ValueError(
                f"cannot rewind to {num_blocks} blocks: the windows are those after "
                f"{self.windows[0].num_prefix} tokens; restore the prefix instead"
            )
        for layer in self.compressed:
            layer.rewind(num_blocks)
        for window in self.windows:
            if num_blocks:
                window.rewind()
            else:
                window.clear()

    def drop(self, num_tokens: int) -> None:
        """Forget the newest tokens, such as drafts that were rejected.

        Raises:
            ValueError: if the dense ends hold fewer.
        """
        for layer in self.owners:
            layer.drop(num_tokens)

    def mark(self) -> CacheMark:
        """This moment, for `back_to`."""
        return CacheMark(self.num_tokens, [window.mark() for window in self.windows])

    def back_to(self, mark: CacheMark) -> None:
        """Forget what came after a moment, with windows that have moved since.

        Raises:
            ValueError: if it was encoded meanwhile.
        """
        for layer in self.compressed:
            layer.drop(layer.offset - mark.num_tokens)
        for window, then in zip(self.windows, mark.windows, strict=True):
            window.back_to(then)

    def arrays(self) -> list[mx.array]:
        """Everything that a step may have left unevaluated."""
        return [array for layer in self.owners for array in layer.arrays()]

    @property
    def owners(self) -> list[CompressedLayer | WindowLayer]:
        """The layers that hold keys and values."""
        return [*self.compressed, *self.windows]
