"""The command's settings, from the environment."""

from __future__ import annotations

import json
from collections.abc import Mapping

from pydantic import Field

from jobs.loopback import in_url
from jobs.settings import DEFAULT_PORT, ApiUrl, Host, RedisUrl, SettingsError, SharedSettings, load

__all__ = ["DEFAULT_PORT", "Settings", "SettingsError", "load_settings"]


class Settings(SharedSettings):
    host: Host = "127.0.0.1"
    port: int = Field(default=DEFAULT_PORT, ge=1, le=65535)
    api: ApiUrl | None = None
    api_key: str | None = None
    """What the API is shown, where it asks for a key."""
    database_url: str | None = None
    """PostgreSQL's address; a file in the data folder where absent."""
    redis_url: RedisUrl | None = Field(default=None, validation_alias="REDIS_URL")

    @property
    def api_url(self) -> str:
        """LONGLEAF_API, else what runs on the data folder, else the default address."""
        if self.api:
            return self.api
        try:
            return str(json.loads((self.data / "up.json").read_text())["url"])
        except (OSError, ValueError, KeyError, TypeError):
            return f"http://{in_url(self.host)}:{self.port}"


def load_settings(given: Mapping[str, object] | None = None) -> Settings:
    """`given` goes before the environment. Raises SettingsError for values that are not accepted."""
    return load(Settings, given)
