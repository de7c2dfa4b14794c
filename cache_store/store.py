"""The snapshot store: blocks of KV under content keys, and which of them a chain of tokens may use.

Owns what a block means to its chain: matching, confirming, replacing. The folder's files, its budget and
its bad blocks are `folder.py`'s. It knows no model and not what the bytes mean.
"""

from __future__ import annotations

import os
import secrets
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cache_store import block
from cache_store.block import Section
from cache_store.checkpoints import Checkpoints
from cache_store.errors import BadBlock, KeyringError, NoKey, UnknownVersion
from cache_store.files import Contents, read_at
from cache_store.folder import Folder
from cache_store.header import AnyHeader, BlockInfo, Header, SealedHeader
from cache_store.index import Entry, text_in
from cache_store.key import BlockKey, TokenIds, as_token_ids
from cache_store.keyring import Keyring
from cache_store.quarantine import is_encrypted, tenant_of
from cache_store.sharing import Sharing
from cache_store.tier import Tier

# Half of them by a second thread: one core copies while another one hashes.
_NUM_AHEAD = 4


class SnapshotStore:
    """Blocks of KV in a folder, under a byte budget.

    folder: made if absent; one that cannot be written is used for reading only.
    budget_bytes: blocks, unfinished files and quarantine together, each rounded up to 4096, never exceed it
        (where it was lowered below what is pinned, nothing is written any more).
    min_free_bytes: a write that would leave less than this free on the disk evicts first, or is not made.
    quarantine_bytes: bad blocks kept to be looked at, oldest removed first (at most a tenth of the budget).
    touch_every_s: a block's use is noted on disk at most this often.
    tier: a place that several stores share: what is stored here goes there, and what is missing here is
        looked for there.
    keyring: the tenants' keys: what is stored is encrypted with them, and readable as long as they are there.
        What was stored without one stays readable.
    """

    def __init__(
        self,
        folder: Path,
        budget_bytes: int,
        min_free_bytes: int = 1 << 30,
        *,
        quarantine_bytes: int = 64 << 20,
        touch_every_s: float = 60.0,
        tier: Tier | None = None,
        keyring: Keyring | None = None,
    ) -> None:
        if budget_bytes < 0 or min_free_bytes < 0:
            raise ValueError(
                f"budget {budget_bytes} and free-disk floor {min_free_bytes} must not be negative"
            )
        self._folder = Folder(folder, budget_bytes, min_free_bytes, quarantine_bytes, touch_every_s, keyring)
        self._checkpoints = Checkpoints(self._folder)
        if not self.read_only:
            with suppress(OSError):  # the next start tries again
                self._checkpoints.remove_expired()
        self._sharing = Sharing(self, tier, shares_plain=keyring is None) if tier else None

    @property
    def folder(self) -> Path:
        return self._folder.root

    @property
    def checkpoints(self) -> Checkpoints:
        """The scratch of prefills that are under way, beside the blocks and under the same budget."""
        return self._checkpoints

    @property
    def read_only(self) -> bool:
        """Whether the folder could not be written at the start."""
        return self._folder.read_only

    @property
    def total_bytes(self) -> int:
        """Disk bytes that count against the budget, other processes' files included. May raise OSError."""
        with self._folder.mutex:
            self._folder.refresh()
            return self._folder.index.total_bytes

    def salt(self, tenant: str, salt: bytes) -> bytes:
        """What the chains of keys of a tenant begin with here: `salt`, or with a keyring a secret made of it.

        Without the tenant's key, which is made where there is none, the name of no document can be tried.
        Where the key cannot be had it is a salt that nothing else has: nothing is found, and nothing stored.
        """
        if self._folder.keyring is None:
            return salt
        try:
            return self._folder.keyring.make(tenant).names(salt)
        except KeyringError as error:
            self._folder.report(None, f"nothing is restored or stored: {error}")
            return secrets.token_bytes(32)

    def entries(self) -> list[Entry]:
        """The stored blocks, in no order. Raises OSError where the folder cannot be listed."""
        with self._folder.mutex:
            self._folder.refresh()
            return list(self._folder.index.entries.values())

    def readable(self, entries: Iterable[Entry]) -> set[BlockKey]:
        """Those of the blocks that are plain, or whose key is here."""
        keyring, ids = self._folder.keyring, dict[str, bytes]()
        found = set()
        for entry in entries:
            if entry.key_id and entry.tenant not in ids:
                key = keyring.get(entry.tenant) if keyring else None
                ids[entry.tenant] = key.id if key else b""
            if not entry.key_id or entry.key_id == ids[entry.tenant]:
                found.add(entry.key)
        return found

    def match(self, keys: Sequence[BlockKey], blocks: Sequence[npt.NDArray[Any]]) -> int:
        """How many leading blocks of a chain are stored; marks them used.

        Each is confirmed on its token ids and its parent; one that differs goes to quarantine. Where the
        chain ends in this folder, the shared tier is asked for more of it, within the tier's times.
        keys, blocks: as given to and by chain_keys, from the root of the chain on.
        """
        num_local = self._match(keys, blocks, 0)
        # What is attached to a block comes with it: there is nothing to ask for.
        may_go_on = num_local < len(keys) and len(blocks[num_local]) > 0
        if self._sharing and may_go_on and self._sharing.pull(keys, num_local):
            return self._match(keys, blocks, num_local)
        return num_local

    def _match(self, keys: Sequence[BlockKey], blocks: Sequence[npt.NDArray[Any]], start: int) -> int:
        """As `match`, of this folder alone; the blocks before `start` are known to be there."""
        for position, (key, ids) in enumerate(zip(keys, blocks, strict=True)):
            wanted = as_token_ids(ids)
            if position < start:
                continue
            try:
                with self._folder.reading(key) as (fd, header):
                    if position and header.prelude.parent != keys[position - 1]:
                        raise BadBlock(header.path, "parent", keys[position - 1], header.prelude.parent)
                    _confirm(header, wanted)
                    self._folder.touch(key, fd)
            except BadBlock:
                return position
        return len(keys)

    def info(self, key: BlockKey) -> BlockInfo | None:
        """What the block's header says; None for a miss. Reads no payload."""
        try:
            return self.header_of(key)
        except BadBlock:
            return None

    def header_of(self, key: BlockKey) -> BlockInfo:
        """As `info`, but raises what is wrong: MissingBlock or another BadBlock."""
        with self._folder.reading(key) as (_, header):
            return header.info

    def read(self, key: BlockKey, into: Sequence[memoryview]) -> BlockInfo:
        """Fill one buffer per section, in the order they were written, and check every byte.

        into: writable contiguous buffers of exactly the sections' sizes; after an error their contents
        are undefined. Raises BadBlock (MissingBlock where there is no file): the block is a miss from
        then on. Raises ValueError for a buffer that cannot be written.
        """
        views = block.writable_bytes(into)
        with self._folder.reading(key) as (fd, header):
            info = header.info
            block.read_payload(fd, header, views)
            return info

    def read_each(
        self, keys: Sequence[BlockKey], into: Iterable[Sequence[memoryview]]
    ) -> Generator[BlockInfo, None, None]:
        """Read blocks as `read` does, some at a time ahead of the caller, and give them in order.

        into: the buffers of each block; asked for shortly before they are filled. Raises what `read`
        raises, at the block that is bad; the buffers from that block on are undefined then. Close it before
        the buffers are used where it was not read to its end.
        """
        pool = ThreadPoolExecutor(1, "snapshots")
        ahead: deque[Callable[[], BlockInfo]] = deque()
        try:
            for index, (key, buffers) in enumerate(zip(keys, into, strict=True)):
                # The caller's own thread reads every other block, when its turn has come.
                here = partial(self.read, key, buffers)
                ahead.append(pool.submit(here).result if index % 2 else here)
                if len(ahead) > _NUM_AHEAD:
                    yield ahead.popleft()()
            while ahead:
                yield ahead.popleft()()
        finally:
            # No thread may still write into the buffers once the caller has control of them again.
            pool.shutdown(cancel_futures=True)

    def write(
        self,
        key: BlockKey,
        parent: BlockKey | None,
        tokens: npt.NDArray[Any],
        sections: Sequence[Section],
        exact: bool,
        meta: Mapping[str, Any],
    ) -> bool:
        """Store a block, all of it or nothing; True if it is stored now, durably.

        A block that is already there is not written again, except that an exact one replaces a
        continued one. Of the metadata the store itself reads `model`, `tenant` (texts) and `prefill_s`
        (what computing this block took: a block is worth its seconds per byte).
        False where budget or free-disk floor cannot be held, the parent is not stored, the folder is
        read-only, a newer format version holds the place, its tenant has no key, or the disk fails
        (logged once per kind of failure).
        Raises ValueError for sections or metadata that do not fit the format; no OSError.
        """
        ids = as_token_ids(tokens)
        try:
            contents = self._folder.contents(key, parent, ids, sections, exact, meta)
        except NoKey as error:
            self._folder.report(None, f"snapshot not stored: {error}")
            return False
        stored = self._write(key, parent, ids, contents, exact)
        if stored and self._sharing:
            self._sharing.push(key)
        return stored

    def read_file(self, key: BlockKey) -> bytes:
        """The whole file of a block, every byte checked. Raises BadBlock as `read` does."""
        with self._folder.reading(key) as (fd, header):
            buffer = bytearray(header.file_bytes)
            raw = bytes(memoryview(buffer)[: read_at(fd, [memoryview(buffer)], 0)])
            block.check(raw, header.path, self._folder.keyring)
            return raw

    def write_file(self, key: BlockKey, raw: bytes, source: Path) -> bool:
        """Store the file of a block that lay elsewhere, byte for byte; True if it is stored now.

        source: what errors call it. False as for `write`; raises BadBlock where it is no whole block of
        this key, where its tenant's key is not here, and with a keyring where it is not encrypted. It is not
        pushed to the shared tier: what is found here at a start is.
        """
        header = block.check(raw, source, self._folder.keyring)
        prelude = header.prelude
        if self._folder.keyring and header.seal is None:
            raise BadBlock(source, "block file", "an encrypted one", "a plain one")
        if prelude.key != key:
            raise BadBlock(source, "key", key, prelude.key)
        contents = Contents(len(raw), [[memoryview(raw)]])
        return self._write(key, prelude.parent, header.token_ids, contents, prelude.exact)

    def _write(
        self, key: BlockKey, parent: BlockKey | None, ids: TokenIds, contents: Contents, exact: bool
    ) -> bool:
        if self.read_only:
            return False

        def answer() -> bool | None:
            if parent and not os.path.lexists(self._folder.index.path(parent)):
                return False  # no match could ever reach it
            return self._stored(key, ids, exact)

        try:
            stored = self._stored(key, ids, exact)
            if stored is None:
                keep = {key, parent} if parent else {key}
                stored = self._folder.place(self._folder.index.path(key), contents, keep, answer)
            return stored
        except OSError as error:
            self._folder.report(error.errno, f"snapshot {key} was not stored: {error}")
            return False

    def pin(self, key: BlockKey) -> None:
        """Keep a block and every block before it from eviction, in every process, until `unpin`.

        A block that is not stored yet is pinned once it is. Raises OSError where the folder cannot be
        written.
        """
        with self._folder.locked():
            self._folder.pins.add(key)

    def unpin(self, key: BlockKey) -> bool:
        """Let a block be evicted again; False where it was not pinned."""
        with self._folder.locked():
            return self._folder.pins.remove(key)

    def pins(self) -> set[BlockKey]:
        """The keys that were pinned; the blocks before them are pinned with them."""
        return self._folder.pins.keys()

    def remove(self, key: BlockKey) -> bool:
        """Delete a block and its pin; False if it is not there. Descendants stay until they are evicted.

        From the shared tier it goes first: TierDown where that cannot be reached, and nothing is deleted.
        """
        if self._sharing:
            info = self.info(key)
            self._sharing.remove(key, info.parent if info and not info.num_tokens else None)
        return self.remove_here(key)

    def remove_here(self, key: BlockKey) -> bool:
        """As `remove`, from this folder alone."""
        with self._folder.locked():
            self._folder.pins.remove(key)
            return self._folder.remove(self._folder.index.path(key))

    def distrust(self, root: BlockKey) -> None:
        """Take no chain with this first block from the shared tier, as long as this store is open.

        What is computed instead replaces what is there.
        """
        if self._sharing:
            self._sharing.distrust(root)

    def wait_pushed(self, timeout_s: float | None = None) -> bool:
        """Wait until the shared tier has all that is stored here; False where it has not by then."""
        return self._sharing is None or self._sharing.wait(timeout_s)

    def close(self) -> None:
        """End what the store does in the background: it pushes nothing to its tier any more."""
        if self._sharing:
            self._sharing.close()

    def remove_tenant(self, tenant: str) -> int:
        """Delete every block, pin and checkpoint of a tenant, and its bad blocks; how many blocks went.

        Its key goes first: whatever else happens, what it encrypted is unreadable from then on. A
        quarantined file or a checkpoint that does not say whose it is goes too. A write that another process
        has begun may still come after. From the shared tier they go before they go here: TierDown where that
        cannot be reached. Raises OSError where a file cannot be removed.
        """
        if self._folder.keyring:
            self._folder.keyring.remove(tenant)
        return self._remove_where(
            lambda header: text_in(header.meta, "tenant") == tenant,
            lambda entry: entry.tenant == tenant,
            lambda path: tenant_of(path) in (tenant, None),
        )

    def remove_plain(self) -> int:
        """Delete every block that is not encrypted, with its pin; how many went.

        What lies in quarantine or belongs to a checkpoint, and does not say that it is encrypted, goes too.
        From the shared tier as `remove_tenant`, whoever put it there; raises what that raises.
        """
        return self._remove_where(
            lambda header: not isinstance(header, SealedHeader),
            lambda entry: not entry.key_id,
            lambda path: not is_encrypted(path),
        )

    def _remove_where(
        self,
        unwanted: Callable[[AnyHeader], bool],
        unwanted_here: Callable[[Entry], bool],
        unwanted_apart: Callable[[Path], bool],
    ) -> int:
        """Delete from the tier, then blocks, bad blocks and checkpoints here.

        How many blocks went: one that lay here and there counts once.
        """
        there = self._sharing.remove_where(unwanted, unwanted_here) if self._sharing else set()
        with self._folder.locked():
            self._folder.refresh()
            here = {entry.key for entry in self._folder.index.entries.values() if unwanted_here(entry)}
            for key in here:
                self.remove_here(key)
            self._folder.remove_apart(unwanted_apart)
        return len(here | there)

    def _stored(self, key: BlockKey, ids: TokenIds, exact: bool) -> bool | None:
        """True: the disk holds this block or a better one. False: it may not be replaced. None: write it."""
        try:
            with self._folder.reading(key) as (fd, header):
                _confirm(header, ids)
                if exact and not header.prelude.exact:
                    return None
                self._folder.touch(key, fd)
                return True
        except UnknownVersion as error:
            self._folder.report(None, f"snapshot not stored: {error}")
            return False
        except BadBlock:
            return None


def _confirm(header: Header, wanted: TokenIds) -> None:
    if not np.array_equal(header.token_ids, wanted):
        raise BadBlock(header.path, "token ids", wanted[:8].tolist(), header.token_ids[:8].tolist())
