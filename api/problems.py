"""Errors as RFC 9457 problem+json: the one place that decides what an error means to a client."""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from sqlalchemy.exc import DataError, OperationalError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from api.methods import allowed, is_head
from jobs.faults import field_path, told

log = logging.getLogger(__name__)

_CODES = {406: "not_acceptable"}


_BODY = {
    "type": "object",
    "required": ["type", "title", "status", "detail", "code", "param", "request_id"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "code": {"type": "string"},
        "param": {"type": ["string", "null"]},
        "request_id": {"type": ["string", "null"]},
    },
}
RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/problem+json": {"schema": _BODY}}}
    for status, text in {
        "4XX": "Refused; `code` and `detail` say why and what to do.",
        "503": "Not ready, or too busy just now.",
        "507": "No room on the disk.",
    }.items()
}
"""What every route may answer besides its own, for OpenAPI."""


class ApiError(Exception):
    """A refusal: status, stable code, one sentence that names limit, value and next step.

    `param` is the field, query parameter or header at fault; `extra` are further members of the
    problem, such as `params` with the numbers of the sentence.
    """

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        **extra: Any,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.param = param
        self.headers = dict(headers or {})
        self.extra = extra


def problem(request: Request, error: ApiError) -> JSONResponse:
    """The response for a refusal."""
    request_id = getattr(request.state, "request_id", None)
    body = {
        "type": f"urn:longleaf:problem:{error.code}",
        "title": HTTPStatus(error.status).phrase,
        "status": error.status,
        "detail": error.detail,
        "code": error.code,
        "param": error.param,
        "request_id": request_id,
        **error.extra,
    }
    headers = dict(error.headers)
    if request_id is not None:
        headers["X-Request-ID"] = request_id
    return JSONResponse(body, error.status, headers=headers, media_type="application/problem+json")


def shown(value: str) -> str:
    """What a caller wrote, as part of a sentence: cut where it is long, since it may be very long."""
    return repr(value) if len(value) <= 80 else f"{value[:80]!r}… ({len(value)} characters)"


def invalid_fields(errors: Sequence[Any], skip: frozenset[str] = frozenset()) -> ApiError:
    """422 that names each wrong field, with its value where that is short.

    `skip` are names in a path that the caller never wrote (`body`, the tag of a union).
    """
    found = []
    for error in errors:
        loc = list(error["loc"])
        while loc and loc[0] in skip:
            loc.pop(0)
        found.append({"param": field_path(loc), "detail": told(error)})
    first = found[0]
    detail = f"{first['param'] or 'the body'}: {first['detail']}"
    if len(found) > 1:
        detail += f" (and {len(found) - 1} more, see errors)"
    return ApiError(422, "invalid_request", detail, param=first["param"] or None, errors=found[:32])


def database_problem(error: OperationalError) -> ApiError:
    """What a database that refuses means: no room, or too much at once."""
    if "full" in str(error.orig).lower():
        return ApiError(507, "storage_full", "the disk that holds the database is full; free some space")
    log.error("database: %s", error)
    detail = "the database did not answer within 5 s; try again"
    return ApiError(503, "database_busy", detail, headers={"Retry-After": "2"})


def no_route(request: Request) -> ApiError:
    """404 for a path that no route has, with the one that was probably meant."""
    path = request.url.path
    without_slash = path.rstrip("/")
    if without_slash and without_slash != path and allowed(request, without_slash):
        detail = f"there is no route {shown(path)}: leave out the slash at its end"
    else:
        detail = f"there is no route {shown(path)}; /docs lists them"
    return ApiError(404, "not_found", detail)


def no_method(request: Request) -> Response:
    """405 with every method that the path has; 204 with the same where that was the question."""
    methods = allowed(request)
    headers = {"Allow": ", ".join(methods)}
    if request.method == "OPTIONS":
        return Response(status_code=204, headers=headers)
    method = "HEAD" if is_head(request) else request.method
    return problem(
        request,
        ApiError(
            405,
            "method_not_allowed",
            f"{shown(method)[1:-1]} is not possible on {shown(request.url.path)}; it has {headers['Allow']}",
            headers=headers,
            params={"methods": methods},
        ),
    )


def install(app: FastAPI) -> None:
    """Turn everything that can be raised in a route into a problem."""

    async def refused(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        return problem(request, error)

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        skip = frozenset({"body", "query", "path", "header"})
        return problem(request, invalid_fields(error.errors(), skip))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            return problem(request, no_route(request))
        if error.status_code == 405:
            return no_method(request)
        code = _CODES.get(error.status_code, "bad_request" if error.status_code < 500 else "internal_error")
        return problem(request, ApiError(error.status_code, code, str(error.detail), headers=error.headers))

    async def database(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, OperationalError)
        return problem(request, database_problem(error))

    async def unstorable(request: Request, error: Exception) -> JSONResponse:
        # PostgreSQL has no text with a NUL; everything else that it may refuse is checked before.
        assert isinstance(error, DataError)
        log.warning("the database refuses a value: %s", error.orig)
        return problem(request, ApiError(422, "invalid_request", "a NUL character is in no id, name or text"))

    async def system(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, OSError)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            detail = "the disk for uploads on their way is full; free some space or set TMPDIR"
            return problem(request, ApiError(507, "storage_full", detail))
        log.error("unexpected", exc_info=error)
        return await unexpected(request, error)

    async def left(request: Request, _error: Exception) -> JSONResponse:
        return problem(
            request, ApiError(400, "client_left", "the client left before its request was complete")
        )

    async def unexpected(request: Request, _error: Exception) -> JSONResponse:
        detail = "something unexpected went wrong; the API's log has it under this request_id"
        return problem(request, ApiError(500, "internal_error", detail))

    app.add_exception_handler(ApiError, refused)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(OperationalError, database)
    app.add_exception_handler(DataError, unstorable)
    app.add_exception_handler(OSError, system)
    app.add_exception_handler(ClientDisconnect, left)
    app.add_exception_handler(Exception, unexpected)


def from_validation(error: ValidationError, skip: frozenset[str] = frozenset()) -> ApiError:
    """The same for a pydantic model that a route validates itself."""
    return invalid_fields(error.errors(include_url=False), skip)
