"""Decides which progress reaches the stream: by the clock, not by the chunk. Knows no clock of its own."""

from __future__ import annotations

from typing import Any

MIN_INTERVAL_S = 0.5
MAX_SILENCE_S = 15.0

_UNKNOWN = {
    "phase": "load",
    "num_done": 0,
    "num_total": 0,
    "tokens_per_s": 0.0,
    "eta_s": None,
    "cached_tokens": 0,
}
"""Sent for a child that lives but has not said anything yet."""


class ProgressGate:
    """One progress per half second and phase, the last of a phase always, the newest again after a silence.

    Each method takes the time in seconds and returns what is to be sent now, in order.
    """

    def __init__(self, now: float) -> None:
        self._held: dict[str, Any] | None = None
        self._latest: dict[str, Any] = dict(_UNKNOWN)
        self._stage: tuple[Any, Any] | None = None
        self._sent_at = now
        self._heard_at = now

    def offer(self, data: dict[str, Any], now: float) -> list[dict[str, Any]]:
        """The child reported progress."""
        stage = (data.get("phase"), data.get("output_index"))
        new_stage = stage != self._stage
        out = self.flush() if new_stage else []
        self._stage, self._latest, self._held = stage, data, data
        self._heard_at = now
        if new_stage or now - self._sent_at >= MIN_INTERVAL_S:
            out += self._send(now)
        return out

    def heard(self, now: float) -> None:
        """The child said something else."""
        self._heard_at = now

    def tick(self, now: float) -> list[dict[str, Any]]:
        """Time passed."""
        if self._held is not None and now - self._sent_at >= MIN_INTERVAL_S:
            return self._send(now)
        if now - max(self._heard_at, self._sent_at) >= MAX_SILENCE_S:
            self._held = self._latest
            return self._send(now)
        return []

    def flush(self) -> list[dict[str, Any]]:
        """The phase or the job is over: its last progress, where that was held back."""
        held, self._held = self._held, None
        return [held] if held is not None else []

    def _send(self, now: float) -> list[dict[str, Any]]:
        self._sent_at = now
        return self.flush()
