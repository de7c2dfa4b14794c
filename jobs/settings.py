"""What the API, the worker and the command read alike from the environment or `.env`."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Annotated, TypeVar

import platformdirs
from pydantic import AfterValidator, ByteSize, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from jobs.logs import LogFormat

DEFAULT_PORT = 8321

S = TypeVar("S", bound="SharedSettings")


class SettingsError(ValueError):
    """Settings that stop a start: a line for each, with the variable, its value and what is accepted."""


def default_model() -> str:
    """A small model where there is no GPU, the standard one elsewhere."""
    has_gpu = sys.platform == "darwin" or Path("/proc/driver/nvidia/version").exists()
    return "mlx-community/Qwen3-4B-Instruct-2507-4bit" if has_gpu else "smollm2-135m-instruct"


def _redis_url(value: str) -> str:
    if not re.match(r"(rediss?://|unix:///)", value):
        raise ValueError("redis://host:port/0, rediss://host:port/0 or unix:///path.sock is accepted")
    return value


def _tier_url(value: str) -> str:
    if not re.match(r"[a-z][a-z0-9+.-]*://", value):
        raise ValueError(
            "file:///mnt/share/folder, s3://bucket/folder or another address of fsspec is accepted"
        )
    return value


def model_id(model: str) -> str:
    """The id under which a model is served: its own, or of a path the last part, in an id's letters."""
    if not model.startswith(("/", "~", ".")) and not model.endswith(".gguf"):
        return model
    name = Path(model).expanduser().absolute().name.removesuffix(".gguf")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip("._-") or "model"


def _checked_id(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?", value):
        raise ValueError("a model id is NAME or OWNER/NAME, of letters, digits, '.', '_' and '-'")
    return value


RedisUrl = Annotated[str, AfterValidator(_redis_url)]
ModelId = Annotated[str, AfterValidator(_checked_id)]
"""It becomes a word of a command and the name of a folder."""


class SharedSettings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix="LONGLEAF_",
        env_file=".env",
        extra="ignore",
        env_ignore_empty=True,
        populate_by_name=True,
        protected_namespaces=(),
    )

    data: Path = Field(default_factory=lambda: Path(platformdirs.user_data_dir("longleaf")))
    """The database, the queue's files and snapshots/."""
    models: Path = Field(default_factory=lambda: Path(platformdirs.user_cache_dir("longleaf")) / "models")
    """Folder of model folders, `/` in an id written as `--`."""
    model: str = Field(default_factory=default_model, min_length=1)
    """The model that a worker serves, and of jobs that name none: an id or a path."""
    snapshots_bytes: ByteSize = ByteSize(20_000_000_000)
    """Budget of the snapshot store; a number of bytes, or with a unit such as 20GB."""
    shared_tier: Annotated[str, AfterValidator(_tier_url)] | None = None
    """Address that several machines share their stored prefixes through."""
    snapshot_keys: Path | None = None
    """Folder of keys, one for each tenant, that what is stored of its documents is encrypted with."""

    @property
    def model_id(self) -> str:
        """Of `model`."""
        return model_id(self.model)

    @property
    def model_folder(self) -> Path:
        """Where it lies, or is linked from, once `worker.models` has made it."""
        return self.models / folder_name(self.model_id)

    @property
    def snapshots(self) -> Path:
        """Folder of the snapshot store."""
        return self.data / "snapshots"

    @property
    def local_worker_token(self) -> Path:
        """Made by the API: whoever can read its data folder is a worker."""
        return self.data / "worker.token"

    log_format: LogFormat = Field(default="text", validation_alias="LOG_FORMAT")


def load(kind: type[S]) -> S:
    """Read settings of a kind.

    Raises:
        SettingsError: naming every bad variable.
    """
    try:
        return kind()
    except ValidationError as error:
        lines = []
        for part in error.errors(include_url=False, include_context=False):
            field = str(part["loc"][0]) if part["loc"] else "?"
            name = field if field.isupper() else "LONGLEAF_" + field.upper()
            value = _without_password(os.environ.get(name, part["input"]))
            lines.append(f"{name}={value!r} is not accepted: {part['msg'].removeprefix('Value error, ')}")
        raise SettingsError("\n".join(lines)) from None


def _without_password(value: object) -> object:
    """An address as it may be shown; anything else as it is."""
    return re.sub(r"(?<=://)[^/@]*@", "…@", value) if isinstance(value, str) else value


def folder_name(model_id: str) -> str:
    """The name of a model's folder below `models`."""
    return model_id.replace("/", "--")
