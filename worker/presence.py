"""The worker's presence: a key with an expiry that says what it is and what it has in hand.

Renewed from a thread of its own, so that a busy parent stays present; but not for a parent whose
main loop has stopped: then the key expires, and the API gives the job to someone else.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import ValidationError
from redis import Redis
from redis.exceptions import RedisError

from jobs import ModelCard, Progress, RunRequest, Timing, Usage, WorkerStatus, worker_key
from jobs.dispatch import whole_lead

log = logging.getLogger("worker.presence")

LEASE_S = 15.0
RENEW_S = 3.0
MAX_SILENCE_S = 60.0
"""How long the main loop may go without `beat` before it counts as dead."""
MIN_PREFILL_TOKENS = 512


class Presence:
    def __init__(
        self, redis: Redis, name: str, model: str, store: str, renew_also: Callable[[], None]
    ) -> None:
        """
        Args:
            store: the name of its snapshot store (`worker.store_name`).
            renew_also: runs with each renewal, in the same thread (RQ's own heartbeats of the job).
        """
        self._redis = redis
        self._renew_also = renew_also
        self._status = WorkerStatus(
            name=name,
            pid=os.getpid(),
            host=socket.gethostname(),
            state="loading",
            model=model,
            store=store,
            started_at=time.time(),
            lease_s=LEASE_S,
        )
        self._beat_at = time.monotonic()
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="presence", daemon=True)
        self._thread.start()

    @property
    def store(self) -> str:
        return self._status.store

    def beat(self) -> None:
        """The main loop lives."""
        self._beat_at = time.monotonic()

    def show(
        self,
        state: Literal["loading", "idle", "busy", "draining"],
        card: ModelCard | None = None,
        request: RunRequest | None = None,
    ) -> None:
        """Say at once what the worker does now; `card` stays as it was where it is None."""
        update = {
            "state": state,
            "card": card or self._status.card,
            "job_id": request.job_id if request else None,
            "attempt": request.attempt if request else None,
        }
        if any(getattr(self._status, field) != value for field, value in update.items()):
            load = {"lead": request and whole_lead(request), "phase": None, "eta_s": None}
            self._status = self._status.model_copy(update=update | load)
            self._wake.set()

    def show_progress(self, data: Mapping[str, Any]) -> None:
        """How far the job in hand is: told at once where a phase begins, else with the next renewal."""
        try:
            progress = Progress.model_validate(data)
        except ValidationError:
            return
        is_news = progress.phase != self._status.phase
        update = {"phase": progress.phase, "eta_s": progress.eta_s}
        self._status = self._status.model_copy(update=update)
        if is_news:
            self._wake.set()

    def show_speed(self, usage: Usage, timing: Timing) -> None:
        """How fast a job's documents were prefilled, where that was enough to tell."""
        if usage.prefilled_tokens >= MIN_PREFILL_TOKENS and timing.prefill_s > 0:
            update = {"prefill_tokens_per_s": usage.prefilled_tokens / timing.prefill_s}
            self._status = self._status.model_copy(update=update)

    def close(self) -> None:
        """Be gone: the key is removed."""
        self._closing = True
        self._wake.set()
        self._thread.join(6.0)

    def _run(self) -> None:
        key = worker_key(self._status.name)
        while not self._closing:
            self._wake.clear()
            if time.monotonic() - self._beat_at < MAX_SILENCE_S:
                try:
                    self._redis.set(key, self._status.model_dump_json(), ex=int(LEASE_S))
                    self._renew_also()
                except RedisError as error:
                    log.debug("presence not renewed: %s", error)
            self._wake.wait(RENEW_S)
        try:
            self._redis.delete(key)
        except RedisError as error:
            log.debug("presence not removed, it expires in %.0f s: %s", LEASE_S, error)
