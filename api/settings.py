"""Every setting of the API, typed, read once at start from the environment or `.env`.

It owns names, defaults and the messages for bad values. It opens nothing.
"""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Annotated

import platformdirs
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


class SettingsError(Exception):
    """A setting that stops start-up; the text names the variable, the value and what is accepted."""


def _default_model() -> str:
    has_gpu = platform.system() == "Darwin" or Path("/proc/driver/nvidia/version").exists()
    return "mlx-community/Qwen3-4B-Instruct-2507-4bit" if has_gpu else "smollm2-135m-instruct"


def _bytes(value: object) -> object:
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", value.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError("a size is a number of bytes, optionally with KB, MB, GB, KiB, MiB or GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def _redis_url(value: str) -> str:
    if not re.match(r"(rediss?://|unix:///)", value):
        raise ValueError("redis://host:port/db, rediss://… or unix:///path.sock is accepted")
    return value


def _model_id(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?", value):
        raise ValueError("a model id is NAME or OWNER/NAME, of letters, digits, '.', '_' and '-'")
    return value


Bytes = Annotated[int, BeforeValidator(_bytes), Field(ge=1024)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix="LONGLEAF_", env_file=".env", extra="ignore", env_ignore_empty=True, populate_by_name=True
    )

    data: Path = Field(default_factory=lambda: Path(platformdirs.user_data_dir("longleaf")))
    """Holds longleaf.db and what `longleaf up` keeps next to it."""
    models: Path = Field(default_factory=lambda: Path(platformdirs.user_cache_dir("longleaf")) / "models")
    """Folder of model folders, `/` in an id written as `--`."""
    model: Annotated[str, AfterValidator(_model_id)] = Field(default_factory=_default_model)
    """The model of jobs that name none."""
    host: str = "127.0.0.1"
    port: int = Field(default=8321, ge=0, le=65535)
    redis_url: Annotated[str, AfterValidator(_redis_url)] = Field(
        default="redis://127.0.0.1:6379/0", validation_alias="REDIS_URL"
    )
    max_upload_bytes: Bytes = 50_000_000
    extract_wall_s: Seconds = 60.0
    """A PDF whose text takes longer is refused."""
    extract_memory_bytes: Bytes = 2**31
    reconcile_s: Seconds = 2.0
    """Time between two passes that compare the database with the queue."""
    lost_after_s: Seconds = 10.0
    """A queued job that is in no queue and with no worker for longer is handed out again."""
    gone_after_s: Seconds = 5.0
    """A worker whose presence is missing for longer is dead. Presence expires by itself after the
    lease; this only bridges a Redis that was flushed and not yet told again."""

    @property
    def database(self) -> Path:
        return self.data / "longleaf.db"


def load_settings() -> Settings:
    """Read the settings.

    Raises:
        SettingsError: naming each bad variable, its value and what is accepted.
    """
    try:
        return Settings()
    except ValidationError as error:
        lines = []
        for part in error.errors(include_url=False, include_context=False):
            field = str(part["loc"][0]) if part["loc"] else "?"
            name = field if field.isupper() else "LONGLEAF_" + field.upper()
            value = os.environ.get(name, part["input"])
            lines.append(f"{name}={value!r} is not accepted: {part['msg'].removeprefix('Value error, ')}")
        raise SettingsError("\n".join(lines)) from None
