"""The header Idempotency-Key: which keys there are, and what makes two bodies the same one.

It knows requests and refusals; that a key belongs to one job alone is the database's to ensure.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from api.problems import ApiError
from api.store import KeyReused
from jobs import JobSpec

HEADER = "Idempotency-Key"
REPLAYED = {"Idempotent-Replayed": "true"}
"""On an answer with a job that an earlier request made."""
MAX_CHARS = 255


def checked_key(given: list[str]) -> str | None:
    """The key of a request, from the values of its header; None without one.

    Raises:
        ApiError: 422 for a key that is empty, too long, not printable, or not the only one.
    """
    if not given:
        return None
    if len(given) > 1:
        raise ApiError(
            422,
            "invalid_request",
            f"{HEADER} is there {len(given)} times; send one",
            param=HEADER,
            params={"num_values": len(given)},
        )
    key = given[0]
    if not re.fullmatch(rf"[\x20-\x7e]{{1,{MAX_CHARS}}}", key):
        fault = f"has {len(key)} characters" if len(key) > MAX_CHARS or not key else "has others than these"
        raise ApiError(
            422,
            "invalid_request",
            f"{HEADER} {fault}; a key is 1 to {MAX_CHARS} printable ASCII characters, "
            "for example a new UUID for each job",
            param=HEADER,
            params={"num_chars": len(key), "max_chars": MAX_CHARS},
        )
    return key


def digest(body: Any) -> str:
    """SHA-256 of a JSON value: the order of members, white space and escapes make no difference."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def reused(error: KeyReused, spec: JobSpec) -> ApiError:
    """The refusal of a key that came with another body before."""
    return ApiError(
        422,
        "idempotency_key_reused",
        f"{HEADER} {error.key!r} belongs to {error.job_id}, which was submitted with another body than "
        f"this {spec.type}: send the same body to get that job, or a new key to submit a new one",
        param=HEADER,
        params={"key": error.key, "job": error.job_id},
    )
