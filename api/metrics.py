"""What the service measures of itself, read when it is asked for: from the database and from Redis.

Nothing is counted along the way, so the numbers are true after a restart and the same on every API host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from redis.exceptions import RedisError
from sqlalchemy import func, select

from api.db import Database
from api.models import Job, JobEvent
from api.queue import JobQueue
from jobs import EventType, State


class ServiceCollector:
    """Yields every metric anew at each collection."""

    def __init__(self, database: Database, queue: JobQueue, now: float) -> None:
        self._database = database
        self._queue = queue
        self._now = now

    def collect(self) -> Iterator[Metric]:
        """Those of Redis are left out while it is away: no number is better than a wrong one."""
        yield from self._jobs()
        try:
            found = list(self._redis())
        except (RedisError, OSError):
            found = []
        yield GaugeMetricFamily("longleaf_redis_up", "Whether Redis answers.", value=float(bool(found)))
        yield from found

    def _jobs(self) -> Iterator[Metric]:
        queued_at = (
            select(func.min(JobEvent.at))
            .join(Job, Job.id == JobEvent.job_id)
            .where(
                Job.state == State.QUEUED,
                JobEvent.type == EventType.QUEUED,
                JobEvent.attempt == Job.attempt,
            )
        )
        with self._database.read() as session:
            rows = session.execute(select(Job.state, func.count()).group_by(Job.state))
            num_jobs = {row[0]: row[1] for row in rows}
            oldest = session.scalar(queued_at)
        jobs = GaugeMetricFamily("longleaf_jobs", "Jobs in the database, ended ones too.", labels=["state"])
        for state in State:
            jobs.add_metric([state], num_jobs.get(state, 0))
        yield jobs
        yield GaugeMetricFamily(
            "longleaf_oldest_queued_job_age_seconds",
            "How long the oldest queued attempt has waited; 0 where none waits.",
            value=0.0 if oldest is None else max(0.0, self._now - oldest),
        )

    def _redis(self) -> Iterator[Metric]:
        num_workers = Counter(status.state for status in self._queue.workers().values())
        workers = GaugeMetricFamily("longleaf_workers", "Live workers.", labels=["state"])
        for state in ("loading", "idle", "busy", "draining"):
            workers.add_metric([state], num_workers[state])
        yield workers
        length = GaugeMetricFamily(
            "longleaf_queue_length",
            "Attempts that wait, by model and by the worker whose own queue it is; empty for the shared one.",
            labels=["queue", "worker"],
        )
        age = GaugeMetricFamily(
            "longleaf_queue_first_age_seconds",
            "How long the first of these has been in a queue.",
            labels=["queue", "worker"],
        )
        for place, ids in self._queue.lists().items():
            length.add_metric(place, len(ids))
            age.add_metric(place, self._queue.waited_s(ids[0]) if ids else 0.0)
        yield from (length, age)
        yield GaugeMetricFamily(
            "longleaf_events_backlog",
            "Events of workers that are not in the database yet.",
            value=self._queue.num_events(),
        )
        yield GaugeMetricFamily(
            "longleaf_oldest_event_age_seconds",
            "How long the oldest of them has waited; 0 where none waits.",
            value=self._queue.oldest_event_age_s(),
        )
