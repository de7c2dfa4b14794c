"""What became of a job's callbacks, and the secret that proves them to be ours."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field

from api.gate import CallerDep, require
from api.models import WebhookDelivery
from api.routes.job_view import not_found
from api.routes.paging import iso
from api.routes.small_body import body_schema, has_body, read_small
from api.services import ServicesDep
from api.webhooks import SigningSecret
from jobs.spec import Whole

DAY_S = 86_400

router = APIRouter(prefix="/v1", tags=["webhooks"])


@router.get("/jobs/{job_id}/deliveries")
def list_deliveries(job_id: str, services: ServicesDep, caller: CallerDep) -> list[dict[str, Any]]:
    """The callbacks of a job, each with its attempts; one for each end, so more than one after a retry."""
    if services.jobs.owned(caller.tenant, job_id) is None:
        raise not_found(job_id)
    return [_view(delivery) for delivery in services.webhooks.of_job(job_id)]


@router.get("/webhooks/secret")
def get_secret(services: ServicesDep, caller: CallerDep) -> dict[str, Any]:
    """The tenant's signing secret, for whoever may submit: a reader must not be able to forge callbacks."""
    require(caller, "submit")
    return _secret_view(services.webhooks.secret_of(caller.tenant))


class Rotation(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    overlap_s: Whole = Field(default=DAY_S, ge=0, le=30 * DAY_S)
    """For how long the secret so far signs too; 0 where it has leaked."""


async def _rotation(request: Request) -> Rotation:
    return await read_small(request, Rotation) if has_body(request) else Rotation()


@router.post("/webhooks/secret/rotate", openapi_extra=body_schema(Rotation, required=False))
def rotate_secret(
    services: ServicesDep, caller: CallerDep, rotation: Annotated[Rotation, Depends(_rotation)]
) -> dict[str, Any]:
    """Exchange the signing secret for another one. Until `old_until` messages carry both signatures."""
    require(caller, "read")
    made = services.webhooks.rotate_secret(caller.tenant, rotation.overlap_s, caller.key_id)
    return _secret_view(made)


def _secret_view(found: SigningSecret) -> dict[str, Any]:
    return {"secret": found.secret, "old_until": iso(found.old_until)}


def _view(delivery: WebhookDelivery) -> dict[str, Any]:
    return {
        "id": delivery.id,
        "url": delivery.url,
        "state": "delivered" if delivery.delivered_at else "waiting" if delivery.next_at else "given_up",
        "created_at": iso(delivery.created_at),
        "delivered_at": iso(delivery.delivered_at),
        "next_attempt_at": iso(delivery.next_at),
        "attempts": [{**attempt, "at": iso(attempt["at"])} for attempt in delivery.attempts],
    }
