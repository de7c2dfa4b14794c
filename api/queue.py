"""What the API says to the workers through Redis, and what it reads of them there.

`follow` makes Redis agree with a job in the database and may be called any number of times. RQ is
transport: attempts, retries and ends are decided by the database. The event stream is recorder.py's.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from typing import Any, cast

from pydantic import ValidationError
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry
from rq import Queue
from rq.exceptions import DuplicateJobError
from rq.job import Job as RQJob
from rq.serializers import JSONSerializer
from sqlalchemy.exc import OperationalError

from api.models import Job
from api.store import JobStore
from jobs import (
    EVENT_STREAM,
    RUN_FUNCTION,
    WORKER_KEY,
    Control,
    State,
    WorkerStatus,
    control_key,
    meeting_key,
    queue_name,
    run_id,
)

log = logging.getLogger(__name__)

CONTROL_TTL_S = 86_400
MEETING_TTL_S = 300

NUM_NEIGHBOURS = 64
"""So many attempts in a row may have been taken since the database was asked who waits behind whom."""
_PLACE = """
if redis.call('LREM', KEYS[1], -1, ARGV[1]) == 0 then return 0 end
for i = 2, #ARGV do
  if redis.call('LINSERT', KEYS[1], 'BEFORE', ARGV[i], ARGV[1]) > 0 then return 1 end
end
return redis.call('RPUSH', KEYS[1], ARGV[1])
"""
"""Move what stands at the end before the first of its neighbours that is there; a taken one stays taken."""


def connect(url: str) -> Redis:
    """A client that answers or fails soon: a request must not hang because Redis does."""
    return Redis.from_url(
        url, socket_connect_timeout=2, socket_timeout=5, retry=Retry(NoBackoff(), 1), protocol=2
    )


class JobQueue:
    def __init__(self, redis: Redis, store: JobStore) -> None:
        self._redis = redis
        self._store = store

    def follow(self, job: Job) -> None:
        """Write what workers must obey, and put a queued attempt on its queue.

        Raises:
            RedisError: nothing is lost; the reconciler comes back to it.
        """
        state = State(job.state)
        stops = state in (State.CANCELLING, State.CANCELLED) or job.expiring
        if state is State.EXPIRED:
            # No cancel: it would also stop the next attempt of a job retried in this moment.
            self.control(job.id, cancel=False, min_attempt=job.attempt + 1)
        elif job.attempt > 1 or stops:
            self.control(job.id, cancel=stops, min_attempt=job.attempt)
        if state in (State.CANCELLED, State.EXPIRED):
            self.drop(run_id(job.id, job.attempt), queue_name(job.model))
        elif state is State.QUEUED and not job.handed_out:
            self._enqueue(job)
            self._store.mark_handed_out(job.id, job.attempt)

    def try_follow(self, job: Job) -> None:
        """The same, where the job is safe already and the caller could do nothing about a failure."""
        try:
            self.follow(job)
        except (RedisError, OSError, OperationalError) as error:
            log.warning("%s stays with the reconciler: %s", job.id, error)

    def control(self, job_id: str, *, cancel: bool, min_attempt: int = 1) -> None:
        value = Control(cancel=cancel, min_attempt=min_attempt).model_dump_json()
        self._redis.set(control_key(job_id), value, ex=CONTROL_TTL_S)

    def drop(self, rq_id: str, queue: str) -> None:
        """Take an attempt off its queue, if it is still there."""
        self._redis.lrem(self._queue(queue).key, 0, rq_id)
        self._redis.delete(RQJob.redis_job_namespace_prefix + rq_id)

    def listed(self) -> dict[str, str]:
        """The RQ ids that wait in any queue of Longleaf, each with its queue's name."""
        names = (queue.name for queue in Queue.all(self._redis, serializer=JSONSerializer))
        return {
            rq_id: name
            for name in names
            if name.startswith(queue_name(""))
            for rq_id in self._queue(name).get_job_ids()
        }

    def workers(self) -> dict[str, WorkerStatus]:
        """Every worker whose presence key lives, by name."""
        return {status.name: status for status in self._statuses()}

    def num_events(self) -> int:
        """Events on the stream: what is in the database is taken off it."""
        return self._redis.xlen(EVENT_STREAM)

    def oldest_event_age_s(self) -> float:
        """Seconds for which the oldest event not yet in the database has waited; 0 for none."""
        oldest = cast(list[tuple[bytes, Any]], self._redis.xrange(EVENT_STREAM, count=1))
        if not oldest:
            return 0.0
        seconds, micros = self._redis.time()
        return max(0.0, seconds + micros / 1e6 - int(oldest[0][0].split(b"-")[0]) / 1e3)

    def leave_mark(self) -> str:
        """The name of a key that is there for some minutes: a worker that sees it is at this Redis."""
        mark = meeting_key(secrets.token_hex(16))
        self._redis.set(mark, 1, ex=MEETING_TTL_S)
        return mark

    def ping(self) -> None:
        self._redis.ping()

    def _statuses(self) -> Iterator[WorkerStatus]:
        keys = sorted(self._redis.scan_iter(match=WORKER_KEY + "*", count=1000))
        for key, value in zip(keys, self._redis.mget(keys) if keys else (), strict=True):
            if value is None:
                continue  # expired between the two commands
            try:
                yield WorkerStatus.model_validate_json(value)
            except ValidationError as error:
                log.warning("%r holds no worker status: %s", key, error)

    def _enqueue(self, job: Job) -> None:
        request = self._store.run_request(job).model_dump(mode="json")
        name = run_id(job.id, job.attempt)
        try:
            self._queue(queue_name(job.model)).enqueue_call(
                RUN_FUNCTION,
                kwargs={"request": request},
                job_id=name,
                timeout=-1,
                result_ttl=60,
                failure_ttl=3600,
                description=name,
                unique=True,
            )
        except DuplicateJobError:
            log.info("%s was on the queue already", name)
            return
        if behind := self._store.waiting_behind(job, NUM_NEIGHBOURS):
            self._redis.eval(_PLACE, 1, self._queue(queue_name(job.model)).key, name, *behind)

    def _queue(self, name: str) -> Queue:
        return Queue(name, connection=self._redis, serializer=JSONSerializer)
