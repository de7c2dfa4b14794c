"""Jobs in the database: what can be asked about them, and every change of one as one transaction.

What a move does to a row is in moves.py, what a worker's event means in worker_events.py. It knows neither
Redis nor HTTP: a function that moves a job returns its row, and the caller makes the queue agree with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Select, exists, func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from api import audit, held_documents, moves, outputs, worker_events
from api.attempt import run_request
from api.db import Database
from api.limits import OverLimit
from api.models import Document, IdempotencyKey, Job, JobDocument, JobEvent, JobResult, new_id
from jobs import (
    TERMINAL,
    Event,
    EventType,
    JobSpec,
    Problem,
    RunRequest,
    State,
    num_outputs,
)


class KeyTaken(Exception):
    """The idempotency key has a job already; `JobStore.keyed` gives it."""


class KeyReused(Exception):
    """The idempotency key came with another body before."""

    def __init__(self, key: str, job_id: str) -> None:
        super().__init__(f"{key!r} belongs to {job_id}")
        self.key = key
        self.job_id = job_id


class JobStore:
    def __init__(self, database: Database, notify: Callable[[str], None]) -> None:
        self._database = database
        self._notify = notify

    # Reading

    def get(self, job_id: str) -> Job | None:
        """Whosever it is: for the service itself, not for a caller."""
        with self._database.read() as session:
            return session.get(Job, job_id)

    def owned(self, tenant: str, job_id: str) -> Job | None:
        with self._database.read() as session:
            return session.scalar(_owned(tenant, job_id))

    def page(self, tenant: str, state: State | None, limit: int, after: str | None) -> Sequence[Job]:
        """Newest first, at most `limit`, older than the job `after`."""
        query = select(Job).where(Job.tenant_id == tenant).order_by(Job.id.desc()).limit(limit)
        if state is not None:
            query = query.where(Job.state == state)
        if after is not None:
            query = query.where(Job.id < after)
        with self._database.read() as session:
            return session.scalars(query).all()

    def result(self, job_id: str) -> dict[str, Any] | None:
        """The result of a job that has succeeded, of any other what is complete; None where nothing is."""
        with self._database.read() as session:
            row = session.get(JobResult, job_id)
            if row is not None:
                return row.result
            job = session.get(Job, job_id)
            part = outputs.partial(session, job) if job else None
            return part.model_dump(mode="json") if part else None

    def events(self, job_id: str, after: int, limit: int) -> Sequence[JobEvent]:
        query = select(JobEvent).where(JobEvent.job_id == job_id, JobEvent.seq > after)
        with self._database.read() as session:
            return session.scalars(query.order_by(JobEvent.seq).limit(limit)).all()

    def keyed(self, tenant: str, key: str, body_sha256: str) -> Job | None:
        """The job that was created with an idempotency key. Raises KeyReused for another body."""
        with self._database.read() as session:
            row = session.get(IdempotencyKey, (tenant, key))
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
        with self._database.read() as session:
            return run_request(session, job)

    def stores(self, leads: Sequence[str]) -> dict[str, set[str]]:
        """The snapshot stores that have each of these leads; a lead that none has is left out."""
        with self._database.read() as session:
            return held_documents.stores(session, leads)

    def held_documents(self, store: str, model: str, limit: int) -> list[str]:
        """The ids of documents whose KV for a model a snapshot store has, the last used first."""
        with self._database.read() as session:
            return held_documents.document_ids(session, store, model, limit)

    # Moves that the API makes

    def create(
        self,
        tenant: str,
        spec: JobSpec,
        model: str,
        key: str | None = None,
        body_sha256: str = "",
        max_queued: int | None = None,
    ) -> Job:
        """A queued job, under an idempotency key where there is one.

        Raises:
            LookupError: with the id of a document that does not exist.
            KeyTaken: the key has a job, perhaps since a moment ago; nothing was created.
            OverLimit: `max_queued` of the tenant's jobs are queued already.
        """
        now = time.time()
        with self._database.write() as session:
            _check_queued(session, tenant, max_queued)
            names = []
            for document_id in spec.documents:
                document = session.get(Document, document_id)
                if document is None or document.tenant_id != tenant:
                    raise LookupError(document_id)
                names.append(document.name)
            stored = spec.model_copy(update={"model": model}).model_dump(mode="json")
            job = Job(
                id=new_id("job"),
                tenant_id=tenant,
                type=spec.type,
                state=State.QUEUED,
                model=model,
                spec=stored,
                rank=moves.rank(stored, now),
                attempt=1,
                num_failures=0,
                handed_out=False,
                version=1,
                last_seq=0,
                num_outputs=num_outputs(spec),
                num_done=0,
                created_at=now,
                expires_at=moves.expiry(spec.expires_after, now),
                expiring=False,
            )
            session.add(job)
            session.flush()
            if key is not None:
                session.add(IdempotencyKey(tenant_id=tenant, key=key, job_id=job.id, body_sha256=body_sha256))
                try:
                    session.flush()
                except IntegrityError:
                    raise KeyTaken(key) from None
            for position, (document_id, name) in enumerate(zip(spec.documents, names, strict=True)):
                session.add(JobDocument(job_id=job.id, position=position, document_id=document_id, name=name))
            moves.record(session, job, EventType.QUEUED, {"attempt": 1})
        return job

    def cancel(self, tenant: str, job_id: str) -> Job:
        """Ask for an end. A queued job is cancelled at once, a running one when its worker stops.

        Raises:
            LookupError: no such job.
            moves.Finished: it ended otherwise; asking a second time is no error.
        """
        with self._database.write() as session:
            job = _required(session, tenant, job_id)
            moves.cancel(session, job)
        self._notify(job_id)
        return job

    def retry(self, tenant: str, job_id: str, max_queued: int | None = None) -> Job:
        """Queue a failed, cancelled or expired job again, with a clean record.

        Raises:
            LookupError: no such job.
            moves.Busy: it is not finished.
            moves.Finished: it has succeeded.
            moves.DocumentGone: it could not read what it is about.
            OverLimit: `max_queued` of the tenant's jobs are queued already.
        """
        with self._database.write() as session:
            job = _required(session, tenant, job_id)
            _check_queued(session, tenant, max_queued)
            moves.retry(session, job)
        self._notify(job_id)
        return job

    def delete(self, tenant: str, job_id: str, key_id: str | None = None) -> None:
        """Delete a job, with the key by which that is asked.

        Raises LookupError (no such job) and moves.Busy (not finished).
        """
        with self._database.write() as session:
            job = _required(session, tenant, job_id)
            if State(job.state) not in TERMINAL:
                raise moves.Busy(job.state)
            session.delete(job)
            audit.note(session, "deleted", "job", job_id, tenant, key_id)
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
                    moves.expire(session, job)
        for job in jobs:
            self._notify(job.id)
        return jobs

    def mark_handed_out(self, job_id: str, attempt: int) -> None:
        # A mark that a loss of power takes back is set again by the reconciler.
        with self._database.write(synced=False) as session:
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
            moves.next_attempt(session, job, "not_in_queue")
        self._notify(job_id)
        return job

    def lose_attempt(self, job_id: str, attempt: int, why: Problem) -> Job | None:
        """The worker of a running attempt is gone. None where the job has moved on."""
        with self._database.write() as session:
            job = session.get(Job, job_id)
            if job is None or job.attempt != attempt or job.state not in (State.RUNNING, State.CANCELLING):
                return None
            moves.lose(session, job, why)
        self._notify(job_id)
        return job

    # Moves that workers report

    def apply(self, entries: Sequence[tuple[Event, str]]) -> list[Job]:
        """Apply events of workers in their order, each with its entry's id and each once, all or none.

        Nothing here is synced to the disk: what a loss of power takes back is done again by another attempt.

        Returns the jobs that moved so that the queue must follow. An older attempt's event, one of an ended
        job and an entry that was applied before change nothing.

        Raises:
            worker_events.BadEvent: the data of one does not fit its type; nothing was changed.
        """
        changed: set[str] = set()
        follow: dict[str, Job] = {}
        with self._database.write(synced=False) as session:
            for event, entry_id in entries:
                job = session.get(Job, event.job_id)
                if job is None or job.attempt != event.attempt or State(job.state) in TERMINAL:
                    continue
                if _seen(session, job.id, entry_id):
                    continue
                if worker_events.apply(session, job, event, entry_id):
                    follow[job.id] = job
                changed.add(job.id)
        for job_id in changed:
            self._notify(job_id)
        return list(follow.values())


def _check_queued(session: Session, tenant: str, max_queued: int | None) -> None:
    """Raises OverLimit where no more of the tenant's jobs may wait."""
    if max_queued is None:
        return
    query = select(func.count()).where(Job.tenant_id == tenant, Job.state == State.QUEUED)
    num_queued = session.scalar(query) or 0
    if num_queued >= max_queued:
        raise OverLimit(max_queued, num_queued)


def _seen(session: Session, job_id: str, entry_id: str) -> bool:
    query = select(exists().where(JobEvent.job_id == job_id, JobEvent.entry_id == entry_id))
    return bool(session.scalar(query))


def _owned(tenant: str, job_id: str) -> Select[Job]:
    """One query whatever there is: another tenant's job takes as long to miss as none."""
    return select(Job).where(Job.id == job_id, Job.tenant_id == tenant)


def _required(session: Session, tenant: str, job_id: str) -> Job:
    job = session.scalar(_owned(tenant, job_id))
    if job is None:
        raise LookupError(job_id)
    return job
