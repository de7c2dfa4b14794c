"""Wakes the requests that wait for a job to change, inside this process.

The store calls `notify` from any thread after a commit. A waiter clears its event, reads the
database, and only then waits: a change between the two is never missed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Notifier:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiters: dict[str, set[asyncio.Event]] = {}
        self.closed = False
        """True once the server stops: waiters must answer what they have."""

    @property
    def num_waiters(self) -> int:
        # A copy, since this may be asked from another thread while the loop goes on.
        return sum(len(events) for events in list(self._waiters.values()))

    def notify(self, job_id: str) -> None:
        """Wake whoever waits for this job. Callable from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake, job_id)

    def close(self) -> None:
        """Wake everyone for the last time. Call on the event loop."""
        self.closed = True
        self.wake_all()

    def wake_all(self) -> None:
        """Wake whoever waits for any job. Call on the event loop."""
        for job_id in list(self._waiters):
            self._wake(job_id)

    @contextmanager
    def subscribe(self, job_id: str) -> Iterator[asyncio.Event]:
        """An event that is set at each change of the job, while the block lasts."""
        event = asyncio.Event()
        self._waiters.setdefault(job_id, set()).add(event)
        try:
            yield event
        finally:
            self._waiters[job_id].discard(event)
            if not self._waiters[job_id]:
                del self._waiters[job_id]

    def _wake(self, job_id: str) -> None:
        for event in self._waiters.get(job_id, ()):
            event.set()
