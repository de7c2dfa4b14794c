"""Events on their way to the stream: kept in order in memory until Redis has them, each exactly once."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Any, cast

from redis import Redis
from redis.exceptions import RedisError

from jobs import EVENT_STREAM, Event

log = logging.getLogger("worker.outbox")

MAX_BATCH = 64
MAX_PAUSE_S = 2.0


class Outbox:
    """Sends from its own thread, so that a job never waits for Redis.

    Each batch is one transaction that also writes how many events this worker has sent. After a
    connection breaks, that number says whether the last batch arrived: a delta is never sent twice.
    """

    def __init__(self, redis: Redis, worker: str) -> None:
        self._redis = redis
        self._key = f"longleaf:sent:{worker}"
        self._waiting: deque[str] = deque()
        self._num_sent = 0
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        with self._changed:
            self._waiting.append(event.model_dump_json())
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all is sent; False if it is not after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Send what is left and stop; False if something could not be sent."""
        done = self.flush(timeout_s)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(1.0)
        return done

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if self._closing:
                    return
                batch = [self._waiting[i] for i in range(min(MAX_BATCH, len(self._waiting)))]
            self._deliver(batch)
            with self._changed:
                for _ in batch:
                    self._waiting.popleft()
                self._num_sent += len(batch)
                self._changed.notify_all()

    def _deliver(self, batch: list[str]) -> None:
        total = self._num_sent + len(batch)
        pause_s, unsure = 0.1, False
        while not self._closing:
            try:
                if unsure and int(cast(Any, self._redis.get(self._key)) or 0) == total:
                    return
                with self._redis.pipeline(transaction=True) as pipe:
                    for event in batch:
                        pipe.xadd(EVENT_STREAM, {"event": event})
                    pipe.set(self._key, total, ex=24 * 3600)
                    pipe.execute()
                return
            except RedisError as error:
                if not unsure:
                    log.warning("Redis does not take events (%s); they wait in memory", error)
                unsure = True
                time.sleep(pause_s)
                pause_s = min(pause_s * 2, MAX_PAUSE_S)
