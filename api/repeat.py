"""Work that an API host does again and again: an outage of the database, or a fault, ends none of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from sqlalchemy.exc import OperationalError


async def repeat(
    work: Callable[[], Awaitable[object]], every_s: float, log: logging.Logger, waits: str, failed: str
) -> None:
    """Do it, pause, and so on until cancelled.

    Args:
        waits: what the log says where the database or a file cannot be had.
        failed: what it says of any other error.
    """
    while True:
        try:
            await work()
        except (OperationalError, OSError) as error:
            log.warning("%s: %s", waits, error)
        except Exception:
            log.exception(failed)
        await asyncio.sleep(every_s)
