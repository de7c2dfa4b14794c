"""The stored prefixes that live workers tell of, one tenant's at a time, and commands about one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

from pydantic import ValidationError
from redis import Redis

from api.db import Database
from api.models import Tenant
from api.tenants import prefix_salt
from jobs.prefixes import (
    HOLDINGS_KEY,
    HeldPrefix,
    Holdings,
    PrefixCommand,
    commands_key,
    prefix_owner,
)

log = logging.getLogger(__name__)

COMMAND_EXPIRY_S = 60
"""A worker takes a command within a second; one that is gone leaves it behind."""


@dataclass(frozen=True, slots=True)
class Prefix:
    held: HeldPrefix
    """As the worker tells that used it last."""
    workers: list[str]


class Prefixes:
    def __init__(self, database: Database, redis: Redis) -> None:
        self._database = database
        self._redis = redis

    def of_tenant(self, tenant: str) -> list[Prefix]:
        """The tenant's prefixes, the last used first. Raises RedisError."""
        owner = self.owner(tenant)
        found: dict[str, list[tuple[HeldPrefix, str]]] = {}
        for holdings in self.listings().values():
            for held in holdings.prefixes:
                if held.owner == owner:
                    found.setdefault(held.id, []).append((held, holdings.worker))
        prefixes = [
            Prefix(max((held for held, _ in places), key=lambda h: h.used_at), sorted(w for _, w in places))
            for places in found.values()
        ]
        return sorted(prefixes, key=lambda prefix: (-prefix.held.used_at, prefix.held.id))

    def get(self, tenant: str, prefix_id: str) -> Prefix | None:
        """Raises RedisError."""
        return next((prefix for prefix in self.of_tenant(tenant) if prefix.held.id == prefix_id), None)

    def command(self, prefix: Prefix, op: Literal["pin", "unpin", "remove"]) -> None:
        """Ask every worker that holds the prefix. Raises RedisError."""
        self._tell(prefix.workers, PrefixCommand(op=op, id=prefix.held.id, owner=prefix.held.owner))

    def forget(self, tenant: str) -> list[str]:
        """Ask every live worker to remove all that is the tenant's, with its key; who was asked.

        Raises RedisError.
        """
        workers = sorted(self.listings())
        self._tell(workers, PrefixCommand(op="forget", owner=self.owner(tenant)))
        return workers

    def owner(self, tenant: str) -> str:
        """What stored blocks of the tenant say of whose they are."""
        with self._database.read() as session:
            return prefix_owner(prefix_salt(session.get_one(Tenant, tenant)))

    def _tell(self, workers: Sequence[str], command: PrefixCommand) -> None:
        with self._redis.pipeline(transaction=True) as pipe:
            for worker in workers:
                pipe.rpush(commands_key(worker), command.model_dump_json())
                pipe.expire(commands_key(worker), COMMAND_EXPIRY_S)
            pipe.execute()

    def listings(self) -> dict[str, Holdings]:
        """What each worker tells of, by its name. Raises RedisError."""
        keys = sorted(self._redis.scan_iter(match=HOLDINGS_KEY + "*", count=1000))
        values = cast(list[bytes | None], self._redis.mget(keys)) if keys else []
        found = {}
        for key, value in zip(keys, values, strict=True):
            try:
                if value is not None:  # None: it expired between the two commands
                    listing = Holdings.model_validate_json(value)
                    found[listing.worker] = listing
            except ValidationError as error:
                log.warning("%r holds no listing of prefixes: %s", key, error)
        return found
