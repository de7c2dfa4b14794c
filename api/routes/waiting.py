"""How long a request may be held back, and holding it back: `?wait=` and the header `Prefer: wait`.

It knows the notifier and the job's state; what is answered in the end is the route's.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import suppress

import anyio.to_thread

from api.models import Job
from api.services import Services

MAX_WAIT_S = 60


def preferred_wait_s(given: list[str]) -> int | None:
    """Seconds of `wait=N` in the values of a request's Prefer header (RFC 7240), at most MAX_WAIT_S.

    None where it is absent or no number: a preference that is not understood is ignored.
    """
    for preference in ",".join(given).split(","):
        # Only a preference's name and value count; what follows a semicolon are its parameters.
        match = re.fullmatch(r'\s*wait\s*=\s*"?([0-9]{1,9})"?\s*(?:;.*)?', preference, re.IGNORECASE)
        if match:
            return min(int(match[1]), MAX_WAIT_S)
    return None


async def wait_until(
    services: Services, job_id: str, is_enough: Callable[[Job], bool], wait_s: float, read: Callable[[], Job]
) -> Job:
    """The job as soon as `is_enough` says so, or as it is after `wait_s` or when the server stops.

    `read` gets it from the database, in a thread, and may raise where it is gone.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_s
    with services.notifier.subscribe(job_id) as changed:
        while True:
            changed.clear()
            job = await anyio.to_thread.run_sync(read)
            left_s = deadline - loop.time()
            if is_enough(job) or left_s <= 0 or services.notifier.closed:
                return job
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), left_s)
