"""The moves of one job's row: each changes its state and records the event that says so.

Every function works inside the caller's transaction on a row that was read in it, and refuses a
move that is not a lawful one (`jobs.can_move`). It knows neither how jobs are found nor the queue.
"""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from api import webhooks
from api.models import Job, JobDocument, JobEvent
from jobs import TERMINAL, Event, EventType, Problem, State, can_move

PAUSES_S = (0.0, 15.0)
"""How long a job waits after its first and its second lost attempt. The first one was mostly its worker's
fault, so another worker may go on at once; a second one leaves time for what has taken the memory to end."""
MAX_FAILURES = len(PAUSES_S) + 1
"""A job whose attempts were lost this often has failed."""

PASSED_FOR_S = {"high": 0.0, "normal": 600.0, "low": 3600.0}
"""By priority: a job's rank is the time at which it was accepted and these seconds, so that it is passed by
what comes within them and by nothing later. Nothing starves, whatever goes on coming."""

_ENDS = {
    State.SUCCEEDED: EventType.SUCCEEDED,
    State.FAILED: EventType.FAILED,
    State.CANCELLED: EventType.CANCELLED,
    State.EXPIRED: EventType.EXPIRED,
}


class Busy(Exception):
    """The job is not finished, so it cannot be deleted or retried."""


class Finished(Exception):
    """The job has ended in a way that cannot be cancelled or retried."""


class DocumentGone(Exception):
    """A document of the job was deleted since, so it cannot be retried; the text is its id."""


class BadMove(Exception):
    """A job cannot go from its state to that one; nothing may be committed."""


def cancel(session: Session, job: Job) -> None:
    """End a queued job, ask for the end of a running one; an earlier cancel stands. Raises Finished."""
    state = State(job.state)
    if state is State.QUEUED:
        finish(session, job, State.CANCELLED, {})
    elif state is State.RUNNING:
        move(job, State.CANCELLING)
        record(session, job, EventType.CANCELLING, {})
    elif state not in (State.CANCELLING, State.CANCELLED):
        raise Finished(job.state)


def retry(session: Session, job: Job) -> None:
    """Queue an ended job again as if nothing had gone wrong. Raises Busy, Finished or DocumentGone."""
    if State(job.state) not in TERMINAL:
        raise Busy(job.state)
    if not can_move(State(job.state), State.QUEUED):
        raise Finished(job.state)
    there = set(session.scalars(select(JobDocument.document_id).where(JobDocument.job_id == job.id)))
    for document_id in job.spec["documents"]:
        if document_id not in there:
            raise DocumentGone(document_id)
    job.num_failures = 0
    job.error = None
    job.finished_at = None
    job.expires_at = expiry(job.spec.get("expires_after"), time.time())
    job.expiring = False
    job.rank = rank(job.spec, time.time())
    next_attempt(session, job, "retry")


def rank(spec: dict[str, Any], accepted_at: float) -> float:
    """Where a job stands among those that wait."""
    return accepted_at + PASSED_FOR_S[spec.get("priority", "normal")]


def expiry(expires_after: int | None, accepted_at: float) -> float | None:
    """When a job's time is over, in seconds since the epoch; None for never."""
    return None if expires_after is None else accepted_at + expires_after


def start(session: Session, job: Job, event: Event, entry_id: str | None) -> None:
    """A worker has the current attempt."""
    move(job, State.RUNNING)
    job.worker = event.worker
    job.handed_out = True
    job.started_at = job.started_at or time.time()
    record(session, job, EventType.STARTED, {"attempt": job.attempt, "worker": event.worker}, entry_id)


def next_attempt(
    session: Session,
    job: Job,
    reason: str,
    entry_id: str | None = None,
    detail: str | None = None,
    pause_s: float = 0.0,
) -> None:
    """Queue the job under a new number, which no older attempt can speak for.

    Args:
        detail: what ended a lost attempt.
        pause_s: seconds for which it is not handed out.
    """
    if job.state != State.QUEUED:
        move(job, State.QUEUED)
    job.attempt += 1
    job.handed_out = False
    job.not_before = time.time() + pause_s if pause_s else None
    job.worker = None
    job.progress = None
    data: dict[str, Any] = {"attempt": job.attempt, "reason": reason}
    if detail is not None:
        data |= {"detail": detail, "retry_after_s": pause_s}
    record(session, job, EventType.QUEUED, data, entry_id)


def is_due(job: Job, now: float) -> bool:
    """Whether a queued job may be handed out. A clock that was set back prolongs no pause."""
    return job.not_before is None or not now < job.not_before <= now + PAUSES_S[-1]


def must_stop(job: Job) -> bool:
    """Whether the job is not handed out again when its attempt ends without an end of the job."""
    return job.state == State.CANCELLING or job.expiring


def stop(session: Session, job: Job, entry_id: str | None) -> None:
    """A worker stopped as it was told; a cancel has the last word over an expiry."""
    if job.expiring and job.state == State.RUNNING:
        expire(session, job, entry_id)
    else:
        finish(session, job, State.CANCELLED, {}, entry_id)


_NO_CRASH = ("worker_lost", "worker_error", "api_unreachable")
"""What may end attempts besides the engine's death."""


def lose(session: Session, job: Job, why: Problem, entry_id: str | None = None) -> None:
    """An attempt ended without an end of the job: the next one, or the end after too many."""
    job.num_failures += 1
    if must_stop(job):
        stop(session, job, entry_id)
    elif job.num_failures < MAX_FAILURES:
        next_attempt(session, job, why.code, entry_id, why.detail, PAUSES_S[job.num_failures - 1])
    else:
        if job.state == State.QUEUED:
            move(job, State.RUNNING)
        lost = _lost_attempts(session, job, why)
        causes = "; ".join(f"attempt {each['attempt']} because {each['detail']}" for each in lost)
        died = any(each["code"] not in _NO_CRASH for each in lost)
        problem = Problem(
            code=why.code if why.code in _NO_CRASH else "engine_crashed",
            detail=f"{job.num_failures} attempts were lost, so it is not tried again by itself: {causes}; "
            "retry it when that is mended"
            f"{', or where memory ran out, submit it with fewer or shorter documents' if died else ''}",
            params={"num_failures": job.num_failures, "attempts": lost},
        )
        finish(session, job, State.FAILED, problem.model_dump(mode="json"), entry_id)


def _lost_attempts(session: Session, job: Job, last: Problem) -> list[dict[str, Any]]:
    """What ended each lost attempt since the job was accepted or retried, the current one as `last`."""
    lost: list[dict[str, Any]] = [{"attempt": job.attempt, "code": last.code, "detail": last.detail}]
    queued = select(JobEvent.data).where(JobEvent.job_id == job.id, JobEvent.type == EventType.QUEUED)
    for data in session.scalars(queued.order_by(JobEvent.seq.desc())):
        if data.get("reason") == "retry":
            break
        if "detail" in data:
            lost.append({"attempt": data["attempt"] - 1, "code": data["reason"], "detail": data["detail"]})
    return lost[::-1]


def expire(session: Session, job: Job, entry_id: str | None = None) -> None:
    """End a job whose time is over."""
    limit_s = job.spec.get("expires_after")
    why = Problem(
        code="expired",
        detail=f"it did not end within the {limit_s} s of its expires_after; retry it or submit it with more",
        params={"expires_after": limit_s},
    )
    finish(session, job, State.EXPIRED, why.model_dump(mode="json"), entry_id)


def finish(session: Session, job: Job, end: State, data: dict[str, Any], entry_id: str | None = None) -> None:
    """Move to an end. `data` is the Result, the Problem, or empty."""
    move(job, end)
    job.finished_at = time.time()
    if end in (State.FAILED, State.EXPIRED):
        if data and job.num_done:
            kept = f"{job.num_done:,} of its {job.num_outputs:,} answers are complete and stay its result"
            data = {**data, "detail": f"{data['detail']}; {kept}, and a retry asks only for the others"}
        job.error = data or None
    progress = select(JobEvent.seq).where(JobEvent.job_id == job.id, JobEvent.type == EventType.PROGRESS)
    last = session.scalar(progress.order_by(JobEvent.seq.desc()).limit(1))
    session.execute(
        delete(JobEvent).where(
            JobEvent.job_id == job.id, JobEvent.type == EventType.PROGRESS, JobEvent.seq != (last or 0)
        )
    )
    record(session, job, _ENDS[end], data, entry_id)
    webhooks.owe(session, job, _ENDS[end])


def move(job: Job, new: State) -> None:
    """Change the state. Raises BadMove."""
    if not can_move(State(job.state), new):
        raise BadMove(f"{job.id} cannot go from {job.state} to {new}")
    job.state = new
    job.not_before = None
    job.version += 1


def record(
    session: Session, job: Job, kind: EventType, data: dict[str, Any], entry_id: str | None = None
) -> None:
    """Add an event under the job's next number."""
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
