"""The worker's settings, read once from the environment."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, ByteSize, Field

from jobs.settings import RedisUrl, SettingsError, SharedSettings, load

__all__ = ["Settings", "SettingsError", "load_settings"]


def _http_url(value: str) -> str:
    if not value.startswith(("http://", "https://")):
        raise ValueError("expected http://host:port or https://host:port")
    return value.rstrip("/")


class Settings(SharedSettings):
    api: Annotated[str, AfterValidator(_http_url)] = "http://127.0.0.1:8321"
    """Base URL from which documents are read."""
    redis_url: RedisUrl = Field(default="redis://127.0.0.1:6379/0", validation_alias="REDIS_URL")
    memory_bytes: Annotated[ByteSize, Field(gt=0)] | None = None
    """What model and requests may take of the device's memory; all of it where None."""
    verify: Literal["always", "sample", "never"] = "sample"
    """Which restored prefixes are computed one step on and compared with what was kept with them."""


def load_settings() -> Settings:
    """Raises SettingsError for values that are not accepted."""
    return load(Settings)
