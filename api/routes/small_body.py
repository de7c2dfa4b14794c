"""A body of a few fields, read in bounds: FastAPI itself would take one of any length into memory."""

from __future__ import annotations

from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from api.documents.upload import read_json
from api.problems import from_validation

MAX_BYTES = 16 * 1024

M = TypeVar("M", bound=BaseModel)


def body_schema(kind: type[BaseModel], required: bool) -> dict[str, Any]:
    """What OpenAPI says of it."""
    content = {"application/json": {"schema": kind.model_json_schema()}}
    return {"requestBody": {"required": required, "content": content}}


async def read_small(request: Request, kind: type[M]) -> M:
    """The body as a model. Raises ApiError 400, 408, 413, 415 or 422."""
    data = await read_json(request, MAX_BYTES)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise from_validation(error) from None


def has_body(request: Request) -> bool:
    """Whether a request announces one."""
    return "transfer-encoding" in request.headers or request.headers.get("content-length", "0") != "0"
