"""A job as clients see it: its JSON, its ETag, and the answer that carries both."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse

from api.models import Job
from api.problems import ApiError, shown
from api.routes.paging import iso
from jobs import TERMINAL, State

NOT_MODIFIED: dict[int | str, dict[str, Any]] = {304: {"description": "It is as If-None-Match has it."}}


def job_view(job: Job) -> dict[str, Any]:
    """A job as clients see it."""
    return {
        "id": job.id,
        "type": job.type,
        "state": job.state,
        "model": job.model,
        "attempt": job.attempt,
        "created_at": iso(job.created_at),
        "started_at": iso(job.started_at),
        "finished_at": iso(job.finished_at),
        "expires_at": iso(job.expires_at),
        "retry_at": iso(job.not_before),
        "progress": job.progress,
        "num_outputs": job.num_outputs,
        "num_done": job.num_done,
        "num_failures": job.num_failures,
        "error": job.error,
        "spec": job.spec,
        "links": {
            "self": f"/v1/jobs/{job.id}",
            "result": f"/v1/jobs/{job.id}/result",
            "events": f"/v1/jobs/{job.id}/events",
        },
    }


def etag(job: Job) -> str:
    return f'"{job.version}"'


def matches(if_none_match: str | None, tag: str) -> bool:
    """Whether a request's If-None-Match names what is there; also a weak tag, a list or `*`."""
    if if_none_match is None:
        return False
    given = [part.strip().removeprefix("W/") for part in if_none_match.split(",")]
    return "*" in given or tag in given


def has_ended(job: Job) -> bool:
    return State(job.state) in TERMINAL


def respond(job: Job, status: int, headers: dict[str, str] | None = None) -> JSONResponse:
    """The job with its ETag."""
    return JSONResponse(job_view(job), status, headers={"ETag": etag(job), **(headers or {})})


def not_found(job_id: str) -> ApiError:
    return ApiError(404, "job_not_found", f"there is no job {shown(job_id)}")
