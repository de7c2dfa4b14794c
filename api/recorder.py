"""The event stream into the database: one task, each entry applied once, then acknowledged.

What is read together is applied in one transaction, and committed before it is acknowledged: a crash
between the two delivers it again, and the store recognises it. Nothing that a worker writes can stall the
stream: a batch with an entry that cannot be applied is undone and applied entry by entry, and that entry
is logged and acknowledged. Only a database that refuses writes holds it up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import anyio.to_thread
from pydantic import ValidationError
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError
from sqlalchemy.exc import InterfaceError, InternalError, OperationalError

from api.queue import JobQueue
from api.store import JobStore
from api.worker_events import BadEvent
from jobs import EVENT_GROUP, EVENT_STREAM, Event

log = logging.getLogger(__name__)

CONSUMER = "api"
BATCH = 64
"""Entries of one transaction at most: the requests that write wait that long."""
BLOCK_MS = 2000
RETRY_S = (0.1, 0.5, 1.0, 2.0)

Entry = tuple[bytes, Mapping[bytes, bytes]]


class Recorder:
    def __init__(self, redis: Redis, store: JobStore, queue: JobQueue) -> None:
        self._redis = redis
        self._store = store
        self._queue = queue
        # A thread of its own: slow uploads may take all the others.
        self._thread = anyio.CapacityLimiter(1)

    async def run(self) -> None:
        """Record until cancelled, through any outage of Redis."""
        failures = 0
        while True:
            try:
                await self._open_group()
                await self._record_pending()
                while True:
                    await self._record_new()
                    failures = 0
            except (RedisError, OSError) as error:
                wait_s = RETRY_S[min(failures, len(RETRY_S) - 1)]
                if failures == 0:
                    log.warning("events are not read, Redis answers: %s", error)
                failures += 1
                await asyncio.sleep(wait_s)

    async def _open_group(self) -> None:
        try:
            # From 0: what workers wrote before the group existed counts too.
            await self._redis.xgroup_create(EVENT_STREAM, EVENT_GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    async def _record_pending(self) -> None:
        """What was delivered before, to us or to a recorder that is gone, and never acknowledged."""
        start: bytes | str = "0-0"
        while True:
            answer: Any = await self._redis.xautoclaim(
                EVENT_STREAM, EVENT_GROUP, CONSUMER, min_idle_time=0, start_id=start, count=BATCH
            )
            start = answer[0]
            entries: list[Entry] = answer[1]
            await self._record(entries)
            if start == b"0-0":
                return

    async def _record_new(self) -> None:
        answer: Any = await self._redis.xreadgroup(
            EVENT_GROUP, CONSUMER, {EVENT_STREAM: ">"}, count=BATCH, block=BLOCK_MS
        )
        for _stream, entries in answer or ():
            await self._record(entries)

    async def _record(self, entries: Sequence[Entry]) -> None:
        if not entries:
            return
        events = [(event, name) for event, name in map(_parsed, entries) if event is not None]
        try:
            await self._apply(events)
        except Exception as error:
            log.info("%d events are applied one by one, since together: %s", len(events), error)
            for event in events:
                await self._apply_or_drop(event)
        ids = [entry_id for entry_id, _ in entries]
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.xack(EVENT_STREAM, EVENT_GROUP, *ids)
            pipe.xdel(EVENT_STREAM, *ids)
            await pipe.execute()

    async def _apply_or_drop(self, event: tuple[Event, str]) -> None:
        try:
            await self._apply([event])
        except BadEvent as error:
            log.warning("event %s is dropped: %s", event[1], error)
        except Exception:
            log.exception("event %s is dropped: it could not be applied", event[1])

    async def _apply(self, events: Sequence[tuple[Event, str]]) -> None:
        failures = 0
        while True:
            try:
                jobs = await anyio.to_thread.run_sync(self._store.apply, events, limiter=self._thread)
                break
            except (OperationalError, InterfaceError, InternalError) as error:
                # Away, locked, full or read-only: dropping an entry would lose a result; the stream waits.
                log.error("%d events wait for the database: %s", len(events), error.orig)
                await asyncio.sleep(RETRY_S[min(failures, len(RETRY_S) - 1)])
                failures += 1
        for job in jobs:
            await anyio.to_thread.run_sync(self._queue.try_follow, job, limiter=self._thread)


def _parsed(entry: Entry) -> tuple[Event | None, str]:
    """The event of an entry, None where it holds none, and the entry's id."""
    entry_id, fields = entry
    name = entry_id.decode()
    try:
        return Event.model_validate_json(fields[b"event"]), name
    except (ValidationError, KeyError) as error:
        log.warning("event %s is dropped: %s", name, error)
        return None, name
