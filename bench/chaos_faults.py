"""What is done to a running stack: each fault to one victim, over when the call returns.

It knows processes, disks and clocks, and who is at work; not what the service makes of it.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from redis import Redis
from redis.exceptions import RedisError

from bench.chaos_stack import API, REDIS, ROLES, WORKERS, Stack
from jobs import WORKER_KEY, WorkerStatus

CLOCK_S = 3600


class Faults:
    """The kinds that this machine allows, by name."""

    def __init__(self, stack: Stack, seed: int, stop_s: float, hold_s: float) -> None:
        """
        Args:
            stop_s: how long a process is stopped.
            hold_s: how long a disk is full and a clock wrong.
        """
        self._stack = stack
        self._random = random.Random(seed)
        self._stop_s = stop_s
        self._hold_s = hold_s
        self._redis = Redis.from_url(stack.redis_url, socket_timeout=1)
        self.kinds: dict[str, Callable[[], str]] = {
            "kill -9 an engine": self._kill_engine,
            "kill -9 a worker": lambda: self._kill(self._worker()),
            "kill -9 the API": lambda: self._kill(API),
            "kill -9 Redis": lambda: self._kill(REDIS),
            "kill -9 everything": lambda: self._kill(*ROLES),
            "kill -9 Redis, its data gone": lambda: self._kill(REDIS, erase=True),
            "FLUSHALL": self._flush,
            "SIGSTOP an engine": self._stop_engine,
            "SIGSTOP a worker": lambda: self._stop(self._worker()),
            "SIGSTOP the API": lambda: self._stop(API),
            "SIGSTOP Redis": lambda: self._stop(REDIS),
            "SIGTERM a worker": lambda: self._terminate(self._worker()),
            "SIGTERM the API": lambda: self._terminate(API),
        }
        if stack.has_disks:
            self.kinds |= {
                "full disk of a worker": lambda: self._fill(self._worker()),
                "full disk of the API": lambda: self._fill(API),
                "full disk of Redis": lambda: self._fill(REDIS),
            }
        if stack.has_clocks:
            self.kinds |= {
                "wrong clock of a worker": lambda: self._shift(self._worker()),
                "wrong clock of the API": lambda: self._shift(API),
                "wrong clock of Redis": lambda: self._shift(REDIS),
            }

    @property
    def not_done(self) -> dict[str, str]:
        """Why kinds are missing."""
        return {
            **({} if self._stack.has_disks else {"full disk": "it needs root, to mount small disks"}),
            **({} if self._stack.has_clocks else {"wrong clock": "it needs Linux"}),
        }

    def ended_by(self, kind: str, victim: str) -> set[str]:
        """The roles whose processes a kind ends itself."""
        if kind == "kill -9 everything":
            return set(ROLES)
        return {victim} if kind.startswith(("kill", "SIGTERM")) and "engine" not in kind else set()

    def busy(self) -> list[str]:
        """The workers that have a job in hand; none where Redis does not answer."""
        by_pid = {self._stack.pid(worker): worker for worker in WORKERS}
        found = []
        with suppress(RedisError):
            for key in self._redis.scan_iter(WORKER_KEY + "*"):
                value = cast(Any, self._redis.get(key))
                status = WorkerStatus.model_validate_json(value) if value else None
                if status is not None and status.job_id is not None and status.pid in by_pid:
                    found.append(by_pid[status.pid])
        return sorted(found)

    def _worker(self) -> str:
        """One that is at work, if there is any."""
        return self._random.choice(self.busy() or list(WORKERS))

    def _kill(self, *roles: str, erase: bool = False) -> str:
        self._stack.kill(*roles, erase=erase)
        return "all" if len(roles) > 1 else roles[0]

    def _kill_engine(self) -> str:
        worker = self._worker()
        engine = self._stack.engine(worker)
        if engine is not None:
            with suppress(ProcessLookupError):
                os.kill(engine, signal.SIGKILL)
        return worker

    def _flush(self) -> str:
        with suppress(RedisError):
            self._redis.flushall()
        return REDIS

    def _stop(self, role: str) -> str:
        self._stopped(self._stack.pid(role))
        return role

    def _stop_engine(self) -> str:
        worker = self._worker()
        engine = self._stack.engine(worker)
        if engine is not None:
            self._stopped(engine)
        return worker

    def _stopped(self, pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(self._stop_s)
            os.kill(pid, signal.SIGCONT)

    def _terminate(self, role: str) -> str:
        self._stack.signal(role, signal.SIGTERM)
        return role

    def _fill(self, role: str) -> str:
        filler = self._stack.disk(role) / "filler"
        give_up_at = time.monotonic() + self._hold_s
        with filler.open("wb") as file:
            while time.monotonic() < give_up_at:
                # What others free meanwhile is taken too.
                if free := shutil.disk_usage(filler.parent).free:
                    with suppress(OSError):
                        os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, free)
                time.sleep(0.01)
        filler.unlink()
        return role

    def _shift(self, role: str) -> str:
        self._stack.set_clock(role, self._random.choice((-CLOCK_S, CLOCK_S)))
        time.sleep(self._hold_s)
        self._stack.set_clock(role, 0)
        return role
