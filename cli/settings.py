"""The command's settings, from the environment or `.env`: the names that API and worker use too."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import platformdirs
from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

DEFAULT_PORT = 8321


class SettingsError(ValueError):
    """A setting that is not accepted: names the variable, its value and what is accepted."""


def default_model() -> str:
    """A small model where there is no GPU, the standard one elsewhere."""
    has_gpu = sys.platform == "darwin" or Path("/proc/driver/nvidia/version").exists()
    return "mlx-community/Qwen3-4B-Instruct-2507-4bit" if has_gpu else "smollm2-135m-instruct"


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
    models: Path = Field(default_factory=lambda: Path(platformdirs.user_cache_dir("longleaf")) / "models")
    model: str = Field(default_factory=default_model, min_length=1)
    host: str = "127.0.0.1"
    port: int = Field(default=DEFAULT_PORT, ge=1, le=65535)
    api: str | None = None
    redis_url: str | None = Field(default=None, validation_alias="REDIS_URL")

    @property
    def api_url(self) -> str:
        """LONGLEAF_API, else what runs on the data folder, else the default address."""
        if self.api:
            return self.api.rstrip("/")
        try:
            return str(json.loads((self.data / "up.json").read_text())["url"])
        except (OSError, ValueError, KeyError, TypeError):
            return f"http://{self.host}:{self.port}"


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
