"""A whole service of real processes that is kept up: what dies is started again, as a system would.

Redis with its append-only file, the API, and two workers of the needle model, each with a folder of its own.
Where root may mount, each of these folders is a small disk, which can be filled; on Linux each process has a
clock that can be set (`chaos_clock.c`). It knows no faults.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from bench.machine import ROOT
from cli.redis_server import command, find_program

REDIS, API = "redis", "api"
WORKERS = ("worker-0", "worker-1")
ROLES = (REDIS, API, *WORKERS)
MODEL = "needle"
MODEL_FOLDER = ROOT / "bench" / "needle" / "model"
DISK_BYTES = {REDIS: 64 << 20, API: 64 << 20, WORKERS[0]: 1600 << 20, WORKERS[1]: 1600 << 20}
"""A worker's snapshot store leaves 1 GiB free."""
BACK_AFTER_S = 0.5
"""How long what died stays down."""
STOP_WAIT_S = 40.0


class Stack:
    """`start` and `close` once each; in between everything that ends by itself is started again."""

    def __init__(self, folder: Path) -> None:
        """`folder`: empty, and with a path so short that a socket has room in it."""
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        for role in (*ROLES, "clocks", "models"):
            (folder / role).mkdir()
        (folder / "models" / MODEL).symlink_to(MODEL_FOLDER)
        self.socket = folder / "redis.sock"
        self.has_disks = self._mount()
        self._clock = self._build_clock()
        for role in ROLES:
            (folder / "clocks" / role).write_bytes(bytes(8))
        self.num_starts: Counter[str] = Counter()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._held: set[str] = set()
        self._changing = threading.RLock()
        self._closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep_up, daemon=True)

    @property
    def has_clocks(self) -> bool:
        return self._clock is not None

    @property
    def redis_url(self) -> str:
        return f"unix://{self.socket}"

    def disk(self, role: str) -> Path:
        return self.folder / role

    def start(self) -> None:
        for role in ROLES:
            self._start(role)
        self._keeper.start()

    def pid(self, role: str) -> int:
        return self._processes[role].pid

    def engine(self, worker: str) -> int | None:
        """The process id of a worker's engine child, if it has one."""
        found = subprocess.run(
            ["ps", "--ppid", str(self.pid(worker)), "-o", "pid="], capture_output=True, text=True, check=False
        )
        return next(map(int, found.stdout.split()), None)

    def signal(self, role: str, number: signal.Signals) -> None:
        self._processes[role].send_signal(number)

    def kill(self, *roles: str, erase: bool = False) -> None:
        """kill -9 of all of them at once; with `erase` their files are gone when they are started again."""
        with self._changing:
            for role in roles:
                self._processes[role].kill()
            for role in roles:
                self._processes[role].wait()
                if erase:
                    for path in self.disk(role).iterdir():
                        shutil.rmtree(path) if path.is_dir() else path.unlink()

    def set_clock(self, role: str, ahead_s: int) -> None:
        with (self.folder / "clocks" / role).open("r+b") as file:
            file.write(ahead_s.to_bytes(8, sys.byteorder, signed=True))

    def log(self, role: str) -> str:
        return (self.folder / f"{role}.log").read_text(errors="replace")

    def stop(self) -> None:
        """An orderly stop: workers, API, Redis. A second one changes nothing."""
        self._closing.set()
        if self._keeper.is_alive():
            self._keeper.join()
        for process in reversed(self._processes.values()):
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                process.wait(STOP_WAIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def remove_disks(self) -> None:
        for role in ROLES:
            if self.disk(role).is_mount():
                subprocess.run(["umount", "-l", self.disk(role)], check=False)

    def _keep_up(self) -> None:
        while not self._closing.wait(0.1):
            with self._changing:
                dead = [role for role in ROLES if self._processes[role].poll() is not None]
            if dead:
                time.sleep(BACK_AFTER_S)
            with self._changing:
                for role in dead:
                    self._start(role)

    def _start(self, role: str) -> None:
        self.num_starts[role] += 1
        env = {k: v for k, v in os.environ.items() if not k.startswith("LONGLEAF_")}
        if self._clock is not None:
            env |= {"LD_PRELOAD": str(self._clock), "CHAOS_CLOCK": str(self.folder / "clocks" / role)}
        if role == REDIS:
            words = command(find_program(self.disk(REDIS)), self.disk(REDIS), self.socket)
        else:
            words = [sys.executable, "-m", "api" if role == API else "worker"]
            env |= {
                "PYTHONPATH": str(ROOT),
                "LONGLEAF_DATA": str(self.disk(role)),
                "LONGLEAF_MODELS": str(self.folder / "models"),
                "LONGLEAF_MODEL": MODEL,
                "LONGLEAF_PORT": self.url.rpartition(":")[2],
                "LONGLEAF_API": self.url,
                "REDIS_URL": self.redis_url,
            }
        with (self.folder / f"{role}.log").open("ab") as log:
            self._processes[role] = subprocess.Popen(
                words, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder
            )

    def _mount(self) -> bool:
        for role in ROLES:
            words = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES[role]}", "tmpfs", str(self.disk(role))]
            try:
                subprocess.run(words, capture_output=True, check=True)
            except (OSError, subprocess.CalledProcessError):
                return False
        return True

    def _build_clock(self) -> Path | None:
        if sys.platform != "linux":
            return None
        library = self.folder / "clock.so"
        words = [sys.executable, "-m", "ziglang", "cc", "-shared", "-fPIC", "-O2", "-o", str(library)]
        subprocess.run([*words, str(Path(__file__).with_name("chaos_clock.c"))], check=True)
        return library
