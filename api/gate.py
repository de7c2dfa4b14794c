"""Whether a request may come in: asked before its body is read, for every route that is not listed as open.

A route that nobody thought of is closed. The scope follows from the method, so a route has nothing to
declare; only what shows more than one tenant asks for `admin` (`AdminOnly`). A worker may sign on, and read
the text and the pages of a document while a job that has not ended reads it: for that one request it acts for
the document's tenant.
"""

from __future__ import annotations

import re
from typing import Annotated, cast

import anyio.to_thread
from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from sqlalchemy.exc import OperationalError
from starlette.types import ASGIApp, Receive, Scope, Send

from api import browser
from api.keys import ANYONE_HERE, WORKER, Caller
from api.keys import Scope as KeyScope
from api.problems import ApiError, database_problem, problem, shown
from api.services import Services

OPEN_PATHS = frozenset({"/health/live", "/health/ready", "/openapi.json", "/docs", "/docs/oauth2-redirect"})
READING = frozenset({"GET", "HEAD", "OPTIONS"})
SIGN_ON = ("POST", "/v1/workers")
_JOB_INPUT = re.compile(r"/v1/documents/([^/\x00]+)/(?:text|pages)")

_bearer = HTTPBearer(auto_error=False, description="An API key, from `longleaf keys create`.")


class Gate:
    """Finds out who calls and refuses whom it does not know; the caller is in `request.state.caller`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        try:
            scope.setdefault("state", {})["caller"] = await _admitted(request)
        except ApiError as error:
            await problem(request, error)(scope, receive, send)
        except OperationalError as error:
            await problem(request, database_problem(error))(scope, receive, send)
        else:
            await self._app(scope, receive, send)


async def _admitted(request: Request) -> Caller | None:
    """Who calls; None for a stranger on an open path. Raises ApiError 401, 403 or 429."""
    services = cast(Services, request.app.state.services)
    path, credential = request.scope["path"], _credential(request)
    is_open = path in OPEN_PATHS
    if credential is None:
        if is_open and services.settings.needs_key:
            return None
        if services.settings.needs_key:
            raise _unauthorized("key_required", "this API asks for a key: send Authorization: Bearer llk_…")
        browser.check(request, services.settings.allowed_hosts)
        return ANYONE_HERE
    caller = await anyio.to_thread.run_sync(_counted, services, credential)
    if caller is None:
        raise _unauthorized(
            "key_invalid",
            "this key is not known here or was revoked; `longleaf keys list` shows the valid ones",
        )
    if is_open:
        return caller
    if (request.method, path) == SIGN_ON:
        require(caller, WORKER)
    elif WORKER in caller.scopes and request.method == "GET" and (read := _JOB_INPUT.fullmatch(path)):
        return await anyio.to_thread.run_sync(_as_reader, services, caller, read[1])
    else:
        require(caller, "read" if request.method in READING else "submit")
    return caller


def _credential(request: Request) -> str | None:
    """What comes behind `Bearer`; None without the header, "" for another scheme."""
    given = request.headers.getlist("Authorization")
    if not given:
        return None
    scheme, _, credential = given[0].partition(" ")
    return credential.strip() if len(given) == 1 and scheme.lower() == "bearer" else ""


def _counted(services: Services, credential: str) -> Caller | None:
    """Who shows a key, one more request of which is let in. Raises ApiError 429."""
    caller = services.keys.caller(credential)
    if caller is not None and caller.key_id is not None and caller.limits.requests_per_minute is not None:
        services.rates.take(caller.key_id, caller.limits.requests_per_minute)
    return caller


def _as_reader(services: Services, worker: Caller, document_id: str) -> Caller:
    """A worker as a reader of one document. Raises ApiError 404 where no job at work reads it."""
    tenant = services.documents.tenant_at_work(document_id)
    if tenant is None:
        detail = (
            f"no job that has not ended reads a document {shown(document_id)}: it is not a worker's to read"
        )
        raise ApiError(404, "document_not_found", detail)
    return Caller(tenant, frozenset({"read"}), worker.key_id)


def _unauthorized(code: str, detail: str) -> ApiError:
    return ApiError(401, code, detail, param="Authorization", headers={"WWW-Authenticate": "Bearer"})


def require(caller: Caller, scope: KeyScope) -> None:
    """Raises ApiError 403 where the caller's key lacks a scope."""
    if not caller.may(scope):
        raise ApiError(
            403,
            "scope_missing",
            f"this needs a key with the scope {scope} and {caller.key_id} has "
            f"{', '.join(sorted(caller.scopes))}: make one with `longleaf keys create --scope {scope}`",
            param="Authorization",
            params={"scope": scope, "scopes": sorted(caller.scopes)},
        )


def _caller(
    request: Request, _shown: Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)] = None
) -> Caller:
    return cast(Caller, request.state.caller)


CallerDep = Annotated[Caller, Depends(_caller)]


def _admin_only(caller: CallerDep) -> None:
    require(caller, "admin")


AdminOnly = Depends(_admin_only)
