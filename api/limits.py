"""What a key may use up: requests in a minute, its tenant's waiting jobs, its tenant's bytes of documents.

The numbers lie with the key; jobs and bytes are counted in the database, inside the transaction that would
add one, and requests in rates.py.
"""

from __future__ import annotations

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
