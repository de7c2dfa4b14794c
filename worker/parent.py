"""The worker parent's side of RQ: does one attempt after another, keeps RQ's heartbeats, never imports MLX.

RQ is transport only. It forks nothing here: `run_attempt` runs in this process and the work in the
resident child. What RQ would load by name from a job (function, callbacks, webhooks) is refused:
JSON keeps code out of the payload, but not names of code.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from redis import Redis
from redis.backoff import AbstractBackoff, NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry
from rq import Queue
from rq.exceptions import NoSuchJobError, StopRequested
from rq.executions import Execution
from rq.job import Job
from rq.timeouts import BaseDeathPenalty
from rq.worker import SimpleWorker

from jobs import RUN_FUNCTION, queue_name
from worker.attempts import Attempts
from worker.resident import EngineUnavailable
from worker.run import RunContext, run_attempt
from worker.stop import StopRequest

log = logging.getLogger("worker.parent")

HEARTBEAT_TTL_S = 45
MAX_RETRIES_WHEN_STOPPING = 8
REFUSED_PAUSE_S = 1.0


class JobRefused(Exception):
    """A queue entry that names something else than `jobs.RUN_FUNCTION`."""


class RunJob(Job):
    """An RQ job that can only ever be a run of `jobs.RUN_FUNCTION`."""

    run: Callable[[str, Any], None]
    """Set by the worker on its own subclass; nothing is imported by name."""

    @property
    def func(self) -> Callable[..., None]:
        if self.func_name != RUN_FUNCTION or self.instance is not None:
            raise JobRefused(f"{self.func_name!r} is not {RUN_FUNCTION!r}: {self.id} does not run")
        return partial(type(self).run, self.id)

    success_callback = property(lambda self: None)
    failure_callback = property(lambda self: None)
    stopped_callback = property(lambda self: None)
    should_retry = property(lambda self: False)

    def send_webhooks(self, *args: object, **kwargs: object) -> None:
        """None: an address in a queue entry is not called."""


class NoTimeout(BaseDeathPenalty):
    """No time limit by SIGALRM: it would leave the child working on a job that nobody listens to."""

    def setup_death_penalty(self) -> None: ...

    def cancel_death_penalty(self) -> None: ...


class PatientBackoff(AbstractBackoff):
    """Waits for Redis for ever, unless the worker is to stop."""

    def __init__(self, stop: StopRequest) -> None:
        self._stop = stop

    def compute(self, failures: int) -> float:
        if self._stop.requested and failures > MAX_RETRIES_WHEN_STOPPING:
            raise RedisConnectionError("Redis is away, and the worker was told to stop")
        return min(0.1 * failures, 1.0)

    def __deepcopy__(self, memo: dict[int, Any]) -> PatientBackoff:
        return self


class RunWorker(SimpleWorker):
    """RQ's loop, which knows the one queue of a model; what is next in it is for `Attempts` to say."""

    death_penalty_class = NoTimeout
    log_job_description = False
    max_connection_wait_time = 5.0

    def __init__(self, context: RunContext, model: str, redis: Redis, steal_after_s: float) -> None:
        job_class = type("ThisWorkersJob", (RunJob,), {"run": staticmethod(partial(run_attempt, context))})
        redis.set_response_callback("CLIENT INFO", _client_info)
        super().__init__(
            [queue_name(model)],
            name=context.name,
            connection=redis,
            serializer="json",
            job_class=job_class,
            worker_ttl=HEARTBEAT_TTL_S,
            maintenance_interval=60,
            log_job_description=False,
        )
        self._context = context
        self._attempts = Attempts(redis, model, context.name, steal_after_s)
        self._in_hand: tuple[Job, Execution] | None = None
        self.fatal: EngineUnavailable | None = None

    def get_heartbeat_ttl(self, job: Job, working_time: float = 0.0) -> int:
        return HEARTBEAT_TTL_S

    def renew_lease(self) -> None:
        """RQ's heartbeats of the job in hand; called from the presence thread."""
        in_hand = self._in_hand
        if in_hand is not None:
            self.maintain_heartbeats(*in_hand)

    def heartbeat(self, timeout: int | None = None, pipeline: Any = None) -> None:
        self._context.presence.beat()
        try:
            super().heartbeat(timeout, pipeline)
        except ResponseError as error:
            log.debug("RQ is not told that this worker lives: %s", error)

    def dequeue_job_and_maintain_ttl(
        self, timeout: int | None, max_idle_time: int | None = None
    ) -> tuple[Job, Queue] | None:
        """The next attempt, taken only while a loaded child is there to do it."""
        while not self._stopping():
            self._await_engine()
            self._context.presence.show("idle", self._context.resident.card)
            self.heartbeat()
            if self.should_run_maintenance_tasks:
                self.run_maintenance_tasks()
            try:
                rq_id = self._attempts.take()
            except ResponseError as error:
                log.warning("Redis gives no attempts: %s", error)
                time.sleep(REFUSED_PAUSE_S)
                continue
            if rq_id is None:
                continue
            try:
                return self.job_class.fetch(rq_id, self.connection, self.serializer), self.queues[0]
            except NoSuchJobError:
                log.info("%s was taken back while it was handed over", rq_id)
            except RedisError:
                raise
            except Exception:
                log.exception("the queue entry %s could not be read and is dropped", rq_id)
        raise StopRequested

    # A Redis without memory, disk or replicas answers, and takes no writes. That ends no worker: what RQ
    # notes is of use to RQ alone, and an attempt that was taken and could not begin the API hands out anew.

    def register_birth(self) -> None:
        while not self._stopping():
            try:
                super().register_birth()  # type: ignore[no-untyped-call]
                return
            except ResponseError as error:
                log.warning("Redis does not take this worker: %s", error)
                time.sleep(REFUSED_PAUSE_S)

    def run_maintenance_tasks(self) -> None:
        try:
            super().run_maintenance_tasks()  # type: ignore[no-untyped-call]
        except ResponseError as error:
            log.debug("RQ's maintenance is put off: %s", error)

    def execute_job(self, job: Job, queue: Queue) -> None:
        try:
            super().execute_job(job, queue)
        except ResponseError as error:
            log.warning("%s: Redis does not take what RQ notes of it: %s", job.id, error)

    def perform_job(self, job: Job, queue: Queue, execution: Execution) -> bool:
        self._in_hand = (job, execution)
        try:
            return super().perform_job(job, queue, execution)
        finally:
            self._in_hand = None

    def teardown(self) -> None:
        self.connection.set_retry(Retry(NoBackoff(), 0))
        try:
            super().teardown()  # type: ignore[no-untyped-call]
        except RedisError as error:
            log.warning("could not sign off from RQ, the registration will expire: %s", error)

    def subscribe(self) -> None:
        """No command channel: stops travel as `jobs.control_key` and as signals."""

    def unsubscribe(self) -> None: ...

    def _install_signal_handlers(self) -> None:
        """None of RQ's: they raise in the middle of a pop; `StopRequest` only sets flags."""

    def _stopping(self) -> bool:
        self._stop_requested = self._context.stop.requested
        return self._stop_requested

    def _await_engine(self) -> None:
        if self._context.resident.ready:
            return
        self._context.presence.show("loading")
        try:
            self._context.resident.wait_ready(self._keep_waiting)
        except EngineUnavailable as error:
            self.fatal = error
            raise StopRequested from error

    def _keep_waiting(self) -> bool:
        super().heartbeat()
        self._context.presence.beat()
        return not self._stopping()


def _client_info(answer: bytes) -> dict[str, str]:
    """What RQ reads its address from. redis-py's parser ends at a socket whose path has a space or a `=`."""
    pairs = (word.partition("=") for word in answer.decode(errors="replace").split(" ") if "=" in word)
    return {name: value for name, _, value in pairs}
