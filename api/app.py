"""create_app(settings): routes, error handlers, request ids, and what runs beside the requests."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import redis.asyncio
from fastapi import FastAPI
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api import migrate, problems
from api.access_log import AccessLog
from api.audit import Audit
from api.db import Database
from api.documents.store import DocumentStore
from api.documents.tokens import ModelFolders
from api.gate import Gate
from api.keys import KeyStore, local_worker_token
from api.leadership import Leadership
from api.methods import Heads
from api.notifier import Notifier
from api.prefixes import Prefixes
from api.queue import JobQueue, connect
from api.rates import RequestRates
from api.reconciler import Reconciler
from api.recorder import Recorder
from api.retention import Retention
from api.routes import audit as audit_routes
from api.routes import documents, events, health, jobs, metrics, models, prefixes, quote
from api.routes import webhooks as webhook_routes
from api.services import Services
from api.settings import Settings
from api.store import JobStore
from api.webhooks import Webhooks
from jobs import VERSION, logs

NUM_READERS = 4


def create_app(settings: Settings) -> FastAPI:
    """The service as an ASGI application. Files and connections are opened when it starts."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await anyio.to_thread.run_sync(migrate.upgrade, settings.database)
        database = Database(settings.database)
        notifier = Notifier(asyncio.get_running_loop())

        def changed(job_id: str) -> None:
            notifier.notify(job_id)
            database.tell_others(job_id)

        job_store = JobStore(database, changed)
        commands = connect(settings.redis_url)
        stream = redis.asyncio.Redis.from_url(
            settings.redis_url,
            socket_connect_timeout=2,
            socket_timeout=10,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
        webhooks = Webhooks(database, settings.callback_networks)
        queue = JobQueue(commands, job_store)
        audit = Audit(database, settings.audit_days)
        app.state.services = Services(
            settings=settings,
            database=database,
            keys=KeyStore(database, local_worker_token(settings.local_worker_token)),
            rates=RequestRates(commands),
            documents=DocumentStore(database),
            jobs=job_store,
            audit=audit,
            queue=queue,
            webhooks=webhooks,
            prefixes=Prefixes(database, commands),
            folders=ModelFolders(settings.models),
            notifier=notifier,
            readers=anyio.CapacityLimiter(NUM_READERS),
        )
        reconciler = Reconciler(
            job_store, queue, lost_after_s=settings.lost_after_s, gone_after_s=settings.gone_after_s
        )

        async def duties() -> None:
            """What one API host does for all."""
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(Recorder(stream, job_store, queue).run, name="recorder")
                tasks.start_soon(reconciler.run, settings.reconcile_s, name="reconciler")
                tasks.start_soon(webhooks.run, settings.reconcile_s, name="webhooks")
                tasks.start_soon(audit.run, name="audit")
                if settings.keep_days is not None:
                    tasks.start_soon(Retention(database, settings.keep_days, changed).run, name="retention")

        try:
            # A group of anyio waits for the threads of what it cancels: the database is closed after them.
            async with anyio.create_task_group() as tasks:
                if isinstance(settings.database, Path):
                    tasks.start_soon(duties)
                else:
                    from api import changes  # needs PostgreSQL's driver, which not every installation has

                    tasks.start_soon(Leadership(settings.database).run, duties, name="leadership")
                    tasks.start_soon(changes.listen, settings.database, notifier, name="changes")
                try:
                    yield
                finally:
                    notifier.close()
                    tasks.cancel_scope.cancel()
        finally:
            await stream.aclose()
            commands.close()
            database.close()

    app = FastAPI(
        title="Longleaf",
        version=VERSION,
        lifespan=lifespan,
        redirect_slashes=False,  # a redirect would lead to whatever the Host header says
        responses=problems.RESPONSES,
    )
    app.add_middleware(Gate)
    app.add_middleware(Heads)
    app.add_middleware(AccessLog)
    app.add_middleware(RequestIds)  # around the others: what they refuse or log has an id too
    problems.install(app)
    for route in (
        documents, jobs, quote, events, webhook_routes, prefixes, models, audit_routes, health, metrics,
    ):  # fmt: skip
        app.include_router(route.router)
    return app


class RequestIds:
    """Gives every request an id, the caller's X-Request-ID where it is usable, and returns it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        request_id = given if re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        logs.request_id.set(request_id)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["X-Request-ID"] = request_id
                headers["X-Content-Type-Options"] = "nosniff"  # a document is text, whatever it looks like
            await send(message)

        await self._app(scope, receive, send_with_id)
