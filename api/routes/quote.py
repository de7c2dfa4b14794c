"""/v1/quote: what a job would take, before it is submitted. It says null for what nobody here knows."""

from __future__ import annotations

import itertools
from typing import Any

import anyio.to_thread
from fastapi import APIRouter, Request

from api.gate import CallerDep
from api.routes.admission import look_up, num_outputs, prompt_tokens
from api.routes.spec_body import SPEC_BODY, read_spec
from api.services import Services, ServicesDep
from jobs import JobSpec, ModelCard

router = APIRouter(prefix="/v1/quote", tags=["jobs"])


@router.post("", openapi_extra={"requestBody": SPEC_BODY})
async def quote_job(request: Request, services: ServicesDep, caller: CallerDep) -> dict[str, Any]:
    """Tokens by the model's tokenizer, bytes as a live worker of the model predicts them."""
    _, spec = await read_spec(request)
    return await anyio.to_thread.run_sync(_quote, services, caller.tenant, spec)


def _quote(services: Services, tenant: str, spec: JobSpec) -> dict[str, Any]:
    found = look_up(services, tenant, spec)
    prompt = prompt_tokens(services, spec, found.documents, found.folder) if found.folder else None
    total = None if prompt is None else prompt + spec.max_output_tokens
    card = next((s.card for s in found.workers if s.model == found.model and s.card is not None), None)
    peak = None if card is None or total is None else peak_bytes(card, total)
    return {
        "model": found.model,
        "num_outputs": num_outputs(spec),
        "prompt_tokens": prompt,
        "cached_tokens": None,
        "max_output_tokens": spec.max_output_tokens,
        "context_tokens": found.context_tokens,
        "fits_context": None
        if total is None or found.context_tokens is None
        else total <= found.context_tokens,
        "weights_bytes": card.weights_bytes if card else None,
        "kv_bytes": round(card.kv_bytes_per_token * total) if card and total is not None else None,
        "peak_bytes": peak,
        "memory_bytes": card.memory_bytes if card else None,
        "fits_memory": None
        if card is None or peak is None or not card.memory_bytes
        else peak <= card.memory_bytes,
    }


def peak_bytes(card: ModelCard, num_tokens: int) -> int | None:
    """Between two points of the worker's prediction straight, outside of them unknown."""
    points = sorted(card.peak_points)
    for (few, low), (many, high) in itertools.pairwise(points):
        if few <= num_tokens <= many:
            return round(low + (high - low) * (num_tokens - few) / (many - few))
    return None
