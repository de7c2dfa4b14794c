"""/health: whether the process lives, and whether a job sent now would be worked on."""

from __future__ import annotations

from typing import Any, cast

from fastapi import APIRouter, Request
from redis.exceptions import RedisError
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from api.keys import Caller
from api.problems import ApiError
from api.services import Services, ServicesDep

router = APIRouter(prefix="/health", tags=["health"])


@router.get("/live")
async def live() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/ready")
def ready(request: Request, services: ServicesDep) -> dict[str, Any]:
    """200 when database, Redis and a worker with the default model are there, else 503 and which is not.

    The reasons name hosts and models: where keys are needed, they are for an admin.
    """
    checks = {"database": _database(services), "redis": _redis(services)}
    checks["worker"] = _worker(services) if checks["redis"] == "ok" else "unknown while Redis is away"
    caller = cast(Caller | None, request.state.caller)
    if caller is None or not caller.may("admin"):
        checks = {name: state if state == "ok" else "not ok" for name, state in checks.items()}
    bad = [f"{name}: {state}" for name, state in checks.items() if state != "ok"]
    if bad:
        raise ApiError(503, "not_ready", "; ".join(bad), headers={"Retry-After": "2"}, checks=checks)
    return {"status": "ok", "checks": checks}


def _database(services: Services) -> str:
    try:
        with services.database.read() as session:
            session.execute(text("SELECT 1 FROM jobs LIMIT 1"))
    except SQLAlchemyError as error:
        return f"not readable ({error.__cause__ or error})"
    return "ok"


def _redis(services: Services) -> str:
    try:
        services.queue.ping()
    except (RedisError, OSError) as error:
        return f"not reachable at {_without_password(services.settings.redis_url)} ({error})"
    return "ok"


def _worker(services: Services) -> str:
    model = services.settings.model
    serving = [status for status in services.workers() if status.model == model]
    if any(s.card is not None and s.state in ("idle", "busy") for s in serving):
        return "ok"
    if serving:
        states = ", ".join(f"{s.name} is {s.state}" for s in serving)
        return f"none has {model} loaded ({states})"
    return f"none serves {model}; start one with `longleaf up` or `python -m worker`"


def _without_password(url: str) -> str:
    head, at, tail = url.rpartition("@")
    return f"{head.partition('://')[0]}://…@{tail}" if at else url
