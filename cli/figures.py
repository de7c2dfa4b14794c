"""Sizes and ages as a person reads them."""

from __future__ import annotations

import time
from datetime import datetime


def size(num_bytes: int) -> str:
    if num_bytes < 1000:
        return f"{num_bytes} B"
    value = float(num_bytes)
    for unit in ("kB", "MB", "GB"):
        value /= 1000
        if value < 1000:
            return f"{value:.1f} {unit}"
    return f"{value / 1000:.1f} TB"


def ago(at: float) -> str:
    """How long it is since a time in seconds of the epoch."""
    seconds = max(time.time() - at, 0)
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def ago_iso(at: str) -> str:
    """The same of a time as the API writes it."""
    return ago(datetime.fromisoformat(at).timestamp())
