"""Jobs in the database: every move of a job's state is one function here, one transaction each.

Events of workers go through `apply`. It knows tables and `jobs`, but neither Redis nor HTTP:
a function that moves a job returns its row, and the caller makes the queue agree with it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError
from sqlalchemy import delete, exists, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from api.db import Database
from api.models import Document, IdempotencyKey, Job, JobDocument, JobEvent, JobResult, new_id
from jobs import (
    TERMINAL,
    DocumentRef,
    Event,
    EventType,
    JobSpec,
    Problem,
    Progress,
    Result,
    RunRequest,
    State,
    can_move,
    parse_spec,
)

MAX_FAILURES = 3
"""A job whose attempts were lost this often has failed."""

T = TypeVar("T", Progress, Result)

_ENDS = {
    State.SUCCEEDED: EventType.SUCCEEDED,
    State.FAILED: EventType.FAILED,
    State.CANCELLED: EventType.CANCELLED,
    State.EXPIRED: EventType.EXPIRED,
}


class BadEvent(Exception):
    """An event whose data is not what its type promises; it is dropped."""


class KeyTaken(Exception):
    """The idempotency key has a job already; `JobStore.keyed` gives it."""


class KeyReused(Exception):
    """The idempotency key came with another body before."""

    def __init__(self, key: str, job_id: str) -> None:
        super().__init__(f"{key!r} belongs to {job_id}")
        self.key = key
        self.job_id = job_id


class Busy(Exception):
    """The job is not finished, so it cannot be deleted or retried."""


class Finished(Exception):
    """The job has ended in a way that cannot be cancelled or retried."""


class DocumentGone(Exception):
    """A document of the job was deleted since, so it cannot be retried; the text is its id."""


class JobStore:
    def __init__(self, database: Database, notify: Callable[[str], None]) -> None:
        self._database = database
        self._notify = notify

    # Reading

    def get(self, job_id: str) -> Job | None:
        with self._database.read() as session:
            return session.get(Job, job_id)

    def page(self, state: State | None, limit: int, after: str | None) -> Sequence[Job]:
        """Newest first, at most `limit`, older than the job `after`."""
        query = select(Job).order_by(Job.id.desc()).limit(limit)
        if state is not None:
            query = query.where(Job.state == state)
        if after is not None:
            query = query.where(Job.id < after)
        with self._database.read() as session:
            return session.scalars(query).all()

    def result(self, job_id: str) -> dict[str, Any] | None:
        with self._database.read() as session:
            row = session.get(JobResult, job_id)
            return row.result if row else None

    def events(self, job_id: str, after: int, limit: int) -> Sequence[JobEvent]:
        query = select(JobEvent).where(JobEvent.job_id == job_id, JobEvent.seq > after)
        with self._database.read() as session:
            return session.scalars(query.order_by(JobEvent.seq).limit(limit)).all()

    def keyed(self, key: str, body_sha256: str) -> Job | None:
        """The job that was created with an idempotency key. Raises KeyReused for another body."""
        with self._database.read() as session:
            row = session.get(IdempotencyKey, key)
            if row is None:
                return None
            if row.body_sha256 != body_sha256:
                raise KeyReused(key, row.job_id)
            return session.get(Job, row.job_id)

    def unfinished(self) -> Sequence[Job]:
        """Oldest first."""
        query = select(Job).where(Job.state.not_in(TERMINAL)).order_by(Job.id)
        with self._database.read() as session:
            return session.scalars(query).all()

    def run_request(self, job: Job) -> RunRequest:
        """What a worker needs for the job's current attempt."""
        query = (
            select(Document)
            .join(JobDocument, JobDocument.document_id == Document.id)
            .where(JobDocument.job_id == job.id)
            .order_by(JobDocument.position)
        )
        with self._database.read() as session:
            documents = [
                DocumentRef(id=row.id, name=row.name, text_sha256=row.text_sha256, num_chars=row.num_chars)
                for row in session.scalars(query)
            ]
        return RunRequest(job_id=job.id, attempt=job.attempt, spec=parse_spec(job.spec), documents=documents)

    # Moves that the API makes

    def create(self, spec: JobSpec, model: str, key: str | None = None, body_sha256: str = "") -> Job:
        """A queued job, under an idempotency key where there is one.

        Raises:
            LookupError: with the id of a document that does not exist.
            KeyTaken: the key has a job, perhaps since a moment ago; nothing was created.
        """
        now = time.time()
        with self._database.write() as session:
            for document_id in spec.documents:
                if session.get(Document, document_id) is None:
                    raise LookupError(document_id)
            job = Job(
                id=new_id("job"),
                type=spec.type,
                state=State.QUEUED,
                model=model,
                spec=spec.model_copy(update={"model": model}).model_dump(mode="json"),
                attempt=1,
                num_failures=0,
                handed_out=False,
                version=1,
                last_seq=0,
                created_at=now,
                expires_at=_expiry(spec.expires_after, now),
                expiring=False,
            )
            session.add(job)
            session.flush()
            if key is not None:
                session.add(IdempotencyKey(key=key, job_id=job.id, body_sha256=body_sha256))
                try:
                    session.flush()
                except IntegrityError:
                    raise KeyTaken(key) from None
            for position, document_id in enumerate(spec.documents):
                session.add(JobDocument(job_id=job.id, position=position, document_id=document_id))
            _record(session, job, EventType.QUEUED, {"attempt": 1})
        return job

    def cancel(self, job_id: str) -> Job:
        """Ask for an end. A queued job is cancelled at once, a running one when its worker stops.

        Raises:
            LookupError: no such job.
            Finished: it ended otherwise; asking a second time is no error.
        """
        with self._database.write() as session:
            job = _required(session, job_id)
            state = State(job.state)
            if state is State.QUEUED:
                _finish(session, job, State.CANCELLED, {})
            elif state is State.RUNNING:
                _move(job, State.CANCELLING)
                _record(session, job, EventType.CANCELLING, {})
            elif state not in (State.CANCELLING, State.CANCELLED):
                raise Finished(job.state)
        self._notify(job_id)
        return job

    def retry(self, job_id: str) -> Job:
        """Queue a failed, cancelled or expired job again, with a clean record.

        Raises:
            LookupError: no such job.
            Busy: it is not finished.
            Finished: it has succeeded.
            DocumentGone: it could not read what it is about.
        """
        with self._database.write() as session:
            job = _required(session, job_id)
            if State(job.state) not in TERMINAL:
                raise Busy(job.state)
            if not can_move(State(job.state), State.QUEUED):
                raise Finished(job.state)
            query = select(JobDocument.document_id).where(JobDocument.job_id == job_id)
            there = set(session.scalars(query))
            for document_id in job.spec["documents"]:
                if document_id not in there:
                    raise DocumentGone(document_id)
            job.num_failures = 0
            job.error = None
            job.finished_at = None
            job.expires_at = _expiry(job.spec.get("expires_after"), time.time())
            job.expiring = False
            _next_attempt(session, job, "retry")
        self._notify(job_id)
        return job

    def delete(self, job_id: str) -> None:
        """Raises LookupError (no such job) and Busy (not finished)."""
        with self._database.write() as session:
            job = _required(session, job_id)
            if State(job.state) not in TERMINAL:
                raise Busy(job.state)
            session.delete(job)
        self._notify(job_id)

    def expire_due(self, now: float) -> Sequence[Job]:
        """End the queued jobs whose time is over and mark the running ones, which end when they have stopped.

        Returns those jobs: the queue must follow. A job that is being cancelled is left to that.
        """
        due = (
            select(Job)
            .where(Job.state.in_((State.QUEUED, State.RUNNING)), Job.expires_at <= now, ~Job.expiring)
            .order_by(Job.id)
        )
        with self._database.read() as session:
            if session.scalars(due.limit(1)).first() is None:
                return []
        with self._database.write() as session:
            jobs = session.scalars(due).all()
            for job in jobs:
                job.expiring = True
                if job.state == State.QUEUED:
                    _expire(session, job)
        for job in jobs:
            self._notify(job.id)
        return jobs

    def mark_handed_out(self, job_id: str, attempt: int) -> None:
        with self._database.write() as session:
            job = session.get(Job, job_id)
            if job is not None and job.attempt == attempt:
                job.handed_out = True

    def hand_out_again(self, job_id: str, attempt: int) -> Job | None:
        """A queued attempt that got lost on its way to a worker gets a new number.

        Returns None where the job has moved on since the caller looked.
        """
        with self._database.write() as session:
            job = session.get(Job, job_id)
            if job is None or job.attempt != attempt or job.state != State.QUEUED:
                return None
            _next_attempt(session, job, "not_in_queue")
        self._notify(job_id)
        return job

    def lose_attempt(self, job_id: str, attempt: int, why: Problem) -> Job | None:
        """The worker of a running attempt is gone. None where the job has moved on."""
        with self._database.write() as session:
            job = session.get(Job, job_id)
            if job is None or job.attempt != attempt or job.state not in (State.RUNNING, State.CANCELLING):
                return None
            _lost(session, job, why)
        self._notify(job_id)
        return job

    # Moves that workers report

    def apply(self, event: Event, entry_id: str) -> Job | None:
        """Apply one event of a worker, once.

        Returns the job where it moved so that the queue must follow, None otherwise: nothing more
        to do, an older attempt's event, a finished job, or an entry that was applied before.

        Raises:
            BadEvent: the data does not fit the type; nothing was changed.
        """
        with self._database.write() as session:
            job = session.get(Job, event.job_id)
            if job is None or job.attempt != event.attempt or State(job.state) in TERMINAL:
                return None
            if _seen(session, job.id, entry_id):
                return None
            follow = _apply(session, job, event, entry_id)
        self._notify(event.job_id)
        return job if follow else None


def _apply(session: Session, job: Job, event: Event, entry_id: str) -> bool:
    data = _finite(event.data)
    if job.state == State.QUEUED and event.type not in (EventType.RELEASED, EventType.LOST):
        # Also without job.started, which may have gone down with a Redis: any event shows a start.
        _start(session, job, event, entry_id if event.type is EventType.STARTED else None)
    match event.type:
        case EventType.STARTED:
            pass
        case EventType.PROGRESS:
            job.progress = _valid(Progress, data).model_dump(mode="json")
            job.version += 1
            _record(session, job, event.type, job.progress, entry_id)
        case EventType.CHECKPOINT | EventType.DELTA:
            _record(session, job, event.type, data, entry_id)
        case EventType.SUCCEEDED:
            try:
                result = _valid(Result, data).model_dump(mode="json")
            except BadEvent as error:
                # Dropping it would leave a job that nobody works on any more.
                why = Problem(code="invalid_result", detail=f"the worker's result is not one: {error}")
                _finish(session, job, State.FAILED, why.model_dump(mode="json"), entry_id)
            else:
                session.add(JobResult(job_id=job.id, result=result))
                _finish(session, job, State.SUCCEEDED, result, entry_id)
        case EventType.FAILED:
            _finish(session, job, State.FAILED, _reason(data).model_dump(mode="json"), entry_id)
        case EventType.CANCELLED:
            _stopped(session, job, entry_id)
        case EventType.EXPIRED:
            end = State.EXPIRED if can_move(State(job.state), State.EXPIRED) else State.CANCELLED
            _finish(session, job, end, {}, entry_id)
        case EventType.RELEASED:
            if _must_stop(job):
                _stopped(session, job, entry_id)
            else:
                _next_attempt(session, job, "released", entry_id)
            return True
        case EventType.LOST:
            _lost(session, job, _reason(data), entry_id)
            return True
        case EventType.QUEUED | EventType.CANCELLING:
            raise BadEvent(f"{event.type} is not for a worker to say")
    return False


def _start(session: Session, job: Job, event: Event, entry_id: str | None) -> None:
    _move(job, State.RUNNING)
    job.worker = event.worker
    job.handed_out = True
    job.started_at = job.started_at or time.time()
    _record(session, job, EventType.STARTED, {"attempt": job.attempt, "worker": event.worker}, entry_id)


def _lost(session: Session, job: Job, why: Problem, entry_id: str | None = None) -> None:
    job.num_failures += 1
    if _must_stop(job):
        _stopped(session, job, entry_id)
    elif job.num_failures < MAX_FAILURES:
        _next_attempt(session, job, why.code, entry_id)
    else:
        if job.state == State.QUEUED:
            _move(job, State.RUNNING)
        problem = Problem(
            code="worker_lost" if why.code == "worker_lost" else "engine_crashed",
            detail=f"{job.num_failures} attempts were lost, the last one because {why.detail}",
            params={"num_failures": job.num_failures, "last": why.model_dump(mode="json")},
        )
        _finish(session, job, State.FAILED, problem.model_dump(mode="json"), entry_id)


def _must_stop(job: Job) -> bool:
    """Whether the job is not handed out again when its attempt ends without an end of the job."""
    return job.state == State.CANCELLING or job.expiring


def _stopped(session: Session, job: Job, entry_id: str | None) -> None:
    """A worker stopped as it was told; a cancel has the last word over an expiry."""
    if job.expiring and job.state == State.RUNNING:
        _expire(session, job, entry_id)
    else:
        _finish(session, job, State.CANCELLED, {}, entry_id)


def _expire(session: Session, job: Job, entry_id: str | None = None) -> None:
    limit_s = job.spec.get("expires_after")
    why = Problem(
        code="expired",
        detail=f"it did not end within the {limit_s} s of its expires_after; retry it or submit it with more",
        params={"expires_after": limit_s},
    )
    _finish(session, job, State.EXPIRED, why.model_dump(mode="json"), entry_id)


def _expiry(expires_after: int | None, accepted_at: float) -> float | None:
    return None if expires_after is None else accepted_at + expires_after


def _next_attempt(session: Session, job: Job, reason: str, entry_id: str | None = None) -> None:
    if job.state != State.QUEUED:
        _move(job, State.QUEUED)
    job.attempt += 1
    job.handed_out = False
    job.worker = None
    job.progress = None
    _record(session, job, EventType.QUEUED, {"attempt": job.attempt, "reason": reason}, entry_id)


def _finish(
    session: Session, job: Job, end: State, data: dict[str, Any], entry_id: str | None = None
) -> None:
    """Move to an end. `data` is the Result, the Problem, or empty."""
    _move(job, end)
    job.finished_at = time.time()
    if end in (State.FAILED, State.EXPIRED):
        job.error = data or None
    progress = select(JobEvent.seq).where(JobEvent.job_id == job.id, JobEvent.type == EventType.PROGRESS)
    last = session.scalar(progress.order_by(JobEvent.seq.desc()).limit(1))
    session.execute(
        delete(JobEvent).where(
            JobEvent.job_id == job.id, JobEvent.type == EventType.PROGRESS, JobEvent.seq != (last or 0)
        )
    )
    _record(session, job, _ENDS[end], data, entry_id)


def _move(job: Job, new: State) -> None:
    if not can_move(State(job.state), new):
        raise BadEvent(f"{job.id} cannot go from {job.state} to {new}")
    job.state = new
    job.version += 1


def _record(
    session: Session, job: Job, kind: EventType, data: dict[str, Any], entry_id: str | None = None
) -> None:
    job.last_seq += 1
    session.add(
        JobEvent(
            job_id=job.id,
            seq=job.last_seq,
            type=kind,
            attempt=job.attempt,
            at=time.time(),
            data=data,
            entry_id=entry_id,
        )
    )


def _seen(session: Session, job_id: str, entry_id: str) -> bool:
    query = select(exists().where(JobEvent.job_id == job_id, JobEvent.entry_id == entry_id))
    return bool(session.scalar(query))


def _required(session: Session, job_id: str) -> Job:
    job = session.get(Job, job_id)
    if job is None:
        raise LookupError(job_id)
    return job


def _valid(model: type[T], data: dict[str, Any]) -> T:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise BadEvent(f"{error.error_count()} wrong fields for {model.__name__}: {error}") from None


def _reason(data: dict[str, Any]) -> Problem:
    # An end without a proper reason is still an end.
    try:
        return Problem.model_validate(data)
    except ValidationError:
        return Problem(code="unknown", detail="the worker gave no reason")


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity; a rate or an estimate that is one becomes 0."""
    if isinstance(value, float) and not math.isfinite(value):
        return 0.0
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value
