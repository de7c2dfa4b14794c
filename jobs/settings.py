"""What the API, the worker and the command read alike from the environment, and from nowhere else.

A `.env` in the current folder is not read: it is another project's as often as not, and could send documents
elsewhere.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qs, urlsplit

import platformdirs
from pydantic import AfterValidator, BeforeValidator, ByteSize, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from jobs.faults import expected
from jobs.logs import LogFormat
from jobs.loopback import address_of

DEFAULT_PORT = 8321

S = TypeVar("S", bound="SharedSettings")


class SettingsError(ValueError):
    """Settings that stop a start: a line for each, with the variable, its value and what is accepted."""


def default_model() -> str:
    """A small model where there is no GPU, the standard one elsewhere."""
    has_gpu = sys.platform == "darwin" or Path("/proc/driver/nvidia/version").exists()
    return "mlx-community/Qwen3-4B-Instruct-2507-4bit" if has_gpu else "smollm2-135m-instruct"


_REDIS_OPTIONS = (
    "client_name",
    "db",
    "health_check_interval",
    "password",
    "protocol",
    "socket_connect_timeout",
    "socket_keepalive",
    "socket_timeout",
    "ssl_ca_certs",
    "ssl_ca_path",
    "ssl_cert_reqs",
    "ssl_certfile",
    "ssl_check_hostname",
    "ssl_keyfile",
    "ssl_min_version",
    "username",
)
"""What may follow a `?` in the address: redis-py hands other names to a constructor that fails on them."""


def _redis_url(value: str) -> str:
    if not re.match(r"(rediss?://|unix:///)", value) or not _has_host_and_port(value):
        raise ValueError(
            "redis://host:port/0, rediss://host:port/0 or unix:///path.sock is accepted, an IPv6 address in "
            "brackets"
        )
    parts = urlsplit(value)
    number = "" if parts.scheme == "unix" else parts.path.strip("/")
    if number and not number.isdecimal():
        raise ValueError(f"the database after the port is a number such as /0, not /{number}")
    unknown = [name for name in parse_qs(parts.query) if name not in _REDIS_OPTIONS]
    if unknown:
        raise ValueError(f"{unknown[0]} is no option of it; {', '.join(_REDIS_OPTIONS)} are")
    return value


def _api_url(value: str) -> str:
    url = value.strip().rstrip("/")
    netloc = url.partition("://")[2].partition("/")[0].rpartition("@")[2]
    if netloc.count(":") > 1 and not netloc.startswith("["):
        raise ValueError("an IPv6 address is written in brackets: http://[::1]:8321")
    if not re.fullmatch(r"https?://[^\s/?#][^\s?#]*", url) or not _has_host_and_port(url):
        raise ValueError("http://HOST:PORT or https://HOST:PORT is accepted, an IPv6 address in brackets")
    return url


def _has_host_and_port(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme == "unix" or (bool(parts.hostname) and parts.port != 0)
    except ValueError:
        return False


def _own(find: Callable[[str], Path], name: str) -> Path:
    """A folder below the user's home, as platformdirs finds it.

    Raises:
        SettingsError: HOME is not set, and the system knows no home of this user.
    """
    try:
        return find("longleaf")
    except RuntimeError as error:
        raise SettingsError(
            f"this user has no home folder: set LONGLEAF_{name} to a folder, or HOME"
        ) from error


def _host(value: str) -> str:
    host = value.strip()
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if address_of(host) is None and not re.fullmatch(r"\w([\w.-]*\w)?\.?", host):
        raise ValueError(
            "an address such as 127.0.0.1, ::1 or 0.0.0.0, or a host's name, is accepted, without http:// "
            "and without a port"
        )
    return host


def _log_format(value: object) -> object:
    # Many programs have a LOG_FORMAT of their own: theirs is no reason not to start.
    return "json" if str(value).lower() == "json" else "text"


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


Host = Annotated[str, AfterValidator(_host)]
"""What to listen on; an IPv6 address without brackets."""
ApiUrl = Annotated[str, AfterValidator(_api_url)]
"""Without a slash at its end."""
RedisUrl = Annotated[str, AfterValidator(_redis_url)]
ModelId = Annotated[str, AfterValidator(_checked_id)]
"""It becomes a word of a command and the name of a folder."""


class SharedSettings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix="LONGLEAF_",
        extra="ignore",
        env_ignore_empty=True,
        populate_by_name=True,
        protected_namespaces=(),
    )

    data: Path = Field(default_factory=lambda: _own(platformdirs.user_data_path, "DATA"))
    """The database, the queue's files and snapshots/."""
    models: Path = Field(default_factory=lambda: _own(platformdirs.user_cache_path, "MODELS") / "models")
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

    log_format: Annotated[LogFormat, BeforeValidator(_log_format)] = Field(
        default="text", validation_alias="LOG_FORMAT"
    )


def load(kind: type[S], given: Mapping[str, Any] | None = None) -> S:
    """Read settings of a kind; `given` are options of a command, which go before the environment.

    Raises:
        SettingsError: naming every bad variable or option.
    """
    given = given or {}
    try:
        return kind(**given)
    except ValidationError as error:
        lines = []
        for part in error.errors(include_url=False):
            field = str(part["loc"][0]) if part["loc"] else "?"
            name = field if field.isupper() else "LONGLEAF_" + field.upper()
            value = given.get(field, os.environ.get(name, part["input"]))
            shown = without_password(value) if isinstance(value, str) else value
            named = f"--{field}" if field in given else name
            lines.append(f"{named}={shown!r} is not accepted: {expected(part)}")
        raise SettingsError("\n".join(dict.fromkeys(lines))) from None


def without_password(url: str) -> str:
    """An address as it may be shown."""
    return re.sub(r"(?<=://)[^/@]*@", "…@", url)


def folder_name(model_id: str) -> str:
    """The name of a model's folder below `models`."""
    return model_id.replace("/", "--")
