"""What a key may use up: requests in a minute, its tenant's waiting jobs, its tenant's bytes of documents.

The numbers lie with the key; jobs and bytes are counted in the database, inside the transaction that would
add one. Requests are counted here, in this process, and begin anew with it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from api.problems import ApiError


@dataclass(frozen=True, slots=True)
class Limits:
    """None is no limit."""

    requests_per_minute: int | None = None
    max_queued_jobs: int | None = None
    max_document_bytes: int | None = None


NO_LIMITS = Limits()
QUEUE_RETRY_S = 30


class OverLimit(Exception):
    """What a store raises where one more would be too many; nothing was written."""

    def __init__(self, limit: int, value: int) -> None:
        super().__init__(f"{value} of {limit}")
        self.limit = limit
        self.value = value


class RequestRates:
    """A bucket for each key, that holds a minute's requests and is filled as the minute goes by."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: dict[str, tuple[float, float]] = {}
        """By key: what was in it, and when that was."""

    def take(self, key_id: str, per_minute: int) -> None:
        """Count one request. Raises ApiError 429 with the seconds until the next one is let in."""
        now = self._clock()
        with self._lock:
            held, at = self._buckets.get(key_id, (float(per_minute), now))
            held = min(float(per_minute), held + (now - at) * per_minute / 60)
            is_full = held < 1
            self._buckets[key_id] = (held if is_full else held - 1, now)
        if is_full:
            wait_s = max(1, math.ceil((1 - held) * 60 / per_minute))
            raise ApiError(
                429,
                "rate_limited",
                f"this key may send {per_minute} requests in a minute and they are used up; the next one "
                f"is let in after {wait_s} s: wait with ?wait= or the event stream instead of polling, or "
                "use a key with a higher --requests-per-minute",
                headers={"Retry-After": str(wait_s)},
                params={"limit": per_minute, "retry_after_s": wait_s},
            )


def too_many_jobs(error: OverLimit) -> ApiError:
    return ApiError(
        429,
        "too_many_jobs",
        f"{error.value} jobs are queued and this key allows {error.limit}: wait until some have started, "
        "cancel some, or use a key with a higher --max-queued-jobs",
        headers={"Retry-After": str(QUEUE_RETRY_S)},
        params={"limit": error.limit, "value": error.value},
    )


def too_many_bytes(error: OverLimit) -> ApiError:
    return ApiError(
        429,
        "too_many_bytes",
        f"the documents have {error.value} bytes with this one and this key allows {error.limit}: delete "
        "some (DELETE /v1/documents/{id}), or use a key with a higher --max-document-bytes",
        headers={"Retry-After": str(QUEUE_RETRY_S)},
        params={"limit": error.limit, "value": error.value},
    )
