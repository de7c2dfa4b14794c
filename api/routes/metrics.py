"""/metrics: the service's numbers in the text format of Prometheus."""

from __future__ import annotations

import time

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from api.gate import AdminOnly
from api.metrics import ServiceCollector
from api.services import ServicesDep

router = APIRouter(tags=["health"])


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}},
    dependencies=[AdminOnly],
)
def metrics(services: ServicesDep) -> Response:
    """The state of jobs, workers and events at this moment."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ServiceCollector(services.database, services.queue, time.time()))
    return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
