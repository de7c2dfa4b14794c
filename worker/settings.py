"""The worker's settings, read once from the environment or `.env`. The API and the CLI use the same names."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import platformdirs
from pydantic import AfterValidator, ByteSize, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict


class SettingsError(ValueError):
    """A setting that is not accepted: names the variable, its value and what is accepted."""


def default_model() -> str:
    """A small model where there is no GPU, the standard one elsewhere."""
    has_gpu = sys.platform == "darwin" or Path("/proc/driver/nvidia/version").exists()
    return "mlx-community/Qwen3-4B-Instruct-2507-4bit" if has_gpu else "smollm2-135m-instruct"


def _http_url(value: str) -> str:
    if not value.startswith(("http://", "https://")):
        raise ValueError("expected http://host:port or https://host:port")
    return value.rstrip("/")


def _redis_url(value: str) -> str:
    if not value.startswith(("redis://", "rediss://", "unix://")):
        raise ValueError("expected redis://host:port/0, rediss://host:port/0 or unix:///path.sock")
    return value


class Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix="LONGLEAF_",
        env_file=".env",
        extra="ignore",
        env_ignore_empty=True,
        populate_by_name=True,
        protected_namespaces=(),
    )

    data: Path = Field(default_factory=lambda: Path(platformdirs.user_data_dir("longleaf")))
    """Folder that holds snapshots/ (and, on the API's host, the database)."""
    models: Path = Field(default_factory=lambda: Path(platformdirs.user_cache_dir("longleaf")) / "models")
    """Folder of model folders."""
    model: str = Field(default_factory=default_model, min_length=1)
    api: Annotated[str, AfterValidator(_http_url)] = "http://127.0.0.1:8321"
    """Base URL from which documents are read."""
    redis_url: Annotated[str, AfterValidator(_redis_url)] = Field(
        default="redis://127.0.0.1:6379/0", validation_alias="REDIS_URL"
    )
    snapshots_bytes: ByteSize = ByteSize(20_000_000_000)
    """Budget of the snapshot store; a number of bytes, or with a unit such as 20GB."""


def load_settings() -> Settings:
    """Read the settings.

    Raises:
        SettingsError: for the first value that is not accepted.
    """
    try:
        return Settings()
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0])
        variable = field if field == "REDIS_URL" else f"LONGLEAF_{field.upper()}"
        reason = first["msg"].removeprefix("Value error, ")
        raise SettingsError(f"{variable}={first['input']!r} is not accepted: {reason}") from None
