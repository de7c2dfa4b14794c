"""The worker's settings, read once from the environment."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ByteSize, Field

from jobs.settings import ApiUrl, RedisUrl, SettingsError, SharedSettings, load

__all__ = ["Settings", "SettingsError", "load_settings"]


class Settings(SharedSettings):
    api: ApiUrl = "http://127.0.0.1:8321"
    """Base URL from which documents are read."""
    worker_token: str | None = None
    """A key of the scope `worker`, which the API is shown."""
    worker_token_file: Path | None = None
    """A file that holds it instead."""
    redis_url: RedisUrl = Field(default="redis://127.0.0.1:6379/0", validation_alias="REDIS_URL")
    memory_bytes: Annotated[ByteSize, Field(gt=0)] | None = None
    """What model and requests may take of the device's memory; all of it where None."""
    engine_memory_bytes: Annotated[ByteSize, Field(gt=0)] | None = None
    """Resident memory over which the engine process is ended, together with its job; by default a quarter and
    1 GB more than `memory_bytes`, and no limit where that is None too."""
    unverified_model: bool = False
    """Take an architecture that nobody has verified, if it computes what mlx_lm's model does."""
    wired_bytes: Annotated[ByteSize, Field(gt=0)] | None = None
    """What macOS may not page out of an engine's memory; up to macOS where None."""
    steal_after_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 20.0
    """How long a job waits for a busy worker that holds its documents before an idle one takes it; by so much
    may a job be passed by others, too, whose documents a worker holds."""
    verify: Literal["always", "sample", "never"] = "sample"
    """Which restored prefixes are computed one step on and compared with what was kept with them."""

    @property
    def engine_limit_bytes(self) -> int | None:
        """Resident memory over which the engine process is ended."""
        if self.engine_memory_bytes is not None or self.memory_bytes is None:
            return self.engine_memory_bytes
        return self.memory_bytes * 5 // 4 + 1_000_000_000

    def token(self) -> str | None:
        """What the API is shown: the token, else that of the file, else that of an API on this data folder.

        Raises:
            SettingsError: the file that was named cannot be read, or what is there can be no token.
        """
        if self.worker_token is not None:
            return _checked_token(self.worker_token, "LONGLEAF_WORKER_TOKEN")
        path = self.worker_token_file or self.local_worker_token
        try:
            return _checked_token(path.read_bytes().decode("latin-1"), str(path))
        except OSError as error:
            if self.worker_token_file is None:
                return None
            raise SettingsError(
                f"LONGLEAF_WORKER_TOKEN_FILE={str(self.worker_token_file)!r} cannot be read: {error.strerror}"
            ) from error


def _checked_token(value: str, where: str) -> str | None:
    """Without the white space around it. Nothing of it is shown: it may be a good one with a slip in it."""
    token = value.strip()
    if not re.fullmatch(r"[\x21-\x7e]*", token):
        raise SettingsError(
            f"{where} holds no token: one is a word of printable ASCII that begins with llk_, as "
            "`longleaf keys create --scope worker` prints it"
        )
    return token or None


def load_settings() -> Settings:
    """Raises SettingsError for values that are not accepted."""
    return load(Settings)
