"""One attempt at one job as the parent sees it: fetch → hand to the child → pass on → report the end.

`run_job` is the only function that the queue may name (`jobs.RUN_FUNCTION`); `RunWorker` calls `run_attempt`
in its place, and whatever else loads it by name is refused. Every attempt that is not stale ends in exactly
one of: job.succeeded, job.failed, job.cancelled, attempt.released, attempt.lost.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError
from redis import Redis

from jobs import Event, EventType, Problem, RunRequest
from jobs.faults import field_path, told
from worker.child_process import Gone
from worker.control import ControlWatch
from worker.documents import ApiUnreachable, DocumentFailed, DocumentSource, Interrupted, TokenRefused
from worker.outbox import Outbox
from worker.presence import Presence
from worker.progress import ProgressGate
from worker.protocol import ChildEvent, End, FromChild, Run, Stop
from worker.resident import EngineUnavailable, Resident
from worker.stop import StopRequest

log = logging.getLogger("worker.run")

CANCEL_GRACE_S = 10.0
RELEASE_GRACE_S = 12.0
"""Less than the 15 s in which a drained worker must have given its job back."""
FLUSH_GRACE_S = 5.0
"""How long a worker that stops waits for Redis to take its last events."""
MEMORY_EVERY_S = 0.5
MEMORY_GRACE_S = 2.0
"""Memory goes on growing until the job stops, so it has less time than one that was cancelled."""

Why = Literal["cancel", "release", "stale", "memory"]


@dataclass(frozen=True)
class RunContext:
    """What an attempt works with; built once by the worker."""

    name: str
    redis: Redis
    outbox: Outbox
    presence: Presence
    documents: DocumentSource
    resident: Resident
    stop: StopRequest


class NotALongleafWorker(RuntimeError):
    """A worker of RQ's own has taken an attempt."""


def run_job(request: Any) -> None:
    """Refuse: a worker that forks for each job has no resident engine. Raises NotALongleafWorker.

    The API hands the attempt out again, as one that is in no queue and with no worker.
    """
    raise NotALongleafWorker(
        "an `rq worker` listens on a queue of Longleaf: stop it, and serve the queue with `longleaf worker`"
    )


def run_attempt(context: RunContext, rq_id: str, request: Any) -> None:
    """Run one attempt and return when its last event is on the stream.

    Args:
        rq_id: `jobs.run_id(job_id, attempt)`: names the attempt even where the request is unreadable.
        request: a RunRequest as JSON-like data.
    """
    try:
        parsed = RunRequest.model_validate(request)
    except ValidationError as error:
        _report_unreadable(context, rq_id, error)
        return
    context.presence.show("busy", request=parsed)
    attempt = _Attempt(context, parsed)
    try:
        attempt.run()
    except Exception as error:
        log.exception("%s: the worker failed", rq_id)
        context.resident.respawn()
        detail = f"the worker failed with {type(error).__name__}: {error}; its log has the details"
        attempt.lost(Problem(code="worker_error", detail=detail))
    # RQ's bookkeeping comes after the events: a job that RQ calls finished is finished for the recorder.
    while not context.outbox.flush(0.5) and not context.stop.requested:
        context.presence.beat()
    if not context.outbox.flush(FLUSH_GRACE_S):
        log.error("%s: stopping without Redis; its last events are lost, the API retries the job", rq_id)


class _Attempt:
    def __init__(self, context: RunContext, request: RunRequest) -> None:
        self._context = context
        self._request = request
        self._gate = ProgressGate(time.monotonic())
        self._stopping: Why | None = None
        self._kill_at = float("inf")
        self._look_at_memory_at = 0.0
        self._held_bytes = 0
        """What the child had in memory when it was over its limit."""

    def run(self) -> None:
        with ControlWatch(self._context.redis, self._request.job_id) as self._watch:
            if self._report_stop(self._wanted_stop()):
                return
            try:
                documents = self._context.documents.fetch(self._request.documents, self._interrupted)
            except Interrupted:
                self._report_stop(self._wanted_stop())
                return
            except ApiUnreachable as error:
                self.lost(error.problem)
                return
            except TokenRefused as error:
                # Nothing is wrong with the job: another worker may have it.
                self._context.stop.give_up(str(error))
                self._emit(EventType.RELEASED, {})
                return
            except DocumentFailed as error:
                self._emit(EventType.FAILED, error.problem.model_dump(mode="json"))
                return
            # A child that died between two jobs is no fault of this one.
            try:
                is_ready = self._context.resident.wait_ready(lambda: not self._interrupted())
            except EngineUnavailable:
                self._emit(EventType.RELEASED, {})
                return
            if not is_ready or self._wanted_stop() is not None:
                self._report_stop(self._wanted_stop())
                return
            self._emit(EventType.STARTED, {"store": self._context.presence.store})
            self._context.resident.child.send(Run(request=self._request, documents=documents))
            self._pump()

    def lost(self, problem: Problem) -> None:
        self._emit(EventType.LOST, problem.model_dump(mode="json"))

    def _pump(self) -> None:
        """Pass on what the child says until the attempt is over."""
        child = self._context.resident.child
        while True:
            message = child.receive(0.1)
            now = time.monotonic()
            self._context.presence.beat()
            if isinstance(message, End):
                self._on_end(message)
                return
            if isinstance(message, Gone):
                self._on_gone(message)
                return
            if isinstance(message, ChildEvent):
                self._on_event(message, now)
            elif message is not None:
                self._on_nonsense(message)
                return
            self._emit_progress(self._gate.tick(now))
            self._pass_on_stop(now)
            self._watch_memory(now)

    def _on_event(self, message: ChildEvent, now: float) -> None:
        if message.type is EventType.PROGRESS:
            self._emit_progress(self._gate.offer(message.data, now))
        else:
            self._gate.heard(now)
            self._emit(message.type, message.data)

    def _on_end(self, end: End) -> None:
        self._emit_progress(self._gate.flush())
        if self._stopping == "memory" and end.outcome in ("cancelled", "released"):
            self._report_stop(self._stopping)
        elif end.outcome == "succeeded" and end.result is not None:
            self._context.presence.show_speed(end.result.usage, end.result.timing)
            self._emit(EventType.SUCCEEDED, end.result.model_dump(mode="json"))
        elif end.outcome == "failed" and end.problem is not None:
            self._emit(EventType.FAILED, end.problem.model_dump(mode="json"))
        elif end.outcome == "cancelled":
            self._emit(EventType.CANCELLED, {})
        elif end.outcome == "released":
            self._emit(EventType.RELEASED, {})
        else:
            self._on_nonsense(end)
            return
        if not self._context.stop.requested:
            self._context.resident.replace_grown()

    def _on_gone(self, gone: Gone) -> None:
        self._emit_progress(self._gate.flush())
        if not self._report_stop(self._stopping):
            self.lost(
                Problem(
                    code="engine_crashed",
                    detail=f"the engine process {gone.describe()} while it worked on this job",
                    params={"returncode": gone.returncode, "attempt": self._request.attempt},
                )
            )
        if not self._context.stop.requested:
            self._context.resident.respawn()

    def _on_nonsense(self, message: FromChild) -> None:
        """The child broke the protocol: what it does now is unknown, so it is replaced."""
        log.error("the engine process sent %r in the middle of a job", message.op)
        self._context.resident.child.kill()
        self._on_gone(Gone(0, f"{message.op!r} where it does not belong"))

    def _wanted_stop(self) -> Why | None:
        control, attempt = self._watch.control, self._request.attempt
        if control.min_attempt > attempt:
            return "stale"
        # A cancel that names an older attempt was meant for that one: the job was retried since.
        if control.cancel and control.min_attempt == attempt:
            return "cancel"
        return "release" if self._context.stop.requested else None

    def _interrupted(self) -> bool:
        self._context.presence.beat()
        return self._wanted_stop() is not None

    def _pass_on_stop(self, now: float) -> None:
        wanted = self._wanted_stop()
        if self._stopping is None and wanted is not None:
            self._stopping = wanted
            release = wanted == "release"
            self._kill_at = now + (RELEASE_GRACE_S if release else CANCEL_GRACE_S)
            self._context.resident.child.send(Stop(why="release" if release else "cancel"))
            if release:
                self._context.presence.show("draining", request=self._request)
        elif wanted == "stale":
            self._stopping = "stale"
        elif self._context.stop.requested:
            # A drain that comes after a cancel must end in time as well.
            self._kill_at = min(self._kill_at, now + RELEASE_GRACE_S)
        if now > self._kill_at or self._context.stop.forced:
            if self._stopping is None:
                self._stopping = "release"
            log.warning("%s: the engine process is killed (%s)", self._request.job_id, self._stopping)
            self._context.resident.child.kill()
            self._kill_at = float("inf")

    def _watch_memory(self, now: float) -> None:
        """Stop a job under which the child has grown over its limit."""
        if self._stopping is not None or now < self._look_at_memory_at:
            return
        self._look_at_memory_at = now + MEMORY_EVERY_S
        held = self._context.resident.excess()
        if held is None:
            return
        log.warning("%s: the engine process has %.2f GB in memory", self._request.job_id, held / 1e9)
        self._stopping, self._held_bytes = "memory", held
        self._kill_at = now + MEMORY_GRACE_S
        self._context.resident.child.send(Stop(why="cancel"))

    def _report_stop(self, why: Why | None) -> bool:
        """Report the end of an attempt that was stopped; False if it was not."""
        if why == "cancel":
            self._emit(EventType.CANCELLED, {})
        elif why == "release":
            self._emit(EventType.RELEASED, {})
        elif why == "memory":
            self._emit(EventType.FAILED, self._over_memory().model_dump(mode="json"))
        elif why == "stale":
            log.info("%s: attempt %d was handed out anew", self._request.job_id, self._request.attempt)
        return why is not None

    def _over_memory(self) -> Problem:
        held, limit = self._held_bytes, self._context.resident.limit_bytes or 0
        return Problem(
            code="memory_exceeded",
            detail=f"the engine process had {held / 1e9:.2f} GB in memory while it worked on this job, over "
            f"its limit of {limit / 1e9:.2f} GB (LONGLEAF_ENGINE_MEMORY_BYTES), and was stopped; raise the "
            "limit or ask with fewer or shorter documents",
            params={"held_bytes": held, "limit_bytes": limit},
        )

    def _emit_progress(self, due: list[dict[str, Any]]) -> None:
        for data in due:
            self._context.presence.show_progress(data)
            self._emit(EventType.PROGRESS, data)

    def _emit(self, type: EventType, data: dict[str, Any]) -> None:
        if self._stopping == "stale":
            return
        request, context = self._request, self._context
        if type not in (EventType.PROGRESS, EventType.DELTA, EventType.OUTPUT, EventType.CHECKPOINT):
            log.info("%s (attempt %d): %s", request.job_id, request.attempt, type.value)
        context.outbox.put(_event(context, request.job_id, request.attempt, type, data))


def _event(context: RunContext, job_id: str, attempt: int, type: EventType, data: dict[str, Any]) -> Event:
    return Event(job_id=job_id, attempt=attempt, type=type, worker=context.name, at=time.time(), data=data)


def _report_unreadable(context: RunContext, rq_id: str, error: ValidationError) -> None:
    """Fail a job whose request cannot be read: an API and a worker of different versions, mostly."""
    first = error.errors()[0]
    where = field_path(first["loc"])
    why = f"{where}: {told(first)}"
    detail = f"the worker cannot read the request ({why}); API and workers must be of one version"
    log.error("%s: %s", rq_id, detail)
    job_id, _, attempt = rq_id.rpartition("-")
    if job_id and attempt.isdecimal() and int(attempt) > 0:
        problem = Problem(code="request_unreadable", detail=detail)
        event = _event(context, job_id, int(attempt), EventType.FAILED, problem.model_dump(mode="json"))
        context.outbox.put(event)
        context.outbox.flush(FLUSH_GRACE_S)
