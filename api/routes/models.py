"""/v1/models and /v1/workers: what can be asked for, and who is there to answer."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from api.gate import AdminOnly, CallerDep
from api.routes.admission import context_tokens, known_models
from api.services import ServicesDep

router = APIRouter(prefix="/v1", tags=["models"])


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
    """The workers whose presence has not run out, and the job of each, whosever it is."""
    return [status.model_dump(mode="json") for status in services.workers()]
