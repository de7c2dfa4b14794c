"""/v1/jobs/{id}/events: a job's events as server-sent events, from any point, live to the end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Annotated

import anyio.to_thread
from fastapi import APIRouter, Header, Request, Response
from fastapi.responses import StreamingResponse

from api.gate import CallerDep
from api.methods import is_head
from api.models import JobEvent
from api.routes.job_view import has_ended, not_found
from api.services import Services, ServicesDep

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

PING_S = 15.0
_BATCH = 256
_EVENT = {
    "type": "object",
    "required": ["id", "event", "data"],
    "properties": {"id": {"type": "string"}, "event": {"type": "string"}, "data": {"type": "string"}},
}


@router.get(
    "/{job_id}/events",
    response_class=Response,
    responses={
        200: {"description": "The events.", "content": {"text/event-stream": {"schema": _EVENT}}},
        204: {"description": "The job has ended and its last event was seen."},
    },
)
async def stream_events(
    request: Request,
    job_id: str,
    services: ServicesDep,
    caller: CallerDep,
    last_event_id: Annotated[int, Header(ge=0, le=2**53, description="Resume after this event.")] = 0,
) -> Response:
    """204 when the job has ended and the client has seen its last event: it need not come again."""
    job = await anyio.to_thread.run_sync(services.jobs.owned, caller.tenant, job_id)
    if job is None:
        raise not_found(job_id)
    if has_ended(job) and last_event_id >= job.last_seq:
        return Response(status_code=204)
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    # What HEAD asks about ends at once, with the headers of a stream.
    stream = _nothing() if is_head(request) else _stream(services, job_id, last_event_id)
    return StreamingResponse(stream, media_type="text/event-stream", headers=headers)


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield b""


async def _stream(services: Services, job_id: str, after: int) -> AsyncIterator[bytes]:
    with services.notifier.subscribe(job_id) as changed:
        while True:
            changed.clear()
            rows = await anyio.to_thread.run_sync(services.jobs.events, job_id, after, _BATCH)
            for row in rows:
                yield _format(row)
                after = row.seq
            if len(rows) == _BATCH:
                continue
            job = await anyio.to_thread.run_sync(services.jobs.get, job_id)
            if services.notifier.closed or job is None:
                return
            # By the job, not by the kind of event: a job that was retried has an end in the middle.
            if has_ended(job) and after >= job.last_seq:
                return
            try:
                await asyncio.wait_for(changed.wait(), PING_S)
            except TimeoutError:
                yield b": ping\n\n"


def _format(row: JobEvent) -> bytes:
    # ASCII: U+2028 and its like are no line ends in this format, but many clients take them for one.
    data = json.dumps(row.data, allow_nan=False)
    return f"id: {row.seq}\nevent: {row.type}\ndata: {data}\n\n".encode()
