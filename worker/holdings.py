"""Tells through Redis which prefixes lie in this worker's data folder, and does what is asked about one.

It has a thread and a look at the store of its own: neither a job nor the presence waits for a large folder.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, cast

from pydantic import ValidationError
from redis import Redis
from redis.exceptions import RedisError

from cache_store import BlockKey, CacheStoreError, SnapshotStore, StoredPrefix, remove_prefix, stored_prefixes
from jobs.prefixes import HeldPrefix, Holdings, PrefixCommand, commands_key, holdings_key

log = logging.getLogger("worker.holdings")

LIST_EVERY_S = 10.0
EXPIRY_S = 35
MAX_PREFIXES = 500
"""Of one listing; the last used ones."""
NO_BUDGET = 1 << 62
"""To look at a store is to evict nothing of it."""


class HoldingsReport:
    def __init__(self, redis: Redis, worker: str, open_store: Callable[[], SnapshotStore]) -> None:
        self._redis = redis
        self._worker = worker
        self._open_store = open_store
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdings", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listing; the listing is removed."""
        self._closing.set()
        self._thread.join(3.0)

    def _run(self) -> None:
        store: SnapshotStore | None = None
        listed_at = float("-inf")
        while not self._closing.is_set():
            try:
                store = store or self._open_store()
                if time.monotonic() - listed_at >= LIST_EVERY_S:
                    listing = listed(store, self._worker)
                    self._redis.set(holdings_key(self._worker), listing.model_dump_json(), ex=EXPIRY_S)
                    listed_at = time.monotonic()
                answer = cast(Any, self._redis.blpop([commands_key(self._worker)], timeout=1))
                if answer is not None:
                    obey(store, answer[1])
                    listed_at = float("-inf")
            except (RedisError, OSError, CacheStoreError) as error:
                log.debug("the stored prefixes are not listed: %s", error)
                self._closing.wait(1.0)
        try:
            self._redis.delete(holdings_key(self._worker))
        except RedisError as error:
            log.debug("the listing of prefixes is not removed, it expires in %d s: %s", EXPIRY_S, error)


def listed(store: SnapshotStore, worker: str) -> Holdings:
    """What a store holds. Raises OSError where its folder cannot be listed."""
    found = [prefix for prefix in stored_prefixes(store) if prefix.whole and prefix.readable]
    return Holdings(
        worker=worker,
        prefixes=[_held(prefix) for prefix in found[:MAX_PREFIXES]],
        num_left_out=max(0, len(found) - MAX_PREFIXES),
    )


def obey(store: SnapshotStore, raw: bytes) -> None:
    """Do one command, where the prefix is there and its owner's. Raises OSError and CacheStoreError."""
    try:
        command = PrefixCommand.model_validate_json(raw)
        if command.op == "forget":
            log.info(
                "%d blocks of the owner %r are forgotten", store.remove_tenant(command.owner), command.owner
            )
            return
        key = BlockKey.from_hex(command.id)
    except (ValidationError, ValueError) as error:
        log.warning("a command about a prefix is dropped: %s", error)
        return
    prefix = next((p for p in stored_prefixes(store) if p.key == key and p.tenant == command.owner), None)
    if prefix is None:
        log.info("%s %s: it is not here", command.op, key)
    elif command.op == "pin":
        store.pin(key)
    elif command.op == "unpin":
        store.unpin(key)
    elif prefix.pinned:
        log.info("%s is pinned and stays", key)
    else:
        remove_prefix(store, key)


def _held(prefix: StoredPrefix) -> HeldPrefix:
    return HeldPrefix(
        id=prefix.key.hex,
        model=prefix.model,
        owner=prefix.tenant,
        num_tokens=prefix.num_tokens,
        disk_bytes=prefix.disk_bytes,
        own_bytes=prefix.own_bytes,
        prefill_s=round(prefix.prefill_s, 3),
        used_at=prefix.used_ns / 1e9,
        pinned=prefix.pinned,
    )
