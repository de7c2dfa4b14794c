"""How many requests a key has left: a bucket that holds a minute's, and is filled as the minute goes by.

The buckets are in Redis, where every API host finds the same ones. While Redis is away each host has its own.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import cast

from redis import Redis
from redis.exceptions import RedisError

from api.problems import ApiError

log = logging.getLogger(__name__)

RATE_KEY = "longleaf:rate:"
AWAY_S = 5.0
"""For how long Redis is not asked after it gave no answer: a request must not hang because it does."""
_TAKE = """
local time, per_minute = redis.call('TIME'), tonumber(ARGV[1])
local now = time[1] + time[2] / 1e6
local kept = redis.call('HMGET', KEYS[1], 'held', 'at')
local held, at = tonumber(kept[1]) or per_minute, tonumber(kept[2]) or now
held = math.min(per_minute, held + math.max(0, now - at) * per_minute / 60)
local wait_s = 0
if held < 1 then wait_s = (1 - held) * 60 / per_minute else held = held - 1 end
redis.call('HSET', KEYS[1], 'held', held, 'at', now)
redis.call('EXPIRE', KEYS[1], 60)
return tostring(wait_s)
"""
"""Take one out of a bucket, which is full after a minute, as is one that is not there. Gives the seconds
until there is one to take, 0 where one was taken."""


class RequestRates:
    def __init__(self, redis: Redis, clock: Callable[[], float] = time.monotonic) -> None:
        self._take = redis.register_script(_TAKE)
        self._clock = clock
        self._away_until = float("-inf")
        self._lock = threading.Lock()
        self._own: dict[str, tuple[float, float]] = {}
        """By key: what was in its bucket, and when that was."""

    def take(self, key_id: str, per_minute: int) -> None:
        """Count one request. Raises ApiError 429 with the seconds until the next one is let in."""
        missing_s = self._wait_s(key_id, per_minute)
        if missing_s <= 0:
            return
        wait_s = max(1, math.ceil(missing_s))
        raise ApiError(
            429,
            "rate_limited",
            f"this key may send {per_minute} requests in a minute and they are used up; the next one "
            f"is let in after {wait_s} s: wait with ?wait= or the event stream instead of polling, or "
            "use a key with a higher --requests-per-minute",
            headers={"Retry-After": str(wait_s)},
            params={"limit": per_minute, "retry_after_s": wait_s},
        )

    def _wait_s(self, key_id: str, per_minute: int) -> float:
        if self._clock() >= self._away_until:
            try:
                return float(cast(bytes, self._take(keys=[RATE_KEY + key_id], args=[per_minute])))
            except (RedisError, OSError) as error:
                log.warning("requests are counted by this host alone, Redis answers: %s", error)
                self._away_until = self._clock() + AWAY_S
        return self._own_wait_s(key_id, per_minute)

    def _own_wait_s(self, key_id: str, per_minute: int) -> float:
        now = self._clock()
        with self._lock:
            held, at = self._own.get(key_id, (float(per_minute), now))
            held = min(float(per_minute), held + (now - at) * per_minute / 60)
            is_there = held >= 1
            self._own[key_id] = (held - 1 if is_there else held, now)
        return 0.0 if is_there else (1 - held) * 60 / per_minute
