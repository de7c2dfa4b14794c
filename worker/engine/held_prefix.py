"""The KV of the last prefix: restored from memory or disk, completed by prefill, stored for the next time."""

from __future__ import annotations

import logging
from typing import Literal

from cache_store import BlockKey, SnapshotStore
from worker.engine import snapshots
from worker.engine.checkpoints import Checkpoint, CheckpointPolicy, Pace, best_start
from worker.engine.kv_cache import KVCache, blocks_end
from worker.engine.model import Model
from worker.engine.prefill import num_prefix_layers, prefill_prefix
from worker.engine.report import Report
from worker.engine.self_check import SelfCheck, Verify
from worker.engine.snapshots import Prefix

log = logging.getLogger("worker.engine")


class HeldPrefix:
    """One cache in memory, of the prefix that was asked about last. Mutated by all but `kind`.

    A step that is stopped half-way leaves the cache of no use: `forget` it then.
    """

    def __init__(
        self, model: Model, store: SnapshotStore | None, checkpoints: CheckpointPolicy, verify: Verify
    ) -> None:
        """
        Args:
            checkpoints: when a long prefill notes where it is.
            verify: which restored prefixes are checked against the logits that are kept with them.
        """
        self._model, self._store, self._checkpoints = model, store, checkpoints
        self._check = SelfCheck(model, store, verify) if store else None
        self.cache: KVCache | None = None
        self._keys: list[BlockKey] = []
        self._is_exact = True
        self.is_stored = False
        """Whether all that the cache holds of a prefix was put on disk, or came from there."""

    def restore(self, prefix: Prefix, num_spare: int, reuse: bool, report: Report) -> tuple[KVCache, int]:
        """The cache with as much of the prefix as is known, and how many tokens that is.

        Args:
            num_spare: blocks to reserve behind the prefix for what follows.
            reuse: whether what is known may be used.
        """
        model = self._model
        if self._is_deleted():
            self.forget()
        if reuse and prefix.num_blocks:
            in_memory = snapshots.num_common(self._keys, prefix.keys)
            windows = any(shape.window for shape in model.shapes)
            on_disk = snapshots.num_restorable(self._store, prefix, windows) if self._store else 0
            if self._store and max(in_memory, on_disk) < prefix.num_blocks:
                num_layers = num_prefix_layers(model.new_cache())
                start = best_start(self._store, prefix, max(in_memory, on_disk), num_layers)
                in_memory, on_disk = min(in_memory, start), min(on_disk, start)
            if self.cache and in_memory and in_memory >= on_disk and self.cache.can_rewind(in_memory):
                self.cache.rewind(in_memory)
                self._keys = prefix.keys[:in_memory]
                return self.cache, blocks_end(in_memory)
        else:
            on_disk = 0
        self.forget()
        cache = model.new_cache()
        num_read = 0
        if self._store and on_disk:
            num_read, exact = snapshots.restore(self._store, prefix, on_disk, cache, num_spare, report)
            self._is_exact = exact
            if num_read and self._check and not self._check.passes(prefix, cache, num_read):
                self._is_exact, num_read, cache = True, 0, model.new_cache()
        self.cache, self._keys = cache, prefix.keys[:num_read]
        self.is_stored = num_read > 0
        return cache, blocks_end(num_read)

    def complete(self, cache: KVCache, prefix: Prefix, num_spare: int, reuse: bool, report: Report) -> None:
        """Prefill what of the prefix is not known yet, and store it.

        Args:
            cache: what `restore` gave. Mutated.
            reuse: whether it may be stored.
        """
        num_known = cache.num_blocks
        if num_known == prefix.num_blocks:
            return
        checkpoint = None
        if self._store and reuse:
            # The device's own rounding must not change half-way, nor what the new blocks attend to.
            about = {
                "model": self._model.card.id,
                "device": self._model.card.device,
                "known_exact": self._is_exact,
            }
            checkpoint = Checkpoint(self._store, prefix, num_known, about, Pace(self._checkpoints))
        if num_known:
            # The new blocks attend to decoded older ones.
            self._is_exact = False
        prefill_prefix(self._model, cache, prefix.tokens, num_spare, report, checkpoint)
        self._keys = prefix.keys
        if self._store and checkpoint:
            exact, spent_s = self._is_exact, checkpoint.spent_s
            num_stored = snapshots.save(
                self._store, prefix, cache, num_known, exact, self._model.card.id, spent_s
            )
            checkpoint.remove()
            self.is_stored = num_known + num_stored == prefix.num_blocks
            if self._check and self.is_stored:
                self._check.keep(prefix, cache, exact)
            log.info("stored %d of %d new blocks", num_stored, prefix.num_blocks - num_known)

    def kind(self, prefix: Prefix) -> Literal["none", "exact", "continued"]:
        """How its keys and values were computed: `continued` if some met decoded ones of others."""
        if not prefix.num_blocks:
            return "none"
        return "exact" if self._is_exact else "continued"

    def forget(self) -> None:
        """Hold nothing; what is on disk stays."""
        self.cache, self._keys, self._is_exact, self.is_stored = None, [], True, False

    def _is_deleted(self) -> bool:
        """Whether the prefix in memory lay on disk and is gone: who deletes one means this copy too."""
        return bool(self._store and self.is_stored and self._store.info(self._keys[-1]) is None)
