"""Several answers over one prefix, written together: each step reads the weights and the prefix once for all.

The rows share the compressed prefix and have windows and a dense tail each, so all that a row computes is
what it would compute by itself, but for the order of sums inside a matrix product of another height.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from kernels import decode_attention
from worker.engine.answer import Answer
from worker.engine.attention import Handle
from worker.engine.decode import forward
from worker.engine.kv_cache import BorrowedLayer, CompressedLayer, KVCache, blocks_end
from worker.engine.model import Model
from worker.engine.products import rows_joined
from worker.engine.sampling import token_ids
from worker.engine.window import WindowLayer

MAX_ROWS = 16
"""A step of 16 rows takes 3.1 times as long as one of a single row on two CPU cores, of 8 rows 2.4 times."""
_ROOM_STEP = 256
"""Tokens by which the tails grow."""


def supports_batches(config: dict[str, Any]) -> bool:
    """Whether the model's rotation takes a position for each row; mlx_lm's dynamic NTK scaling doesn't."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return (scaling.get("rope_type") or scaling.get("type")) != "dynamic"


def row_bytes(cache: KVCache, num_tokens: int) -> int:
    """What a row of `num_tokens` behind the prefix takes in all layers."""
    room, num_numbers = _room(num_tokens), 0
    for layer in cache.owners:
        num_numbers += 2 * layer.shape.num_kv_heads * layer.shape.head_dim * (num_before(layer) + room)
    return int(num_numbers * cache.dtype.size)


def num_before(layer: CompressedLayer | WindowLayer) -> int:
    """Tokens of the prefix that a row has to itself: those that a window sees from the prefix's end."""
    return layer.num_kept(layer.num_prefix) if isinstance(layer, WindowLayer) else 0


class Rows:
    """One layer's dense keys and values of all rows, as mlx_lm's layers expect their cache.

    They begin with what the layer keeps of the prefix's end, if it has a window, and go on with what follows.
    Mutated by every method but `attend` and `arrays`.
    """

    def __init__(self, batch: BatchCache, layer: CompressedLayer | WindowLayer) -> None:
        self._batch, self._layer = batch, layer
        self._num_before = num_before(layer)
        self._k, self._v = (tail[:0] for tail in layer.tail())
        self._num_new = 0

    @property
    def offset(self) -> mx.array:
        """(B,) int32: how many tokens each row holds, those of the prefix among them."""
        return self._batch.offsets + self._num_new if self._num_new else self._batch.offsets

    def begin_step(self) -> None:
        self._num_new = 0

    def update_and_fetch(self, k: mx.array, v: mx.array) -> tuple[Handle, Handle]:
        rows, (places, _) = self._batch.rows, self._batch.ends(self._num_before)
        self._k[rows, :, places], self._v[rows, :, places] = k[:, :, 0], v[:, :, 0]
        self._num_new = 1
        handle = Handle(self, k)
        return handle, handle

    def attend(self, q: mx.array, scale: float, sinks: mx.array | None = None) -> mx.array:
        _, lengths = self._batch.ends(self._num_before)
        return decode_attention(q, self._layer.view(self._k, self._v, lengths), scale, sinks)

    def resize(self, room: int) -> None:
        """Give every row room for this many tokens behind the prefix, all that count among them."""
        self._k, self._v = (_with_room(x, self._num_before + room) for x in (self._k, self._v))

    def add(self, num_tokens: int, room: int) -> None:
        """Take over what the layer itself holds, `num_tokens` behind the prefix, as one row more."""
        tails = []
        for tail in self._layer.tail():
            # What a window has moved past is seen by nobody, but its place is kept.
            gone = self._num_before + num_tokens - tail.shape[2]
            whole = mx.pad(tail, [(0, 0), (0, 0), (gone, 0), (0, 0)]) if gone else tail
            tails.append(_with_room(whole, self._num_before + room))
        self._k, self._v = mx.concatenate([self._k, tails[0]]), mx.concatenate([self._v, tails[1]])

    def keep(self, rows: mx.array) -> None:
        self._k, self._v = self._k[rows], self._v[rows]

    def arrays(self) -> list[mx.array]:
        return [self._k, self._v]


class BatchCache:
    """All layers of the rows of a batch, a step of one token each at a time."""

    def __init__(self, prefix: KVCache) -> None:
        """
        Args:
            prefix: its blocks are shared and read by every step; meanwhile only what follows them may change.
        """
        self._num_prefix = blocks_end(prefix.num_blocks)
        self._prefix = prefix
        self._num_tail: list[int] = []
        self._room = 0
        self.rows = self.offsets = mx.zeros((0,), mx.int32)
        self._ends: dict[int, tuple[mx.array, mx.array]] = {}
        self._own: list[Rows] = []
        self.layers: list[Rows | BorrowedLayer] = []
        """One for each layer of the model."""
        rows_of: dict[int, Rows] = {}
        for layer in prefix.layers:
            if isinstance(layer, BorrowedLayer):
                self.layers.append(BorrowedLayer(rows_of[id(layer.source)]))
            else:
                rows_of[id(layer)] = Rows(self, layer)
                self._own.append(rows_of[id(layer)])
                self.layers.append(self._own[-1])

    def add(self) -> None:
        """Make a row of what the prefix's cache holds behind its blocks."""
        num_tokens = self._prefix.num_tokens - self._num_prefix
        self._reserve(num_tokens)
        for layer in self._own:
            layer.add(num_tokens, self._room)
        self._num_tail.append(num_tokens)
        # Unevaluated, the rows would hold on to the buffers that they were copied from.
        mx.eval(self.arrays())

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone, in this order."""
        for layer in self._own:
            layer.keep(mx.array(list(rows), mx.int32))
        self._num_tail = [self._num_tail[row] for row in rows]

    def begin_step(self) -> None:
        """Make room for one token of each row. Every layer is then updated once."""
        self._reserve(max(self._num_tail) + 1)
        self.rows = mx.arange(len(self._num_tail))
        self.offsets = mx.array(self._num_tail, mx.int32) + self._num_prefix
        self._ends.clear()
        for layer in self._own:
            layer.begin_step()
        self._num_tail = [num_tokens + 1 for num_tokens in self._num_tail]

    def ends(self, num_before: int) -> tuple[mx.array, mx.array]:
        """Where the step's tokens go in rows that begin so far before the prefix's end, and the rows' lengths
        with them; (B,) int32 each. Made once a step for all layers: one for each is time of the host.
        """
        if num_before not in self._ends:
            lengths = mx.array([num_before + num_tokens for num_tokens in self._num_tail], mx.int32)
            self._ends[num_before] = lengths - 1, lengths
        return self._ends[num_before]

    def arrays(self) -> list[mx.array]:
        """Everything that a step may have left unevaluated."""
        return [array for layer in self._own for array in layer.arrays()]

    def _reserve(self, num_tokens: int) -> None:
        room = _room(num_tokens)
        if room > self._room:
            self._room = room
            for layer in self._own:
                layer.resize(room)


def decode_batch(
    model: Model,
    cache: KVCache,
    begin: Sequence[Callable[[], Answer]],
    max_rows: int,
    ended: Callable[[Answer], None],
) -> list[Answer]:
    """Write all answers; one that ends makes room for one that waits.

    Args:
        cache: holds what all prompts begin with, in blocks and tail, and does again at the end.
        begin: for each answer, prefills the rest of its prompt and takes its first token.
        max_rows: how many answers are written at a time.
        ended: hears of each answer as soon as it has ended.
    """
    shared = cache.mark()
    batch = BatchCache(cache)
    waiting = deque(begin)
    answers: list[Answer] = []
    rows: list[Answer] = []
    with rows_joined(model.modules):
        while waiting or rows:
            while waiting and len(rows) < max_rows:
                answer = waiting.popleft()()
                answers.append(answer)
                if answer.finish_reason is None:
                    batch.add()
                    rows.append(answer)
                else:
                    ended(answer)
                cache.back_to(shared)
            if rows:
                _step(model, batch, rows)
            going = [i for i, answer in enumerate(rows) if answer.finish_reason is None]
            if len(going) < len(rows):
                for answer in rows:
                    if answer.finish_reason is not None:
                        ended(answer)
                batch.keep(going)
                rows = [rows[i] for i in going]
    return answers


def _step(model: Model, batch: BatchCache, rows: Sequence[Answer]) -> None:
    """One token of each row."""
    began = time.perf_counter()
    rows[0].report.check()
    batch.begin_step()
    logits = forward(model, batch, mx.array([[answer.tokens[-1]] for answer in rows]))  # (B, 1, vocab)
    chosen = [answer.sampler.choose(logits[i], answer.tokens) for i, answer in enumerate(rows)]
    for answer, token in zip(rows, token_ids(chosen), strict=True):
        answer.take(token)
    # The job's progress is that of its oldest answer; all of them would be a jumble.
    rows[0].report_progress()
    share_s = (time.perf_counter() - began) / len(rows)
    for answer in rows:
        answer.decode_s += share_s


def _room(num_tokens: int) -> int:
    """How many tokens a row's buffer has room for, at least `num_tokens`."""
    return -(-num_tokens // _ROOM_STEP) * _ROOM_STEP


def _with_room(x: mx.array, room: int) -> mx.array:
    """(B, H, n, D) → (B, H, room, D), zeros behind the first n."""
    return mx.pad(x, [(0, 0), (0, 0), (0, room - x.shape[2]), (0, 0)])
