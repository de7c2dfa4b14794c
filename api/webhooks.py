"""Callbacks at the end of a job: what is owed lies in the database, and is sent until it is taken or too old.

A delivery is written in the transaction that ends its job, so none is forgotten; it may arrive twice, under
the same `webhook-id`. Signatures and the delays follow the Standard Webhooks specification 1.0; after a
secret was exchanged both sign, for as long as was asked for. The address is checked where the connection is
made, on what the name resolved to then, and redirects are not followed.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.to_thread
import httpcore
from sqlalchemy import select
from sqlalchemy.orm import Session

from api import audit
from api.addresses import Network, may_call
from api.db import Database
from api.models import Job, Tenant, WebhookDelivery, new_id
from api.repeat import repeat
from api.tenants import webhook_keys
from jobs import EventType
from jobs.transport import in_words

log = logging.getLogger(__name__)

RETRY_AFTER_S = (5, 300, 1800, 7200, 18_000, 36_000, 50_400, 72_000, 86_400)
"""From one attempt to the next; the last one is about three days after the first."""
ATTEMPT_S = 20.0
AT_ONCE = 8
GONE = 410

Resolve = Callable[[str, int], Awaitable[list[str]]]


class AddressRefused(Exception):
    """A name of a callback leads to addresses that may not be called."""


def owe(session: Session, job: Job, kind: EventType) -> None:
    """Write down that the end of a job is to be told, where its spec asks for that."""
    url = job.spec.get("callback_url")
    if url is None:
        return
    body = {
        "type": str(kind),
        "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(job.finished_at)),
        "data": {
            "id": job.id,
            "type": job.type,
            "state": job.state,
            "model": job.model,
            "attempt": job.attempt,
            "num_outputs": job.num_outputs,
            "num_done": job.num_done,
            "error": job.error,
            "links": {"self": f"/v1/jobs/{job.id}", "result": f"/v1/jobs/{job.id}/result"},
        },
    }
    session.add(
        WebhookDelivery(
            id=new_id("dlv"),
            job_id=job.id,
            url=url,
            body=json.dumps(body, separators=(",", ":")),
            attempts=[],
            created_at=time.time(),
            next_at=time.time(),
        )
    )


@dataclass(frozen=True, slots=True)
class SigningSecret:
    secret: str
    """What a receiver checks signatures with, as the specification writes it."""
    old_until: float | None
    """Until when the one before signs too; None where it does not."""


def signing_secret(tenant: Tenant, now: float) -> SigningSecret:
    keys = webhook_keys(tenant, now)
    secret = "whsec_" + base64.b64encode(keys[0]).decode()
    return SigningSecret(secret, tenant.old_key_until if len(keys) > 1 else None)


def signed(tenant: Tenant, delivery_id: str, sent_at: int, body: bytes) -> dict[str, str]:
    """The three headers of a message."""
    message = f"{delivery_id}.{sent_at}.".encode() + body
    digests = [hmac.new(key, message, hashlib.sha256).digest() for key in webhook_keys(tenant, sent_at)]
    return {
        "webhook-id": delivery_id,
        "webhook-timestamp": str(sent_at),
        "webhook-signature": " ".join(f"v1,{base64.b64encode(digest).decode()}" for digest in digests),
    }


class Webhooks:
    def __init__(
        self, database: Database, networks: Sequence[Network], resolve: Resolve | None = None
    ) -> None:
        """`networks` may be called besides public addresses."""
        self._database = database
        self._backend = _Guarded(networks, resolve or _resolve)

    async def run(self, every_s: float) -> None:
        """Send what is due until cancelled."""

        async def send() -> None:
            await self.send_due(time.time())

        await repeat(send, every_s, log, "webhooks wait for the database", "webhooks could not be sent")

    async def send_due(self, now: float) -> None:
        """One attempt at each delivery that is due, some of them at once."""
        due = await anyio.to_thread.run_sync(self._due, now)
        async with anyio.create_task_group() as tasks:
            for delivery, tenant in due:
                tasks.start_soon(self._attempt, delivery, tenant, now)

    def of_job(self, job_id: str) -> Sequence[WebhookDelivery]:
        """Oldest first."""
        query = select(WebhookDelivery).where(WebhookDelivery.job_id == job_id).order_by(WebhookDelivery.id)
        with self._database.read() as session:
            return session.scalars(query).all()

    def secret_of(self, tenant_id: str) -> SigningSecret:
        with self._database.read() as session:
            return signing_secret(session.get_one(Tenant, tenant_id), time.time())

    def rotate_secret(self, tenant_id: str, overlap_s: float, key_id: str | None = None) -> SigningSecret:
        """Exchange the tenant's secret; the present one goes on signing beside it, one before that ends.

        `key_id` is the key by which that is asked.
        """
        now = time.time()
        with self._database.write() as session:
            tenant = session.get_one(Tenant, tenant_id, with_for_update=True)
            tenant.num_rotations += 1
            tenant.old_key_until = now + overlap_s if overlap_s > 0 else None
            audit.note(session, "rotated", "webhook_secret", tenant_id, tenant_id, key_id)
        return signing_secret(tenant, now)

    def _due(self, now: float) -> list[tuple[WebhookDelivery, Tenant]]:
        query = (
            select(WebhookDelivery, Tenant)
            .join(Job, Job.id == WebhookDelivery.job_id)
            .join(Tenant, Tenant.id == Job.tenant_id)
            .where(WebhookDelivery.next_at <= now)
            .order_by(WebhookDelivery.next_at)
            .limit(AT_ONCE)
        )
        with self._database.read() as session:
            return [(delivery, tenant) for delivery, tenant in session.execute(query)]

    async def _attempt(self, delivery: WebhookDelivery, tenant: Tenant, now: float) -> None:
        status, error = None, None
        try:
            with anyio.fail_after(ATTEMPT_S):
                status = await self._post(delivery, tenant, now)
        except TimeoutError:
            error = f"no answer within {ATTEMPT_S:g} s"
        except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError) as failed:
            error = in_words(failed)
        except AddressRefused as failed:
            error = str(failed)
        except OSError as failed:
            error = in_words(failed)
        except Exception as failed:
            # An attempt that left no trace would be made again at once, and for ever.
            log.exception("%s of %s could not be sent", delivery.id, delivery.job_id)
            error = f"unexpected: {type(failed).__name__}"
        await anyio.to_thread.run_sync(self._note, delivery.id, now, status, error)

    async def _post(self, delivery: WebhookDelivery, tenant: Tenant, now: float) -> int:
        body = delivery.body.encode()
        headers = {
            "content-type": "application/json",
            "user-agent": "longleaf-webhooks",
            **signed(tenant, delivery.id, int(now), body),
        }
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        async with (
            httpcore.AsyncConnectionPool(network_backend=self._backend) as pool,
            pool.stream("POST", delivery.url, headers=encoded, content=body) as answer,
        ):
            return int(answer.status)  # whatever the body says, nobody reads it

    def _note(self, delivery_id: str, now: float, status: int | None, error: str | None) -> None:
        with self._database.write() as session:
            row = session.get(WebhookDelivery, delivery_id)
            if row is None:
                return  # its job was deleted meanwhile
            row.attempts = [*row.attempts, {"at": now, "status": status, "error": error}]
            num_attempts = len(row.attempts)
            if status is not None and 200 <= status < 300:
                row.delivered_at, row.next_at = now, None
            elif status == GONE or num_attempts > len(RETRY_AFTER_S):
                row.next_at = None
            else:
                row.next_at = now + RETRY_AFTER_S[num_attempts - 1]
            if row.delivered_at is None:
                log.info("%s of %s: attempt %d, %s", row.id, row.job_id, num_attempts, error or status)


class _Guarded(httpcore.AsyncNetworkBackend):
    """Connects to an address that was checked, and to no other one that the name may have by then."""

    def __init__(self, networks: Sequence[Network], resolve: Resolve) -> None:
        self._networks = networks
        self._resolve = resolve
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Any = None,
    ) -> httpcore.AsyncNetworkStream:
        found = await self._resolve(host, port)
        allowed = [address for address in found if may_call(address, self._networks)]
        if not allowed:
            raise AddressRefused(
                f"{host} is {', '.join(found) or 'nowhere'}, and callbacks go to public addresses only: "
                "LONGLEAF_CALLBACK_NETWORKS can allow more"
            )
        for address in allowed[:-1]:
            # A name may have an IPv6 address though this machine has no way there.
            with suppress(httpcore.ConnectError, httpcore.ConnectTimeout):
                return await self._inner.connect_tcp(
                    address, port, ATTEMPT_S / (2 * len(allowed)), local_address, socket_options
                )
        return await self._inner.connect_tcp(allowed[-1], port, timeout, local_address, socket_options)

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)


async def _resolve(host: str, port: int) -> list[str]:
    found = await anyio.getaddrinfo(host, port)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))
