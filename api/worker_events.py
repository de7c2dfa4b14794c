"""What workers report, applied to one job's row inside the caller's transaction.

It knows what each type of event means and what its data must be, but not where events come from.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from sqlalchemy.orm import Session

from api import held_documents, moves, outputs
from api.attempt import run_request
from api.models import Job, JobResult
from jobs import Event, EventType, Output, Problem, Progress, Result, State, can_move

M = TypeVar("M", bound=BaseModel)

MAX_STORE_NAME = 64


class BadEvent(Exception):
    """An event whose data is not what its type promises; it is dropped."""


def apply(session: Session, job: Job, event: Event, entry_id: str) -> bool:
    """Make the move that an event of the job's current attempt tells of.

    Returns whether the queue must follow. Raises BadEvent, and then nothing may be committed.
    """
    try:
        return _apply(session, job, event, entry_id)
    except moves.BadMove as error:
        raise BadEvent(str(error)) from None


def _apply(session: Session, job: Job, event: Event, entry_id: str) -> bool:
    data = _finite(event.data)
    if job.state == State.QUEUED and event.type not in (EventType.RELEASED, EventType.LOST):
        # Also without job.started, which may have gone down with a Redis: any event shows a start.
        moves.start(session, job, event, entry_id if event.type is EventType.STARTED else None)
    match event.type:
        case EventType.STARTED:
            store = data.get("store")
            if isinstance(store, str) and 0 < len(store) <= MAX_STORE_NAME:
                held_documents.note(session, run_request(session, job), store)
        case EventType.PROGRESS:
            job.progress = _valid(Progress, data).model_dump(mode="json")
            job.version += 1
            moves.record(session, job, event.type, job.progress, entry_id)
        case EventType.CHECKPOINT | EventType.DELTA:
            moves.record(session, job, event.type, data, entry_id)
        case EventType.OUTPUT:
            _keep(session, job, _valid(Output, data), entry_id)
        case EventType.SUCCEEDED:
            try:
                result = outputs.whole(session, job, _valid(Result, data)).model_dump(mode="json")
            except (BadEvent, LookupError) as error:
                # Dropping it would leave a job that nobody works on any more.
                why = Problem(code="invalid_result", detail=f"the worker's result is not one: {error}")
                moves.finish(session, job, State.FAILED, why.model_dump(mode="json"), entry_id)
            else:
                session.add(JobResult(job_id=job.id, result=result))
                moves.finish(session, job, State.SUCCEEDED, result, entry_id)
        case EventType.FAILED:
            moves.finish(session, job, State.FAILED, _reason(data).model_dump(mode="json"), entry_id)
        case EventType.CANCELLED:
            moves.stop(session, job, entry_id)
        case EventType.EXPIRED:
            end = State.EXPIRED if can_move(State(job.state), State.EXPIRED) else State.CANCELLED
            moves.finish(session, job, end, {}, entry_id)
        case EventType.RELEASED:
            if moves.must_stop(job):
                moves.stop(session, job, entry_id)
            else:
                moves.next_attempt(session, job, "released", entry_id)
            return True
        case EventType.LOST:
            moves.lose(session, job, _reason(data), entry_id)
            return True
        case EventType.QUEUED | EventType.CANCELLING:
            raise BadEvent(f"{event.type} is not for a worker to say")
    return False


def _keep(session: Session, job: Job, output: Output, entry_id: str) -> None:
    try:
        is_new = outputs.keep(session, job, output)
    except LookupError as error:
        raise BadEvent(str(error)) from None
    if is_new:
        data = {
            "output_index": output.index,
            "finish_reason": output.finish_reason,
            "num_done": job.num_done,
            "num_outputs": job.num_outputs,
        }
        moves.record(session, job, EventType.OUTPUT, data, entry_id)


def _valid(model: type[M], data: dict[str, Any]) -> M:
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
