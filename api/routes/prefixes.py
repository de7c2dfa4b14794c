"""/v1/prefixes: the stored prefixes of live workers; those that hold one are asked to pin or remove it.

To make one is a job like others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from redis.exceptions import RedisError

from api.gate import CallerDep
from api.prefixes import Prefix
from api.problems import ApiError, shown
from api.routes.jobs import ENDED, SUBMIT_HEADERS, submitted
from api.routes.paging import iso
from api.routes.spec_body import WARM_BODY, read_warm
from api.services import Services, ServicesDep

router = APIRouter(prefix="/v1/prefixes", tags=["prefixes"])


@router.get("")
def list_prefixes(services: ServicesDep, caller: CallerDep) -> dict[str, Any]:
    """The last used first; of each worker the 500 that it used last."""
    with _redis_answers():
        return {"data": [_view(prefix) for prefix in services.prefixes.of_tenant(caller.tenant)]}


@router.post("", status_code=202, responses=ENDED, openapi_extra=SUBMIT_HEADERS | {"requestBody": WARM_BODY})
async def warm_prefix(request: Request, services: ServicesDep, caller: CallerDep) -> JSONResponse:
    """Accept a job that reads documents and stores their prefix: the same as a job of the type `warm`."""
    data, spec = await read_warm(request)
    return await submitted(request, services, caller, data, spec)


@router.delete("", status_code=202)
def delete_all_prefixes(services: ServicesDep, caller: CallerDep) -> dict[str, list[str]]:
    """Ask every live worker to remove all that is the caller's, pinned or not, and the key that encrypts it.

    The answer is whom it asked.
    """
    with _redis_answers():
        workers = services.prefixes.forget(caller.tenant)
    services.audit.note("deleted", "prefix", "all", caller.tenant, caller.key_id)
    return {"workers": workers}


@router.post("/{prefix_id}/pin", status_code=202)
def pin_prefix(prefix_id: str, services: ServicesDep, caller: CallerDep) -> dict[str, Any]:
    """Ask that it be kept whatever needs room. The answer is how it was before; the list shows the change."""
    with _redis_answers():
        prefix = _required(services, caller.tenant, prefix_id)
        services.prefixes.command(prefix, "pin")
    return _view(prefix)


@router.post("/{prefix_id}/unpin", status_code=202)
def unpin_prefix(prefix_id: str, services: ServicesDep, caller: CallerDep) -> dict[str, Any]:
    """Ask that it may go where room is needed."""
    with _redis_answers():
        prefix = _required(services, caller.tenant, prefix_id)
        services.prefixes.command(prefix, "unpin")
    return _view(prefix)


@router.delete("/{prefix_id}", status_code=202)
def delete_prefix(prefix_id: str, services: ServicesDep, caller: CallerDep) -> dict[str, Any]:
    """Ask for its removal; blocks that another prefix shares stay."""
    with _redis_answers():
        prefix = _required(services, caller.tenant, prefix_id)
        if prefix.held.pinned:
            raise ApiError(409, "prefix_pinned", f"{prefix_id} is pinned; unpin it first")
        services.prefixes.command(prefix, "remove")
    services.audit.note("deleted", "prefix", prefix_id, caller.tenant, caller.key_id)
    return _view(prefix)


def _required(services: Services, tenant: str, prefix_id: str) -> Prefix:
    prefix = services.prefixes.get(tenant, prefix_id)
    if prefix is None:
        raise ApiError(404, "prefix_not_found", f"no live worker tells of a prefix {shown(prefix_id)}")
    return prefix


@contextmanager
def _redis_answers() -> Iterator[None]:
    """Raises ApiError 503 where Redis does not."""
    try:
        yield
    except (RedisError, OSError) as error:
        raise ApiError(
            503,
            "redis_away",
            f"what workers hold is known through Redis, which does not answer ({type(error).__name__}): "
            "try again",
            headers={"Retry-After": "5"},
        ) from None


def _view(prefix: Prefix) -> dict[str, Any]:
    held = prefix.held
    return {
        "id": held.id,
        "model": held.model,
        "num_tokens": held.num_tokens,
        "disk_bytes": held.disk_bytes,
        "own_bytes": held.own_bytes,
        "prefill_s": held.prefill_s,
        "used_at": iso(held.used_at),
        "pinned": held.pinned,
        "workers": prefix.workers,
    }
