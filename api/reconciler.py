"""The database into the queue: hands out what is owed and due, takes back what a dead worker held, expires.

It compares, every few seconds, unfinished jobs with the queues and with the presence of workers.
The database is the truth; a Redis that was flushed gets everything back from here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import anyio
import anyio.to_thread
from redis.exceptions import RedisError
from sqlalchemy.exc import OperationalError

from api.models import Job
from api.queue import JobQueue
from api.store import JobStore
from jobs import TERMINAL, Problem, State, WorkerStatus, run_id

log = logging.getLogger(__name__)

Statuses = dict[str, WorkerStatus]


class Reconciler:
    def __init__(
        self,
        store: JobStore,
        queue: JobQueue,
        *,
        lost_after_s: float,
        gone_after_s: float,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._queue = queue
        self._lost_after_s = lost_after_s
        self._gone_after_s = gone_after_s
        self._clock = clock
        self._now = now
        self._missing_since: dict[tuple[str, int], float] = {}
        """When an attempt was first found with nobody. In memory only: a restart waits anew."""

    async def run(self, every_s: float) -> None:
        """Compare until cancelled, through any outage."""
        is_away = False
        thread = anyio.CapacityLimiter(1)
        while True:
            try:
                await anyio.to_thread.run_sync(self.compare, limiter=thread)
                is_away = False
            except (RedisError, OSError, OperationalError) as error:
                if not is_away:
                    log.warning("jobs are not compared with the queue: %s", error)
                is_away = True
            except Exception:
                log.exception("comparing jobs with the queue failed")
            await asyncio.sleep(every_s)

    def compare(self) -> None:
        """One pass.

        Raises:
            RedisError: Redis is away; a later pass does it all.
        """
        # Before Redis, which may be away: a queued job's time is over all the same.
        expired = self._store.expire_due(self._now())
        # Redis is read before the jobs: what waits there was in the database before, so an entry for which
        # the database then knows no unfinished job is stale.
        statuses = self._queue.workers()
        self._queue.cut_presences(statuses.values())
        listed = self._queue.listed()
        backlog_s = self._queue.oldest_event_age_s()
        unfinished = self._store.unfinished()
        for job in expired:
            log.info("%s: its time is over, it is %s", job.id, job.state)
            self._queue.follow(job)
        missing: dict[tuple[str, int], float] = {}
        for job in unfinished:
            try:
                since = self._compare_job(job, statuses, listed, backlog_s)
            except (RedisError, OSError, OperationalError):
                raise
            except Exception:
                # One job that cannot be handed out must not keep the others from it.
                log.exception("%s could not be compared", job.id)
                continue
            if since is not None:
                missing[job.id, job.attempt] = since
        self._missing_since = missing
        self._stop_stale(statuses, listed, {job.id: job for job in unfinished})

    def _compare_job(
        self, job: Job, statuses: Statuses, listed: dict[str, str], backlog_s: float
    ) -> float | None:
        """Hand out or take back. Returns since when nobody has the job, None where somebody does."""
        if job.state != State.QUEUED or not job.handed_out:
            self._queue.follow(job)
        limit_s = self._limit_s(job, statuses, listed)
        if limit_s is None:
            return None
        since = self._missing_since.get((job.id, job.attempt), self._clock())
        silence_s = self._clock() - since
        # An event older than the silence may still tell how the attempt ended.
        if silence_s >= limit_s and backlog_s < silence_s:
            self._take_back(job)
        return since

    def _limit_s(self, job: Job, statuses: Statuses, listed: dict[str, str]) -> float | None:
        """How long the attempt may stay as it is; None where somebody has it."""
        if job.state == State.QUEUED:
            is_held = any(s.job_id == job.id and s.attempt == job.attempt for s in statuses.values())
            # Handed out in this very pass counts as listed; one that is not due is with the database.
            is_held = is_held or not job.handed_out or run_id(job.id, job.attempt) in listed
            return None if is_held else self._lost_after_s
        status = statuses.get(job.worker or "")
        if status is None:
            return self._gone_after_s
        if status.job_id == job.id and status.attempt == job.attempt:
            return None
        return status.lease_s

    def _take_back(self, job: Job) -> None:
        if job.state == State.QUEUED:
            log.warning(
                "%s attempt %d is in no queue and with no worker: handed out again", job.id, job.attempt
            )
            moved = self._store.hand_out_again(job.id, job.attempt)
        else:
            log.warning("%s attempt %d: worker %s is gone", job.id, job.attempt, job.worker)
            why = Problem(
                code="worker_lost",
                detail=f"worker {job.worker} went away",
                params={"worker": job.worker, "attempt": job.attempt},
            )
            moved = self._store.lose_attempt(job.id, job.attempt, why)
        if moved is not None:
            self._queue.follow(moved)

    def _stop_stale(self, statuses: Statuses, listed: dict[str, str], unfinished: dict[str, Job]) -> None:
        """Work on ended jobs, deleted jobs and older attempts is stopped, waiting attempts dropped."""
        for status in statuses.values():
            if status.job_id is not None:
                job = unfinished.get(status.job_id) or self._store.get(status.job_id)
                if job is None:
                    self._queue.control(status.job_id, cancel=True, min_attempt=status.attempt or 1)
                elif State(job.state) in TERMINAL:
                    # No cancel: it would also stop the next attempt of a job retried in this moment.
                    self._queue.control(job.id, cancel=False, min_attempt=job.attempt + 1)
                elif status.attempt is not None and status.attempt < job.attempt:
                    self._queue.control(job.id, cancel=False, min_attempt=job.attempt)
        wanted = {run_id(job.id, job.attempt) for job in unfinished.values()}
        for rq_id, queue in listed.items():
            if rq_id not in wanted:
                self._queue.drop(rq_id, queue)
