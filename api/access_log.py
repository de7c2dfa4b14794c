"""One line a request, for machines that read logs: who asked for what, and what it took."""

from __future__ import annotations

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("api.access")


class AccessLog:
    """Logs a request when its answer begins: an event stream is not silent until it ends."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()

        async def send_and_log(message: Message) -> None:
            if message["type"] == "http.response.start":
                caller = scope.get("state", {}).get("caller")
                fields = {
                    "method": scope["method"],
                    "path": scope["path"],
                    "status": message["status"],
                    "duration_s": round(time.perf_counter() - began, 4),
                    "tenant": getattr(caller, "tenant", None),
                    "key": getattr(caller, "key_id", None),
                }
                log.info(
                    "%s %s %d", scope["method"], scope["path"], message["status"], extra={"fields": fields}
                )
            await send(message)

        await self._app(scope, receive, send_and_log)
