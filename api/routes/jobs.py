"""/v1/jobs: from a spec to a queued job, and everything a client asks about it."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Annotated, Any

import anyio.to_thread
from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import JSONResponse

from api.gate import CallerDep
from api.keys import Caller
from api.limits import OverLimit, too_many_jobs
from api.models import Job
from api.moves import Busy, DocumentGone, Finished
from api.problems import ApiError
from api.routes import idempotency
from api.routes.admission import admit
from api.routes.documents import not_found as document_not_found
from api.routes.job_view import NOT_MODIFIED, etag, has_ended, job_view, matches, not_found, respond
from api.routes.paging import After, Limit, page
from api.routes.spec_body import SPEC_BODY, read_spec
from api.routes.waiting import MAX_WAIT_S, preferred_wait_s, wait_until
from api.services import Services, ServicesDep
from api.store import KeyReused, KeyTaken
from jobs import TERMINAL, JobSpec, State

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

ENDED: dict[int | str, dict[str, Any]] = {200: {"description": "The job, which has ended."}}
SUBMIT_HEADERS: dict[str, Any] = {
    "parameters": [
        {
            "in": "header",
            "name": idempotency.HEADER,
            "description": "The same key and body give the same job.",
            "schema": {"type": "string", "minLength": 1, "maxLength": idempotency.MAX_CHARS},
        },
        {
            "in": "header",
            "name": "Prefer",
            "description": f"wait=N: hold the answer back until the job has ended, up to {MAX_WAIT_S} s.",
            "schema": {"type": "string"},
            "example": "wait=30",
        },
    ],
}


@router.post("", status_code=202, responses=ENDED, openapi_extra=SUBMIT_HEADERS | {"requestBody": SPEC_BODY})
async def create_job(request: Request, services: ServicesDep, caller: CallerDep) -> JSONResponse:
    """Accept a job. It is in the database when this answers and will reach an end whatever happens.

    202 while it has not ended, 200 once it has: within `Prefer: wait`, or found by its Idempotency-Key.
    """
    data, spec = await read_spec(request)
    return await submitted(request, services, caller, data, spec)


async def submitted(
    request: Request, services: Services, caller: Caller, data: Any, spec: JobSpec
) -> JSONResponse:
    """The answer to a request for a job, by what its headers ask for beside its body."""
    key = idempotency.checked_key(request.headers.getlist(idempotency.HEADER))
    digest = idempotency.digest(data) if key is not None else ""
    job, is_new = await anyio.to_thread.run_sync(_create_once, services, caller, spec, key, digest)
    headers = {"Location": f"/v1/jobs/{job.id}", **({} if is_new else idempotency.REPLAYED)}
    wait_s = preferred_wait_s(request.headers.getlist("Prefer"))
    if wait_s is not None:
        headers["Preference-Applied"] = f"wait={wait_s}"
        job = await wait_until(
            services, job.id, has_ended, wait_s, partial(_required, services, caller.tenant, job.id)
        )
    return respond(job, 200 if has_ended(job) else 202, headers)


@router.get("")
def list_jobs(
    services: ServicesDep,
    caller: CallerDep,
    state: State | None = None,
    limit: Limit = 50,
    after: After = None,
) -> dict[str, Any]:
    return page(services.jobs.page(caller.tenant, state, limit + 1, after), limit, job_view)


@router.get("/{job_id}", responses=NOT_MODIFIED)
async def get_job(
    job_id: str,
    services: ServicesDep,
    caller: CallerDep,
    wait: Annotated[float, Query(ge=0, le=MAX_WAIT_S, description="Seconds to wait for a change.")] = 0,
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    """The job now; with `wait`, once it differs from If-None-Match (or from now) or has ended."""
    seen = if_none_match

    def is_news(job: Job) -> bool:
        nonlocal seen
        if seen is None and wait:
            seen = etag(job)
        return not matches(seen, etag(job)) or has_ended(job)

    job = await wait_until(
        services, job_id, is_news, wait, partial(_required, services, caller.tenant, job_id)
    )
    if matches(if_none_match, etag(job)):
        return Response(status_code=304, headers={"ETag": etag(job)})
    return respond(job, 200)


RESULT: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The result. Of a job that has failed, expired or was cancelled: the answers that are "
        "complete, with `complete` false; `index` says which of the `num_outputs` each one is."
    },
    409: {"description": "The job has not ended, or ended with no answer complete."},
}


@router.get("/{job_id}/result", responses=NOT_MODIFIED | RESULT)
def get_result(
    job_id: str,
    services: ServicesDep,
    caller: CallerDep,
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    job = _required(services, caller.tenant, job_id)
    if State(job.state) not in TERMINAL:
        raise ApiError(409, "job_unfinished", f"{job_id} is {job.state}; wait with /v1/jobs/{job_id}?wait=30")
    if job.state == State.SUCCEEDED or job.num_done:
        if matches(if_none_match, etag(job)):
            return Response(status_code=304, headers={"ETag": etag(job)})
        result = services.jobs.result(job_id)
        if result is None:  # deleted since
            raise not_found(job_id)
        return JSONResponse(result, headers={"ETag": etag(job)})
    detail = job.error["detail"] if job.error else f"the job is {job.state}"
    raise ApiError(409, f"job_{job.state}", f"{job_id} has no result: {detail}", error=job.error)


@router.post("/{job_id}/cancel", status_code=202)
def cancel_job(job_id: str, services: ServicesDep, caller: CallerDep) -> JSONResponse:
    """Ask for an end. A queued job ends at once, a running one as soon as its worker has stopped."""
    try:
        job = services.jobs.cancel(caller.tenant, job_id)
    except LookupError:
        raise not_found(job_id) from None
    except Finished as error:
        raise ApiError(
            409,
            "job_finished",
            f"{job_id} is {error} already and cannot be cancelled",
            params={"state": str(error)},
        ) from None
    services.queue.try_follow(job)
    return respond(job, 202)


@router.post("/{job_id}/retry", status_code=202)
def retry_job(job_id: str, services: ServicesDep, caller: CallerDep) -> JSONResponse:
    """Queue a failed, cancelled or expired job again; its events go on where they were."""
    try:
        job = services.jobs.retry(caller.tenant, job_id, caller.limits.max_queued_jobs)
    except LookupError:
        raise not_found(job_id) from None
    except Busy as error:
        raise ApiError(
            409,
            "job_unfinished",
            f"{job_id} is {error}; only a failed, cancelled or expired job is retried: "
            f"wait with /v1/jobs/{job_id}?wait=30 or cancel it",
            params={"state": str(error)},
        ) from None
    except Finished as error:
        raise ApiError(
            409,
            "job_finished",
            f"{job_id} is {error}; only a failed, cancelled or expired job is retried: submit its spec "
            "as a new job for another result",
            params={"state": str(error)},
        ) from None
    except OverLimit as error:
        raise too_many_jobs(error) from None
    except DocumentGone as error:
        raise ApiError(
            409,
            "document_gone",
            f"{job_id} reads {error}, which was deleted; upload it again and submit a new job",
            params={"document": str(error)},
        ) from None
    services.queue.try_follow(job)
    return respond(job, 202)


@router.delete("/{job_id}", status_code=204)
def delete_job(job_id: str, services: ServicesDep, caller: CallerDep) -> Response:
    """Delete a finished job with its result and events."""
    try:
        services.jobs.delete(caller.tenant, job_id, caller.key_id)
    except LookupError:
        raise not_found(job_id) from None
    except Busy as error:
        raise ApiError(
            409, "job_unfinished", f"{job_id} is {error}; cancel it first", params={"state": str(error)}
        ) from None
    return Response(status_code=204)


def _create_once(
    services: Services, caller: Caller, spec: JobSpec, key: str | None, body_sha256: str
) -> tuple[Job, bool]:
    """The job of this request and whether it is new. A job that is there needs no admission again."""
    while True:
        try:
            known = services.jobs.keyed(caller.tenant, key, body_sha256) if key is not None else None
        except KeyReused as error:
            raise idempotency.reused(error, spec) from None
        if known is not None:
            return known, False
        with suppress(KeyTaken):  # by a request of the same moment, whose job is now there
            return _create(services, caller, spec, key, body_sha256), True


def _create(services: Services, caller: Caller, spec: JobSpec, key: str | None, body_sha256: str) -> Job:
    model = admit(services, caller.tenant, spec)
    try:
        limit = caller.limits.max_queued_jobs
        job = services.jobs.create(caller.tenant, spec, model, key, body_sha256, limit)
    except OverLimit as error:
        raise too_many_jobs(error) from None
    except LookupError as error:  # deleted since it was admitted
        raise document_not_found(str(error), "documents") from None
    services.queue.try_follow(job)
    return job


def _required(services: Services, tenant: str, job_id: str) -> Job:
    job = services.jobs.owned(tenant, job_id)
    if job is None and services.audit.was_retired("job", job_id, tenant):
        raise ApiError(
            410,
            "job_gone",
            f"{job_id} ended longer ago than jobs are kept here (LONGLEAF_KEEP_DAYS) and was deleted with "
            "its result; submit it again for another one",
        )
    if job is None:
        raise not_found(job_id)
    return job
