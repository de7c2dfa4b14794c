"""Lets a long stage one go on where a killed or cancelled one was.

Says when that is worth its writing (`Pace`) and moves a layer's KV and the hidden states between memory and
`cache_store`'s checkpoints (`Checkpoint`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from cache_store import BadBlock, Resume, Section, SnapshotStore
from kernels import from_canonical, to_canonical
from worker.engine.kv_cache import SINK_TOKENS, CompressedLayer, KVCache, with_room
from worker.engine.snapshots import Prefix
from worker.engine.window import WindowLayer

log = logging.getLogger("worker.engine")

BYTES_PER_S = 1e9
"""What a save is taken to write, or the most that one did: it waits for memory, and seldom for the disk."""


@dataclass(frozen=True)
class CheckpointPolicy:
    """When a checkpoint is worth its writing."""

    max_share: float = 0.03
    """Of the seconds of a prefill, for all of its checkpoints; the last one may be slower than thought."""
    min_prefill_s: float = 20.0
    """A prefill that is estimated to take less has none: it is repeated as fast."""
    max_repeated: float = 0.05
    """Of a prefill, what a kill may lose where `max_share` allows it; sooner than that nothing is written."""


DEFAULT_POLICY = CheckpointPolicy()


class Pace:
    """Decides by the measured seconds of one prefill. Mutated by `wrote`."""

    def __init__(self, policy: CheckpointPolicy, clock: Callable[[], float] = time.perf_counter) -> None:
        self.policy, self._clock, self._began = policy, clock, clock()
        self.written_s, self.written_bytes = 0.0, 0
        """Of all checkpoints that were stored; seconds of those that the disk refused too."""
        self._bytes_per_s = BYTES_PER_S

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._began

    def is_due(self, done_share: float, num_bytes: int) -> bool:
        """Whether to write so many bytes at this point.

        A quarter of what all may take is there from the start: one slow write does not put off those that
        follow, and the last one comes before the end.

        Args:
            done_share: what was done since the start, of the whole prefill; above 0.
        """
        elapsed = self.elapsed_s
        whole_s = (elapsed - self.written_s) / done_share
        allowed_s = self.policy.max_share * min(elapsed + whole_s / 4, whole_s)
        is_long = whole_s >= self.policy.min_prefill_s
        return is_long and self.written_s + num_bytes / self._bytes_per_s <= allowed_s

    def wrote(self, num_bytes: int, began_s: float) -> None:
        """So many bytes were stored since `elapsed_s` was `began_s`."""
        spent_s = self.elapsed_s - began_s
        self.written_bytes += num_bytes
        self.written_s += spent_s
        if spent_s:
            self._bytes_per_s = max(self._bytes_per_s, num_bytes / spent_s)


class Checkpoint:
    """That of one prefix's stage one, from block `first` on. Mutated by `resume` and `layer_done`."""

    def __init__(
        self, store: SnapshotStore, prefix: Prefix, first: int, about: Mapping[str, Any], pace: Pace
    ) -> None:
        """
        Args:
            first: the blocks that are known before; not part of the checkpoint.
            about: the model's name, and what else must agree for the same bits to come out.
        """
        self._checkpoints, self._prefix, self._first, self._pace = store.checkpoints, prefix, first, pace
        self._about = {**about, "first_block": first, "tenant": prefix.tenant}
        self._resumed_layer, self._num_saved, self._resumed_s = 0, 0, 0.0

    @property
    def spent_s(self) -> float:
        """Seconds that the prefill took, those of earlier runs that are not repeated included."""
        return self._resumed_s + self._pace.elapsed_s

    def resume(
        self, cache: KVCache, num_layers: int, hidden: Sequence[mx.array], num_spare: int
    ) -> tuple[int, list[mx.array]]:
        """Go to where an earlier run was: fill the finished layers of `cache`. A bad checkpoint is a miss.

        Args:
            num_layers: that stage one passes through.
            hidden: what enters the first layer, chunk by chunk; returned where there is no checkpoint.
            num_spare: blocks to reserve behind the prefix.

        Returns:
            the first layer that is not finished, and the hidden states (1, tokens, width) that enter it.
        """
        bad: Resume | None = None
        while (at := self._checkpoints.resume(self._prefix.keys[-1])) and at != bad:
            if not self._fits(at, num_layers, hidden):
                log.info("the checkpoint of this prefix was made in another way: not used")
                break
            try:
                layers = [self._read_layer(cache, index) for index in range(at.layer)]
                entering = self._read_hidden(at.layer, hidden)
            except BadBlock as error:
                log.warning("a checkpoint of this prefix is bad, and not used: %s", error)
                bad = at  # and gone: the one before it may stand
                continue
            for index, arrays in enumerate(layers):
                self._hold(cache, index, arrays, num_spare)
            self._resumed_layer = self._num_saved = at.layer
            self._resumed_s = float(at.meta["spent_s"])
            log.info("%d of %d layers of this prefix are done already", at.layer, num_layers)
            return at.layer, entering
        self.remove()
        return 0, list(hidden)

    def layer_done(self, cache: KVCache, index: int, num_layers: int, hidden: Sequence[mx.array]) -> None:
        """Write what is not written yet, if it is time.

        Args:
            index: of the layer that is done; its KV is in `cache`.
            hidden: what leaves it, evaluated.
        """
        done = index + 1
        if done == num_layers:
            return  # the blocks are stored next
        if done + 1 - self._num_saved <= self._pace.policy.max_repeated * num_layers:
            return  # after the next one is early enough
        unsaved = range(self._num_saved, done)
        num_bytes = sum(h.nbytes for h in hidden) + sum(self._layer_bytes(cache, n) for n in unsaved)
        if not self._pace.is_due((done - self._resumed_layer) / num_layers, num_bytes):
            return
        began_s = self._pace.elapsed_s
        stored = self._save(cache, unsaved, hidden)
        # Where the disk refuses, even what counted before may be gone: all is written again.
        self._num_saved = done if stored else 0
        self._pace.wrote(num_bytes if stored else 0, began_s)

    def remove(self) -> None:
        """Delete it: the prefill is done."""
        self._checkpoints.remove(self._prefix.keys[-1])

    def _save(self, cache: KVCache, layers: range, hidden: Sequence[mx.array]) -> bool:
        key = self._prefix.keys[-1]
        for index in layers:
            arrays = self._layer_arrays(cache, index)
            sections = [
                Section(f"array.{n}", str(a.dtype), a.shape, a.data.cast("B")) for n, a in enumerate(arrays)
            ]
            if not self._checkpoints.save_layer(key, index, sections, self._about):
                return False
        sections = [
            Section(f"chunk.{n}", _name(h.dtype), h.shape, _host(h).data.cast("B"))
            for n, h in enumerate(hidden)
        ]
        meta = {**self._about, "spent_s": round(self.spent_s, 6)}
        return self._checkpoints.save_hidden(key, layers.stop, sections, meta)

    def _layer_bytes(self, cache: KVCache, index: int) -> int:
        """Sinks left out: about what `_layer_arrays` gives."""
        kept = cache.layers[index]
        if isinstance(kept, WindowLayer):
            return int(kept.prefix_k.size + kept.prefix_v.size) * 2
        assert isinstance(kept, CompressedLayer), f"layer {index} has nothing of its own"
        return int(kept.tiles[self._first : kept.num_blocks].nbytes)

    def _layer_arrays(self, cache: KVCache, index: int) -> list[np.ndarray]:
        """What the checkpoint keeps of a layer, as it lies on disk."""
        kept = cache.layers[index]
        if isinstance(kept, WindowLayer):
            return [_dense(kept.prefix_k, kept.prefix_v)]
        assert isinstance(kept, CompressedLayer), f"layer {index} has nothing of its own"
        new = kept.tiles[self._first : kept.num_blocks]
        tiles = to_canonical(new, kept.shape.head_dim, kept.shape.format)
        mx.eval(tiles)
        arrays = [np.array(tiles, copy=False)]
        return arrays if self._first else [*arrays, _dense(kept.sinks_k, kept.sinks_v)]

    def _read_layer(self, cache: KVCache, index: int) -> list[np.ndarray]:
        """As `_layer_arrays` gave them. Raises BadBlock."""
        kept, end = cache.layers[index], len(self._prefix.tokens)
        if isinstance(kept, WindowLayer):
            shape = (2, kept.shape.num_kv_heads, kept.num_kept(end), kept.shape.head_dim)
            arrays = [np.empty(shape, np.float16)]
        else:
            assert isinstance(kept, CompressedLayer), f"layer {index} has nothing of its own"
            num_new = self._prefix.num_blocks - self._first
            arrays = [np.empty((num_new, *kept.tiles.shape[1:]), np.uint32)]
            if not self._first:
                sinks = (2, kept.shape.num_kv_heads, SINK_TOKENS, kept.shape.head_dim)
                arrays.append(np.empty(sinks, np.float16))
        into = [array.data.cast("B") for array in arrays]
        self._checkpoints.read_layer(self._prefix.keys[-1], index, into)
        return arrays

    def _hold(self, cache: KVCache, index: int, arrays: Sequence[np.ndarray], num_spare: int) -> None:
        """Let a layer of the cache hold what was read, behind the blocks that it holds already."""
        kept = cache.layers[index]
        if isinstance(kept, WindowLayer):
            k, v = mx.array(arrays[0])
            kept.set_prefix(k, v, len(self._prefix.tokens))
        elif isinstance(kept, CompressedLayer):
            tiles = from_canonical(mx.array(arrays[0]), kept.shape.head_dim, kept.shape.format)
            k, v = (kept.sinks_k, kept.sinks_v) if self._first else mx.array(arrays[1])
            tiles = mx.concatenate([kept.tiles[: self._first], tiles])
            kept.set_prefix(k, v, with_room(tiles, num_spare), self._prefix.num_blocks)
            mx.eval(kept.arrays())

    def _read_hidden(self, layer: int, like: Sequence[mx.array]) -> list[mx.array]:
        arrays = [np.empty(h.shape, _HOST.get(h.dtype, np.uint16)) for h in like]
        into = [array.data.cast("B") for array in arrays]
        self._checkpoints.read_hidden(self._prefix.keys[-1], layer, into)
        return [mx.array(a).view(h.dtype) for a, h in zip(arrays, like, strict=True)]

    def _fits(self, at: Resume, num_layers: int, hidden: Sequence[mx.array]) -> bool:
        found = [(info.dtype, tuple(info.shape)) for info in at.hidden]
        wanted = [(_name(h.dtype), h.shape) for h in hidden]
        same = all(at.meta.get(word) == value for word, value in self._about.items())
        return same and found == wanted and 0 < at.layer < num_layers


def best_start(store: SnapshotStore, prefix: Prefix, num_known: int, num_layers: int) -> int:
    """With how many known blocks to begin: those that a checkpoint began with, where that leaves less to do.

    A prefill that was killed while its blocks were stored is one whose first blocks are known too.
    """
    at = store.checkpoints.resume(prefix.keys[-1])
    first = at.meta.get("first_block") if at else None
    if at is None or not isinstance(first, int) or not 0 <= first < num_known:
        return num_known
    left_from_checkpoint = (prefix.num_blocks - first) * (num_layers - at.layer)
    return first if left_from_checkpoint <= (prefix.num_blocks - num_known) * num_layers else num_known


_HOST = {mx.float32: np.float32, mx.float16: np.float16}


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def _host(x: mx.array) -> np.ndarray:
    """The same bytes for numpy, which knows no bfloat16."""
    x = mx.contiguous(x if x.dtype in _HOST else x.view(mx.uint16))
    mx.eval(x)
    return np.array(x, copy=False)


def _dense(k: mx.array, v: mx.array) -> np.ndarray:
    stacked = mx.stack([k, v]).astype(mx.float16)
    mx.eval(stacked)
    return np.array(stacked, copy=False)
