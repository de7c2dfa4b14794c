"""The event stream into the database: one task, each entry applied once, then acknowledged.

An entry is applied and committed before it is acknowledged, so a crash between the two delivers
it again and the store recognises it. Nothing that a worker writes can stall the stream: what
cannot be understood is logged and acknowledged. Only a database that refuses writes holds it up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import anyio
import anyio.to_thread
from pydantic import ValidationError
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError
from sqlalchemy.exc import OperationalError

from api.queue import JobQueue
from api.store import JobStore
from api.worker_events import BadEvent
from jobs import EVENT_GROUP, EVENT_STREAM, Event

log = logging.getLogger(__name__)

CONSUMER = "api"
BATCH = 64
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
            for entry in entries:
                await self._record(entry)
            if start == b"0-0":
                return

    async def _record_new(self) -> None:
        answer: Any = await self._redis.xreadgroup(
            EVENT_GROUP, CONSUMER, {EVENT_STREAM: ">"}, count=BATCH, block=BLOCK_MS
        )
        for _stream, entries in answer or ():
            for entry in entries:
                await self._record(entry)

    async def _record(self, entry: Entry) -> None:
        entry_id, fields = entry
        try:
            await self._apply(entry_id.decode(), fields)
        except (BadEvent, ValidationError, KeyError) as error:
            log.warning("event %s is dropped: %s", entry_id.decode(), error)
        except Exception:
            log.exception("event %s is dropped: it could not be applied", entry_id.decode())
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.xack(EVENT_STREAM, EVENT_GROUP, entry_id)
            pipe.xdel(EVENT_STREAM, entry_id)
            await pipe.execute()

    async def _apply(self, entry_id: str, fields: Mapping[bytes, bytes]) -> None:
        event = Event.model_validate_json(fields[b"event"])
        failures = 0
        while True:
            try:
                job = await anyio.to_thread.run_sync(self._store.apply, event, entry_id, limiter=self._thread)
                break
            except OperationalError as error:
                # Locked or full: dropping the entry would lose a result, so the stream waits.
                log.error("event %s waits for the database: %s", entry_id, error.orig)
                await asyncio.sleep(RETRY_S[min(failures, len(RETRY_S) - 1)])
                failures += 1
        if job is not None:
            await anyio.to_thread.run_sync(self._queue.try_follow, job, limiter=self._thread)
