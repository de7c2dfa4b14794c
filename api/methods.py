"""Methods of a path beside those that routes declare: HEAD wherever GET is, and which ones there are.

It knows no route by name. What a HEAD may not start (an event stream) asks `is_head`.
"""

from __future__ import annotations

from fastapi import Request
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_DECLARED = ("GET", "POST", "PUT", "PATCH", "DELETE")


class Heads:
    """Answers HEAD with the status and the headers of GET, and no body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        scope.setdefault("state", {})["is_head"] = True
        ended = False

        async def send_without_body(message: Message) -> None:
            nonlocal ended
            if message["type"] != "http.response.body":
                await send(message)
            elif not ended:
                ended = True
                await send({"type": "http.response.body", "body": b""})

        await self._app({**scope, "method": "GET"}, receive, send_without_body)


def is_head(request: Request) -> bool:
    """Whether the caller asked with HEAD; `request.method` is GET then."""
    return bool(getattr(request.state, "is_head", False))


def allowed(request: Request, path: str | None = None) -> list[str]:
    """The methods of the request's path, or of another one; empty where no route has it."""
    scope = {**request.scope, "path": path or request.scope["path"]}
    methods = [
        method
        for method in _DECLARED
        if any(
            route.matches({**scope, "method": method})[0] is Match.FULL for route in request.app.router.routes
        )
    ]
    if not methods:
        return []
    return [*methods[:1], *(["HEAD"] if "GET" in methods else []), *methods[1:], "OPTIONS"]
