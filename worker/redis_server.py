"""The Redis that a worker is pointed at: waited for, and fit for a queue that loses nothing."""

from __future__ import annotations

import time
from typing import Any, cast

from redis import Redis
from redis.exceptions import AuthenticationError, AuthorizationError, RedisError

from worker.stop import StopRequest

OLDEST_REDIS = (6, 2)
"""BLMOVE and XAUTOCLAIM came with it; without BLMOVE a job can be lost between the queue and the worker."""
REDIS_PATIENCE_S = 30.0


class CannotStart(RuntimeError):
    """The message says why and what to do."""


def wait_for_redis(redis: Redis, url: str, stop: StopRequest, patience_s: float = REDIS_PATIENCE_S) -> None:
    """Wait until Redis answers, and check its version.

    Raises:
        CannotStart: it does not answer in time, refuses the password, is too old, or of an unknown authority.
    """
    give_up_at = time.monotonic() + patience_s
    while not stop.requested:
        try:
            version = str(cast(Any, redis.info("server"))["redis_version"])
            break
        except (AuthenticationError, AuthorizationError) as error:
            raise CannotStart(f"Redis at {shown(url)} refuses: {error}; check REDIS_URL") from error
        except RedisError as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise CannotStart(
                    f"the certificate of Redis at {shown(url)} is not trusted ({error}): name the file with "
                    "that of its authority, rediss://…?ssl_ca_certs=/path"
                ) from error
            if time.monotonic() > give_up_at:
                raise CannotStart(
                    f"no Redis at {shown(url)} after {patience_s:.0f} s ({error}); start it, or set "
                    "REDIS_URL to another one, or unset that: `longleaf up` then starts one of its own"
                ) from error
            time.sleep(0.2)
    else:
        return
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_REDIS:
        raise CannotStart(f"Redis at {shown(url)} is version {version}; 6.2 or later (or Valkey) is needed")


def shown(url: str) -> str:
    """The URL without its password, which may stand before the host or among the options."""
    scheme, _, rest = url.partition("?")[0].partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"
