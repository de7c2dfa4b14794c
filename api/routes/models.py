"""/v1/models and /v1/workers: what can be asked for, who is there to answer, and who may join them."""

from __future__ import annotations

import logging
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field
from redis.exceptions import RedisError

from api.gate import AdminOnly, CallerDep
from api.problems import ApiError, shown
from api.routes.admission import context_tokens, known_models
from api.routes.small_body import body_schema, read_small
from api.services import Services, ServicesDep
from jobs import PROTOCOL, VERSION, WorkerStatus
from jobs.prefixes import Holdings
from jobs.spec import Whole

log = logging.getLogger(__name__)

router = APIRouter(prefix="/v1", tags=["models"])

MAX_DOCUMENTS = 100
"""Of those that a worker holds, the last used ones."""


@router.get("/models")
def list_models(services: ServicesDep, _caller: CallerDep) -> list[dict[str, Any]]:
    """The default first. `available`: a live worker has it loaded."""
    workers = services.workers()
    views = []
    for model in known_models(services, workers):
        cards = [status.card for status in workers if status.model == model and status.card is not None]
        view = {
            "id": model,
            "default": model == services.settings.model,
            "available": bool(cards),
            "context_tokens": context_tokens(model, services.folders.get(model), workers),
        }
        if cards:
            view["card"] = cards[0].model_dump(mode="json")
        views.append(view)
    return views


@router.get("/workers", dependencies=[AdminOnly])
def list_workers(services: ServicesDep) -> list[dict[str, Any]]:
    """The workers whose presence has not run out, what each does, holds and has waiting, whosever it is."""
    try:
        workers, listings = services.queue.workers().values(), services.prefixes.listings()
        return [_worker_view(services, status, listings.get(status.name)) for status in workers]
    except (RedisError, OSError):
        return []


def _worker_view(services: Services, status: WorkerStatus, holdings: Holdings | None) -> dict[str, Any]:
    return status.model_dump(mode="json", exclude={"lead"}) | {
        "num_waiting": services.queue.num_waiting(status.model, status.name),
        "documents": services.jobs.held_documents(status.store, status.model, MAX_DOCUMENTS),
        "num_prefixes": len(holdings.prefixes) + holdings.num_left_out if holdings else None,
    }


class Joining(BaseModel):
    """A machine that wants to work."""

    model_config = ConfigDict(extra="forbid", strict=True)

    host: str = Field(min_length=1, max_length=255)
    version: str = Field(min_length=1, max_length=64)
    protocol: Whole = Field(ge=1, lt=2**31)


async def _joining(request: Request) -> Joining:
    return await read_small(request, Joining)


@router.post("/workers", openapi_extra=body_schema(Joining, required=True))
def join(
    joining: Annotated[Joining, Depends(_joining)], services: ServicesDep, caller: CallerDep
) -> dict[str, Any]:
    """Let a machine work: with a worker's key, where keys are needed.

    `mark` is a key that is in the API's Redis for some minutes: a worker that sees it is at the same one.
    """
    if joining.protocol != PROTOCOL:
        raise ApiError(
            409,
            "protocol_mismatch",
            f"this API is Longleaf {VERSION} and speaks protocol {PROTOCOL} with its workers, and "
            f"{shown(joining.host)} has Longleaf {shown(joining.version)}, which speaks {joining.protocol}: "
            "install the same version on both",
            param="protocol",
            params={"protocol": PROTOCOL, "version": VERSION, "value": joining.protocol},
        )
    try:
        mark = services.queue.leave_mark()
    except (RedisError, OSError) as error:
        raise ApiError(
            503,
            "redis_away",
            f"the API's own Redis does not answer ({type(error).__name__}): try again",
            headers={"Retry-After": "5"},
        ) from None
    log.info("a worker of %s joins, with %s", joining.host, caller.key_id or "no key of its own")
    return {"version": VERSION, "protocol": PROTOCOL, "model": services.settings.model, "mark": mark}
