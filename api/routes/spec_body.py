"""A job's spec as the body of a request: how it is read, and what OpenAPI says of it."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from pydantic import ValidationError

from api.documents.upload import read_json
from api.problems import from_validation
from jobs import Ask, JobSpec, Prompt, Summarize, Warm, parse_spec

MAX_SPEC_BYTES = 32 * 1024 * 1024
_TAGS = frozenset({"summarize", "ask", "prompt", "warm"})

SPEC_BODY: dict[str, Any] = {
    "required": True,
    "content": {
        "application/json": {
            "schema": {
                "oneOf": [model.model_json_schema() for model in (Summarize, Ask, Prompt, Warm)],
                "discriminator": {"propertyName": "type"},
            }
        }
    },
}
WARM_BODY: dict[str, Any] = {
    "required": True,
    "content": {"application/json": {"schema": Warm.model_json_schema()}},
}


async def read_spec(request: Request) -> tuple[Any, JobSpec]:
    """The body as JSON and as a spec. Raises ApiError 400, 413, 415 or 422."""
    data = await read_json(request, MAX_SPEC_BYTES)
    try:
        return data, parse_spec(data)
    except ValidationError as error:
        raise from_validation(error, _TAGS) from None


async def read_warm(request: Request) -> tuple[Any, Warm]:
    """As `read_spec`, where the type goes without saying."""
    data = await read_json(request, MAX_SPEC_BYTES)
    try:
        return data, Warm.model_validate(data)
    except ValidationError as error:
        raise from_validation(error, _TAGS) from None
