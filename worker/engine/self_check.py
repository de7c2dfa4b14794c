"""Whether a restored prefix still means what it meant when it was stored.

With a prefix the logits are kept that follow when its last token is decoded once more over its blocks: one
step from stored KV is enough for them. They are computed again from what was restored. A difference means
other weights under the same fingerprint, memory or a device that errs, or a fault of ours: what no checksum
can find.
"""

from __future__ import annotations

import math
from typing import Literal

import mlx.core as mx
import numpy as np

from cache_store import Section, SnapshotStore, attached
from cache_store.doubt import quarantine_chain
from worker.engine.decode import forward
from worker.engine.kv_cache import KVCache
from worker.engine.model import Model
from worker.engine.snapshots import Prefix, attach_to_end

Verify = Literal["always", "sample", "never"]

SAMPLE_EVERY = 8
"""With `sample` the first restore of an engine is checked, and every eighth after it."""
NUM_LOGITS = 32
_NAME = "logits"
_ROUNDING = {mx.float32: 2.0**-24, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}
_LEAST_ROUNDING = 2.0**-11
"""Attention over tiles is in float16 on every device."""


class SelfCheck:
    """Keeps and compares the logits of one engine's prefixes. Counts restores."""

    def __init__(self, model: Model, store: SnapshotStore, verify: Verify) -> None:
        self._model, self._store, self._verify = model, store, verify
        self._num_restored = 0

    def keep(self, prefix: Prefix, cache: KVCache, exact: bool) -> None:
        """Attach the logits to a prefix whose blocks are stored.

        Args:
            cache: holds the prefix and nothing behind it; the same afterwards.
            exact: whether the prefix is.
        """
        if self._verify == "never":
            return
        logits = self._logits(prefix, cache, prefix.num_blocks)
        ids = np.argsort(-logits, kind="stable")[:NUM_LOGITS].astype(np.uint32)
        values = logits[ids]
        sections = [
            Section("ids", "uint32", ids.shape, ids.data.cast("B")),
            Section("values", "float32", values.shape, values.data.cast("B")),
        ]
        attach_to_end(self._store, prefix, _NAME, sections, exact, {"rounding": self._rounding})

    def passes(self, prefix: Prefix, cache: KVCache, num_blocks: int) -> bool:
        """Whether a restored prefix may be used; called once for each restore.

        One that differs goes to quarantine with all that was built on its first block. One without logits
        passes: it is the beginning of a longer one, or was stored with `never`.

        Args:
            cache: holds the first `num_blocks` of the prefix and nothing behind them; the same afterwards.
        """
        self._num_restored += 1
        sampled = self._verify == "sample" and self._num_restored % SAMPLE_EVERY == 1
        if self._verify != "always" and not sampled:
            return True
        found = attached(self._store, prefix.keys[num_blocks - 1], _NAME)
        if found is None:
            return True
        info, (ids_bytes, values_bytes) = found
        ids, values = np.frombuffer(ids_bytes, np.uint32), np.frombuffer(values_bytes, np.float32)
        logits = self._logits(prefix, cache, num_blocks)
        off = float(np.abs(logits[ids] - values).max()) if ids.max() < logits.size else math.inf
        limit = self._limit(values, float(info.meta["rounding"]))
        if off <= limit:  # a NaN is none
            return True
        expected, what = f"those stored with it, within {limit:.2g}", "the logits that follow the prefix"
        quarantine_chain(self._store, prefix.keys[0], what, expected, f"others, {off:.2g} off")
        return False

    def _limit(self, values: np.ndarray, rounding: float) -> float:
        """How far rounding alone may move a logit.

        Each layer rounds its two sums once, to either side, in the coarser of the two types that were
        computed with: errors that add up like a random walk, in units of the largest logit.
        """
        step = max(rounding, self._rounding, _LEAST_ROUNDING)
        return math.sqrt(2 * len(self._model.layers)) * step * float(np.abs(values).max())

    @property
    def _rounding(self) -> float:
        return _ROUNDING[self._model.dtype]

    def _logits(self, prefix: Prefix, cache: KVCache, num_blocks: int) -> np.ndarray:
        """(vocab,) float32."""
        last = prefix.blocks[num_blocks - 1][-1:]
        logits = forward(self._model, cache, mx.array(last)[None])[0, -1]
        mx.eval(logits)
        cache.rewind(num_blocks)
        return np.array(logits)
