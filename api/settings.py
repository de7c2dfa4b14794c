"""Every setting of the API, typed, read once at start from the environment.

It owns names, defaults and the messages for bad values. It opens nothing.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import NoDecode
from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from api.addresses import Network
from jobs.listening import serves_this_machine_alone
from jobs.loopback import bare
from jobs.settings import (
    DEFAULT_PORT,
    Host,
    ModelId,
    RedisUrl,
    SettingsError,
    SharedSettings,
    default_model,
    load,
    model_id,
)

__all__ = ["Settings", "SettingsError", "load_settings"]

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def _bytes(value: object) -> object:
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", value.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError("a size is a number of bytes, optionally with KB, MB, GB, KiB, MiB or GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def _database_url(value: str) -> str:
    try:
        url = make_url(value)
        is_usable = url.drivername in ("postgresql", "postgresql+psycopg") and bool(url.database)
    except ArgumentError:
        is_usable = False
    if not is_usable:
        raise ValueError("postgresql+psycopg://USER:PASSWORD@HOST:5432/NAME is accepted")
    return value


def _names(value: object) -> object:
    return (
        [part.strip().lower() for part in value.split(",") if part.strip()]
        if isinstance(value, str)
        else value
    )


def _hosts(value: object) -> object:
    found = _names(value)
    return [bare(part) for part in found] if isinstance(found, list) else found


Bytes = Annotated[int, BeforeValidator(_bytes), Field(ge=1024)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Settings(SharedSettings):
    model: Annotated[ModelId, BeforeValidator(model_id)] = Field(default_factory=default_model)
    """The model of jobs that name none."""
    host: Host = "127.0.0.1"
    port: int = Field(default=DEFAULT_PORT, ge=0, le=65535)
    require_key: bool = False
    """Whether an API key is asked for on a loopback address too."""
    redis_url: RedisUrl = Field(default="redis://127.0.0.1:6379/0", validation_alias="REDIS_URL")
    database_url: Annotated[str, AfterValidator(_database_url)] | None = None
    """A PostgreSQL database for several API hosts, in place of the file in the data folder."""
    allowed_hosts: Annotated[list[str], NoDecode, BeforeValidator(_hosts)] = Field(default=[])
    """Names, besides this machine's own, by which the API may be asked without a key; with commas between."""
    callback_networks: Annotated[list[Network], NoDecode, BeforeValidator(_names)] = Field(default=[])
    """Networks such as 10.0.0.0/8 that callbacks may go to, besides public addresses; with commas between."""
    max_upload_bytes: Bytes = 50_000_000
    extract_wall_s: Seconds = 60.0
    """A PDF whose text takes longer is refused."""
    extract_memory_bytes: Bytes = 2**31
    audit_days: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 400.0
    """How long it is kept who made and deleted what."""
    keep_days: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """How long ended jobs, and documents that no job reads, are kept; for ever where it is None."""
    reconcile_s: Seconds = 2.0
    """Time between two passes that compare the database with the queue."""
    lost_after_s: Seconds = 10.0
    """A queued job that is in no queue and with no worker for longer is handed out again."""
    gone_after_s: Seconds = 5.0
    """A worker whose presence is missing for longer is dead. Presence expires by itself after the
    lease; this only bridges a Redis that was flushed and not yet told again."""

    @property
    def needs_key(self) -> bool:
        """Whether requests need an API key: always where others than this machine can send some."""
        return self.require_key or not serves_this_machine_alone(self.host)

    @property
    def database(self) -> Path | URL:
        """Where the database is: a file of SQLite, or PostgreSQL's address."""
        if self.database_url is None:
            return self.data / "longleaf.db"
        return make_url(self.database_url).set(drivername="postgresql+psycopg")


def load_settings() -> Settings:
    """Raises SettingsError for values that are not accepted."""
    return load(Settings)
