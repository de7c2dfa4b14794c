"""Lists in pages: newest first, `after` is the id of the last item that was seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

from fastapi import Query

T = TypeVar("T")

Limit = Annotated[int, Query(ge=1, le=200, description="Items in a page.")]
After = Annotated[
    str | None, Query(pattern=r"^[a-z]{3}_[0-9a-z]{20}$", description="Id of the last item seen.")
]


def page(rows: Sequence[T], limit: int, to_json: Callable[[T], dict[str, Any]]) -> dict[str, Any]:
    """`rows` were read with one more than `limit`, which shows whether there are more."""
    data = [to_json(row) for row in rows[:limit]]
    has_more = len(rows) > limit
    return {"data": data, "has_more": has_more, "next": data[-1]["id"] if has_more else None}


def iso(seconds: float | None) -> str | None:
    """RFC 3339 in UTC with milliseconds."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
