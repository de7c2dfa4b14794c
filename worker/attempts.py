"""Takes the next attempt for a worker out of the queues in Redis; the order is that of `jobs.dispatch`.

It waits on one list alone, its own queue: with several, a worker that dies in a pop loses what it popped.
"""

from __future__ import annotations

import logging
from typing import Any, cast

from redis import Redis

from jobs import queue_name
from jobs.dispatch import TAKE, own_key, shared_key

log = logging.getLogger("worker.attempts")

WAIT_S = 0.5
"""Between two looks at what others' queues have; what comes for this worker is there at once."""


class Attempts:
    def __init__(self, redis: Redis, model: str, worker: str, patience_s: float) -> None:
        """`patience_s`: how long an attempt waits for the worker that holds its documents."""
        self._redis = redis
        self._queue = queue_name(model)
        self._own = own_key(model, worker)
        self._taken = shared_key(model) + ":intermediate"
        self._worker = worker
        self._patience_s = patience_s
        self._take = redis.register_script(TAKE)

    def take(self) -> str | None:
        """The RQ id of the next attempt, None where none came in `WAIT_S`. Raises RedisError."""
        seconds, micros = cast(Any, self._redis.time())
        now = seconds + micros / 1e6
        found = cast(Any, self._take(args=[self._queue, now, self._worker, self._patience_s]))
        if found is None:
            came = self._redis.blmove(self._own, self._taken, cast(int, WAIT_S), "LEFT", "RIGHT")
            return None if came is None else _name(cast(bytes, came))
        rq_id, whose, is_there = _name(found[0]), _name(found[1]), found[2]
        if whose not in ("", self._worker):
            log.info("%s waited %s %s", rq_id, "too long for" if is_there else "for the gone", whose)
        return rq_id


def _name(raw: bytes) -> str:
    """One that is no text names no attempt, which is for the caller to find out."""
    return raw.decode(errors="replace")
