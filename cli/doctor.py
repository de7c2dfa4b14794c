"""`longleaf doctor`: looks at everything that `longleaf up` needs and says what to mend.

What needs another package's libraries (MLX, the kernels' compiler, the database) is asked in a process of its
own, so a broken one is a line here and no crash.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from redis import Redis
from redis.exceptions import RedisError

from cli.doctor_keys import snapshot_keys, worker_token
from cli.doctor_network import environment, model_source, port, proxy
from cli.doctor_places import clock, data_folder, models_folder, own_server, temporary_folder
from cli.finding import Finding, ask
from cli.settings import Settings

_DEVICE = """
import json, mlx.core as mx
from worker.engine.memory import device_bytes
x = mx.ones((8, 8)) @ mx.ones((8, 8)); mx.eval(x)
print(json.dumps({"mlx": mx.__version__, "device": str(mx.default_device()), "num_bytes": device_bytes()}))
"""
_COMPILER = """
import json
from kernels.cpu.build import compilers
print(json.dumps({"compilers": [found.version.splitlines()[0] for found in compilers()]}))
"""
_DATABASE = """
import json, sys
from pathlib import Path
from api.migrate import MigrationError, current, head
from api.settings import SettingsError, load_settings
try:
    place = load_settings().database
    found = {"at": current(place), "head": head()}
except (MigrationError, SettingsError) as error:
    sys.exit(str(error))
print(json.dumps(found | {"path": str(place) if isinstance(place, Path) else ""}))
"""


def examine(settings: Settings) -> Iterator[Finding]:
    """One finding for each thing, in the order in which a start needs them."""
    checks: tuple[Callable[[Settings], Finding], ...] = (
        environment, _python, clock, _device, _compiler, data_folder, temporary_folder, _redis, _database,
        snapshot_keys, worker_token, models_folder, _model, model_source, proxy, port,
    )  # fmt: skip
    for check in checks:
        yield check(settings)


def _python(_: Settings) -> Finding:
    # An older one than 3.11 does not get here.
    return Finding("Python", "ok", f"{'.'.join(map(str, sys.version_info[:3]))}, {sys.executable}")


def _device(_: Settings) -> Finding:
    found, error = ask(_DEVICE)
    if error:
        return Finding("MLX", "bad", error, "install the locked packages again: `make clean demo`")
    detail = f"{found['mlx']} on {found['device']}, which may use {found['num_bytes'] / 1e9:.1f} GB"
    if "gpu" in found["device"]:
        return Finding("MLX", "ok", detail)
    return Finding("MLX", "warn", detail, "without a GPU only small models are of use; see README")


def _compiler(_: Settings) -> Finding:
    if sys.platform == "darwin":
        return Finding("compiler", "ok", "not needed: Metal compiles its own kernels")
    found, error = ask(_COMPILER)
    if not error and found["compilers"]:
        return Finding("compiler", "ok", ", ".join(found["compilers"]))
    mend = "pip install ziglang, or install a C++ compiler; without one attention on a CPU is slow"
    return Finding("compiler", "warn", error or "none for the CPU kernels", mend)


def _redis(settings: Settings) -> Finding:
    if settings.redis_url is None:
        return own_server(settings)
    try:
        with Redis.from_url(settings.redis_url, socket_connect_timeout=3, socket_timeout=3) as client:
            info = client.info("server")
            policy = client.config_get("maxmemory-policy").get("maxmemory-policy", "noeviction")
    except (RedisError, OSError) as error:
        return Finding("Redis", "bad", f"no answer ({error})", "start the server that REDIS_URL names")
    version = str(info["redis_version"])
    if tuple(map(int, version.split(".")[:2])) < (6, 2):
        return Finding("Redis", "bad", version, "install Redis 6.2 or later, or Valkey")
    if policy != "noeviction":
        mend = "set maxmemory-policy noeviction: a server that evicts forgets queued jobs for a while"
        return Finding("Redis", "warn", f"{version}, {policy}", mend)
    return Finding("Redis", "ok", version)


def _database(settings: Settings) -> Finding:
    found, error = ask(_DATABASE)
    is_file = settings.database_url is None
    if error:
        if error.startswith("PermissionError"):
            return Finding("database", "bad", error, "see the data folder")
        mend = (
            "move the file away, or put a backup in its place with `longleaf restore FILE`"
            if is_file
            else "correct LONGLEAF_DATABASE_URL, or start the server and make the database that it names"
        )
        return Finding("database", "bad", error, mend)
    kind = "" if is_file else "PostgreSQL, "
    if found["at"] is None:
        return Finding(
            "database", "ok", f"{kind}none yet; the first start makes {found['path'] or 'the tables'}"
        )
    if found["at"] == found["head"]:
        return Finding("database", "ok", f"{kind}schema {found['at']}")
    if found["at"] > found["head"]:
        mend = "install the newer Longleaf again, or restore a backup"
        return Finding("database", "bad", f"schema {found['at']}, this code knows {found['head']}", mend)
    return Finding("database", "ok", f"schema {found['at']}; the next start brings it to {found['head']}")


def _model(settings: Settings) -> Finding:
    folder = settings.model_folder
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if not missing:
        return Finding("model", "ok", f"{settings.model_id} in {folder}")
    mend = f"`longleaf up` fetches it, or `python -m worker.models pull {settings.model}` does"
    return Finding("model", "warn", f"{settings.model}: no {' and no '.join(missing)} in {folder}", mend)
