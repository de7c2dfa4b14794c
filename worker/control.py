"""Reads what the API wants of a job in hand: cancel it, or drop an attempt that has been handed out anew."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, cast

from pydantic import ValidationError
from redis import Redis
from redis.exceptions import RedisError

from jobs import Control, control_key

POLL_S = 0.25


def read_control(redis: Redis, job_id: str) -> Control | None:
    """The job's control; None while Redis cannot be asked. An absent or unreadable one asks for nothing."""
    try:
        value = cast(Any, redis.get(control_key(job_id)))
    except RedisError:
        return None
    try:
        return Control.model_validate_json(value) if value else Control()
    except ValidationError:
        return Control()


class ControlWatch:
    """Polls the control key from a thread while a job is in hand: a slow Redis never holds up the job."""

    def __init__(self, redis: Redis, job_id: str) -> None:
        self._redis = redis
        self._job_id = job_id
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self.control = Control()

    def __enter__(self) -> ControlWatch:
        self.control = read_control(self._redis, self._job_id) or Control()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()

    def _run(self) -> None:
        while not self._done.wait(POLL_S):
            self.control = read_control(self._redis, self._job_id) or self.control
