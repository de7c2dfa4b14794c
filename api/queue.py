"""What the API says to the workers through Redis, and what it reads of them there.

`follow` makes Redis agree with a job in the database and may be called any number of times. RQ is
transport: attempts, retries and ends are decided by the database. Which of the queues an attempt waits in is
decided by `jobs.dispatch`. The event stream is recorder.py's.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Iterable, Iterator
from typing import Any, cast

from pydantic import ValidationError
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry
from rq import Queue
from rq.job import Job as RQJob
from rq.serializers import JSONSerializer
from sqlalchemy.exc import OperationalError

from api import moves
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
    worker_key,
)
from jobs.dispatch import OWN_KEY, OWNERS_KEY, PUT, SHARED_KEY, Waiting, own_key, waiting

log = logging.getLogger(__name__)

CONTROL_TTL_S = 86_400
MEETING_TTL_S = 300


def connect(url: str) -> Redis:
    """A client that answers or fails soon: a request must not hang because Redis does."""
    return Redis.from_url(
        url, socket_connect_timeout=2, socket_timeout=5, retry=Retry(NoBackoff(), 1), protocol=2
    )


class JobQueue:
    def __init__(self, redis: Redis, store: JobStore) -> None:
        self._redis = redis
        self._store = store
        self._put = redis.register_script(PUT)

    def follow(self, job: Job) -> None:
        """Write what workers must obey, and put a queued attempt that is due on its queue.

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
        elif state is State.QUEUED and not job.handed_out and moves.is_due(job, time.time()):
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
        """Take an attempt off the queues of a model, if it is still in one."""
        owners = self._owners([queue])[queue]
        with self._redis.pipeline(transaction=True) as pipe:
            for key in (SHARED_KEY + queue, *(f"{OWN_KEY}{queue}:{owner}" for owner in owners)):
                pipe.lrem(key, 0, rq_id)
            pipe.delete(RQJob.redis_job_namespace_prefix + rq_id)
            pipe.execute()

    def lists(self) -> dict[tuple[str, str], list[str]]:
        """The RQ ids that wait in each queue, the next one first.

        By the name of a model's queue and the worker whose own it is, '' for the shared one.
        """
        names = (queue.name for queue in Queue.all(self._redis, serializer=JSONSerializer))
        owners = self._owners([name for name in names if name.startswith(queue_name(""))])
        places = [(queue, worker) for queue, workers in owners.items() for worker in ("", *workers)]
        # In one step: an attempt that goes from one to another is seen.
        with self._redis.pipeline(transaction=True) as pipe:
            for queue, worker in places:
                pipe.lrange(f"{OWN_KEY}{queue}:{worker}" if worker else SHARED_KEY + queue, 0, -1)
            lists: list[list[bytes]] = pipe.execute()
        return {place: [name.decode() for name in ids] for place, ids in zip(places, lists, strict=True)}

    def listed(self) -> dict[str, str]:
        """The RQ ids that wait, each with the name of its model's queue."""
        return {rq_id: queue for (queue, _), ids in self.lists().items() for rq_id in ids}

    def waited_s(self, rq_id: str) -> float:
        """Seconds since an attempt was put into a queue; 0 for one of which nothing is known."""
        meta = cast(bytes | None, self._redis.hget(RQJob.redis_job_namespace_prefix + rq_id, "meta"))
        try:
            entry = Waiting.model_validate_json(meta or b"")
        except ValidationError:
            return 0.0
        return max(0.0, self._now() - entry.since)

    def num_waiting(self, model: str, worker: str) -> int:
        """Attempts in the own queue of a worker."""
        return self._redis.llen(own_key(model, worker))

    def workers(self) -> dict[str, WorkerStatus]:
        """Every worker whose presence key lives, by name."""
        return {status.name: status for status in self._statuses()}

    def cut_presences(self, statuses: Iterable[WorkerStatus]) -> None:
        """Let no presence last longer than its worker's lease.

        Redis keeps the time of day at which a key ends: where its clock is set back by an hour, a worker that
        dies would be there for an hour.
        """
        leases = [(worker_key(status.name), round(status.lease_s * 1000)) for status in statuses]
        with self._redis.pipeline(transaction=False) as pipe:
            for key, _ in leases:
                pipe.pttl(key)
            left = cast(list[int], pipe.execute())
        for (key, lease_ms), left_ms in zip(leases, left, strict=True):
            if left_ms > lease_ms:
                log.warning("%s would last %.0f s: the clock of Redis was set back", key, left_ms / 1000)
                self._redis.pexpire(key, lease_ms)

    def num_events(self) -> int:
        """Events on the stream: what is in the database is taken off it."""
        return self._redis.xlen(EVENT_STREAM)

    def oldest_event_age_s(self) -> float:
        """Seconds for which the oldest event not yet in the database has waited; 0 for none."""
        oldest = cast(list[tuple[bytes, Any]], self._redis.xrange(EVENT_STREAM, count=1))
        if not oldest:
            return 0.0
        return max(0.0, self._now() - int(oldest[0][0].split(b"-")[0]) / 1e3)

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
        request = self._store.run_request(job)
        now, name, queue = self._now(), run_id(job.id, job.attempt), queue_name(job.model)
        entry = waiting(request, job.rank, now)
        rq_job = self._queue(queue).create_job(
            RUN_FUNCTION,
            kwargs={"request": request.model_dump(mode="json")},
            job_id=name,
            timeout=-1,
            result_ttl=60,
            failure_ttl=3600,
            description=name,
            meta=entry.model_dump(),
        )
        fields = [part for field in rq_job.to_dict().items() for part in field]
        holders = json.dumps(self._holders(job.model, entry.leads[: entry.num_wanted]))
        worker = self._put(args=[queue, now, name, holders, *fields])
        if worker is None:
            log.info("%s was on the queue already", name)
        elif worker:
            log.info("%s waits for %s", name, cast(bytes, worker).decode())

    def _holders(self, model: str, leads: list[str]) -> list[list[str]]:
        """For each lead the live workers of a model that have it, by the database."""
        stores = self._store.stores(leads) if leads else {}
        workers = [status for status in self.workers().values() if status.model == model] if stores else []
        return [[found.name for found in workers if found.store in stores.get(lead, ())] for lead in leads]

    def _owners(self, queues: list[str]) -> dict[str, list[str]]:
        """By the name of a model's queue, the workers that have an own one."""
        with self._redis.pipeline(transaction=False) as pipe:
            for queue in queues:
                pipe.smembers(OWNERS_KEY + queue)
            owners: list[set[bytes]] = pipe.execute()
        names = [sorted(name.decode() for name in found) for found in owners]
        return dict(zip(queues, names, strict=True))

    def _now(self) -> float:
        """Seconds since the epoch, by the clock of Redis, which workers of other machines have too."""
        seconds, micros = self._redis.time()
        return seconds + micros / 1e6

    def _queue(self, name: str) -> Queue:
        return Queue(name, connection=self._redis, serializer=JSONSerializer)
