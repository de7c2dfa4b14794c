"""Who runs Longleaf on a data folder: a lock that dies with its holder, and a file that says who that is."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError


class UpInfo(BaseModel):
    """The content of up.json."""

    model_config = ConfigDict(protected_namespaces=())

    pid: int
    url: str
    started_at: float
    """Seconds since the epoch."""
    model: str
    redis_url: str


class AlreadyRunning(RuntimeError):
    """Somebody holds the lock; `info` is None while they start."""

    def __init__(self, info: UpInfo | None) -> None:
        super().__init__("already running")
        self.info = info


class UpLock:
    """The lock of a data folder. Only the lock counts; a file without one is stale and means nothing."""

    def __init__(self, data: Path) -> None:
        self._path = data / "up.lock"
        self._info_path = data / "up.json"
        self._fd: int | None = None

    def acquire(self, patience_s: float = 0.0) -> None:
        """Take the lock.

        Raises:
            AlreadyRunning: another process holds it, and still did after `patience_s`.
        """
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        give_up_at = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up_at:
                    os.close(fd)
                    raise AlreadyRunning(self.read()) from None
                time.sleep(0.1)
        self._fd = fd

    def write(self, info: UpInfo) -> None:
        temporary = self._info_path.with_suffix(".tmp")
        temporary.write_text(json.dumps(info.model_dump(), indent=2) + "\n")
        temporary.replace(self._info_path)

    def read(self) -> UpInfo | None:
        try:
            return UpInfo.model_validate_json(self._info_path.read_text())
        except (OSError, ValidationError):
            return None

    def release(self) -> None:
        if self._fd is not None:
            info = self.read()
            if info is not None and info.pid == os.getpid():
                self._info_path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = None


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
