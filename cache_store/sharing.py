"""What a store does with its shared tier: pull on a miss, push in the background, delete on both sides.

Owns the patience: a tier that is down or slow costs a match `answer_s` at most and is then left alone for
`retry_s`. One thread pushes; a read that hangs is abandoned in a thread of its own. What comes from the
tier becomes local only with every byte checked.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from cache_store.errors import BadBlock, TierDown
from cache_store.header import AnyHeader, BlockInfo
from cache_store.index import Entry
from cache_store.key import BlockKey
from cache_store.tier import Tier

log = logging.getLogger("cache_store")

T = TypeVar("T")
Files = list[tuple[BlockKey, bytes]]

_AHEAD = 4
_MAX_PENDING = 4096
# What is larger is none of ours, and is not read into memory.
_MAX_FILE_BYTES = 1 << 30
_SYNC_EVERY_S = 300.0


class Store(Protocol):
    """What is asked of the store; all of it concerns the local folder alone."""

    def info(self, key: BlockKey) -> BlockInfo | None: ...
    def entries(self) -> list[Entry]: ...
    def read_file(self, key: BlockKey) -> bytes: ...
    def write_file(self, key: BlockKey, raw: bytes, source: Path) -> bool: ...
    def remove_here(self, key: BlockKey) -> bool: ...


class Sharing:
    def __init__(self, store: Store, tier: Tier, shares_plain: bool = True) -> None:
        """shares_plain: whether blocks that are not encrypted go to the tier."""
        self._store, self._tier, self._shares_plain = store, tier, shares_plain
        self._changed = threading.Condition()
        self._pending: dict[BlockKey, None] = {}
        """Written here and not yet pushed, oldest first."""
        self._must_look = tier.push
        """Whether blocks may be stored here that neither are on the tier nor pending."""
        self._distrusted: set[BlockKey] = set()
        self._busy = self._closed = False
        self._down_until = 0.0
        self._told = False
        self._hanging: list[Future[Files]] = []
        if tier.push:
            threading.Thread(target=self._push_all, name="shared-tier", daemon=True).start()

    def pull(self, chain: Sequence[BlockKey], start: int) -> int:
        """Store the blocks that a chain goes on with, with what is attached to them; how many. Never raises.

        It ends at the first block that the tier does not have whole, or that finds no room here.
        start: how many of the chain are stored here.
        """
        self._hanging = [read for read in self._hanging if not read.done()]
        if self._hanging or time.monotonic() < self._down_until or chain[0] in self._distrusted:
            return 0
        keys = chain[start:]
        deadline = time.monotonic() + self._tier.request_s
        waiting, reads = iter(keys), deque[Future[Files]]()
        num_pulled = 0
        while True:
            # The first alone: most misses here are misses there.
            while len(reads) < (_AHEAD if num_pulled else 1) and (key := next(waiting, None)):
                reads.append(_in_background(partial(self._load, key)))
            left_s = deadline - time.monotonic()
            if not reads or left_s <= 0:
                return num_pulled
            try:
                files = reads[0].result(min(self._tier.answer_s, left_s))
            except TimeoutError:
                self._hanging += reads
                if left_s > self._tier.answer_s:
                    self._fail(TierDown(f"shared tier {self._tier}: no answer in {self._tier.answer_s} s"))
                return num_pulled
            except TierDown as error:
                self._fail(error)
                return num_pulled
            self._told = False
            reads.popleft()
            if not self._keep(keys[num_pulled], files):
                return num_pulled
            num_pulled += 1

    def distrust(self, root: BlockKey) -> None:
        """Pull no chain that begins so."""
        self._distrusted.add(root)

    def push(self, key: BlockKey) -> None:
        """Note that a block was stored here; it goes to the tier when its turn comes."""
        with self._changed:
            if not self._tier.push or key in self._pending:
                return
            if len(self._pending) < _MAX_PENDING:
                self._pending[key] = None
            else:
                self._must_look = True
            self._changed.notify_all()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until nothing is to be pushed; False where something is by then."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not (self._pending or self._must_look or self._busy), timeout_s
            )

    def close(self) -> None:
        """Push nothing more; what is under way ends by itself."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def remove(self, key: BlockKey, attached_to: BlockKey | None) -> None:
        """Delete a block with its attachments, or one attachment. Raises TierDown."""
        with self._changed:
            self._pending.pop(key, None)
        where = (attached_to, key) if attached_to else (key,)
        self._now(partial(self._tier.remove, *where))

    def remove_where(
        self, unwanted: Callable[[AnyHeader], bool], unwanted_here: Callable[[Entry], bool]
    ) -> set[BlockKey]:
        """Delete the blocks of which a file is unwanted or does not say what it is; which.

        Reads every header there is.

        unwanted_here: the same of what is stored here, so that it is neither pushed nor kept elsewhere.

        Raises TierDown, with what was deleted until then gone.
        """
        removed = set()
        for block in _in_time(self._tier.blocks, self._tier.request_s, self._tier):
            if self._now(partial(self._has, block, unwanted)):
                self._now(partial(self._tier.remove, block))
                removed.add(block)
        for entry in self._store.entries():
            if unwanted_here(entry) and not entry.attached:
                self.remove(entry.key, None)
        return removed

    def _has(self, block: BlockKey, unwanted: Callable[[AnyHeader], bool]) -> bool:
        try:
            files = self._tier.holds(block).items()
            return any(unwanted(self._tier.header(block, key, file_bytes)) for key, file_bytes in files)
        except BadBlock:
            return True

    def _now(self, call: Callable[[], T]) -> T:
        return _in_time(call, self._tier.answer_s, self._tier)

    def _load(self, block: BlockKey) -> Files:
        """A block's file, then those attached to it; none where the tier has no such block."""
        sizes = self._tier.holds(block)
        names = sorted((key for key in sizes if sizes[key] <= _MAX_FILE_BYTES), key=lambda key: key != block)
        if not names or names[0] != block:
            return []
        return [(key, self._tier.load(block, key)) for key in names]

    def _keep(self, block: BlockKey, files: Files) -> bool:
        """Make what came from the tier local, if it is what its names say; whether the block is stored."""
        stored = False
        for key, raw in files:
            try:
                kept = self._store.write_file(key, raw, Path(self._tier.path(block, key)))
            except BadBlock as error:
                log.warning("bad block on the shared tier: %s", error)
                kept = False
            if key == block:
                stored = kept
            if not stored:
                break
        return stored

    def _fail(self, error: Exception) -> None:
        self._down_until = time.monotonic() + self._tier.retry_s
        if not self._told:
            self._told = True
            log.warning("%s; left alone for %g s at a time until it answers", error, self._tier.retry_s)

    def _push_all(self) -> None:
        """The life of the pushing thread: deletions of others first, then what was stored here."""
        sync_at = 0.0
        while not self._closed:
            try:
                if time.monotonic() >= sync_at:
                    self._sync()
                    sync_at = time.monotonic() + _SYNC_EVERY_S
                for key, is_new in self._to_push():
                    if self._closed:
                        return
                    try:
                        self._push(key, is_new)
                    except BaseException:
                        if is_new:
                            self.push(key)
                        raise
                self._told = False
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._pending or self._must_look or self._closed,
                        max(sync_at - time.monotonic(), 0),
                    )
            except (TierDown, OSError) as error:  # OSError: of the local folder
                self._fail(error)
                with self._changed:
                    self._must_look = True
                    self._changed.wait_for(lambda: self._closed, self._tier.retry_s)

    def _to_push(self) -> Iterator[tuple[BlockKey, bool]]:
        """Blocks that may be missing on the tier, each with whether it was written by this process."""
        while True:
            with self._changed:
                # Out of the list before it is read: a better block written meanwhile is pushed again.
                key = next(iter(self._pending), None)
                look = key is None and self._must_look
                self._busy = key is not None or look
                if key:
                    del self._pending[key]
                elif look:
                    self._must_look = False
                else:
                    self._changed.notify_all()
                    return
            if key:
                yield key, True
                continue
            for entry in self._store.entries():
                with self._changed:
                    is_new = entry.key in self._pending
                    self._pending.pop(entry.key, None)
                yield entry.key, is_new

    def _push(self, key: BlockKey, is_new: bool) -> None:
        """Put a block on the tier where it has none as good; nothing where it is gone here or bad.

        What this process wrote replaces what is there, for that was no hit; a continued block replaces
        nothing.
        """
        info = self._store.info(key)
        if info is None or not (info.is_sealed or self._shares_plain):
            return
        block = info.parent if info.parent and not info.num_tokens else key
        there = self._tier.holds(block).get(key)
        if there == info.file_bytes and not (is_new and info.exact):
            return
        try:
            raw = self._store.read_file(key)
        except BadBlock:
            return
        if is_new:
            self._tier.forget_removed(block)
        self._tier.save(block, key, raw)
        # Deleted here or elsewhere meanwhile: deletion wins. Evicted meanwhile looks alike, and costs a copy.
        if self._store.info(key) is None or block in self._tier.removed():
            self._tier.remove(block, key)

    def _sync(self) -> None:
        """Delete here what was deleted elsewhere, unless it was computed here since."""
        self._tier.tidy()
        removed = self._tier.removed()
        if not removed:
            return
        for entry in self._store.entries():
            with self._changed:
                is_new = entry.key in self._pending
            owner = entry.parent if entry.attached else entry.key
            if owner in removed and not is_new:
                self._store.remove_here(entry.key)


def _in_background(call: Callable[[], T]) -> Future[T]:
    """Run a call in a thread that no exit waits for: a share that hangs may hang for ever."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="shared-tier-read", daemon=True).start()
    return future


def _in_time(call: Callable[[], T], limit_s: float, tier: Tier) -> T:
    try:
        return _in_background(call).result(limit_s)
    except TimeoutError:
        raise TierDown(f"shared tier {tier}: no answer in {limit_s} s; try again") from None
