"""The real processes with the real model, started one by one or by `longleaf up`."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from cli import Client

PATIENCE_S = 240.0
ROOT = Path(__file__).parents[2]
MODEL = "smollm2-135m-instruct"

REPORT = "\n\n".join(
    f"Section {number}. The station at Kilometre {number * 7} was built in {1900 + number} by the engineer "
    f"Ada Nkemelu and holds {number * 12} tonnes of grain. It is inspected every {number + 2} months."
    for number in range(1, 9)
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(data: Path, port: int, **more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("LONGLEAF_") or k == "LONGLEAF_MODELS"}
    return {
        **kept,
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "LONGLEAF_DATA": str(data),
        "LONGLEAF_MODEL": MODEL,
        "LONGLEAF_PORT": str(port),
        "LONGLEAF_API": f"http://127.0.0.1:{port}",
        **more,
    }


def start(log: Path, env: dict[str, str], *words: str) -> subprocess.Popen[bytes]:
    """`python -m WORDS` with its output appended to `log`."""
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", *words], env=env, stdout=file, stderr=subprocess.STDOUT, cwd=log.parent
        )


def wait_ready(client: Client, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while (reason := client.not_ready()) is not None:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, f"{reason}\n{log.read_text()}"
        time.sleep(0.1)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def descendants(pid: int) -> list[int]:
    """The processes below `pid`, children before their own."""
    table = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True)
    parents = [tuple(map(int, line.split())) for line in table.stdout.splitlines()]
    found = [pid]
    for known in found:
        found += [child for child, parent in parents if parent == known and child not in found]
    return found[1:]


def engine_of(worker: subprocess.Popen[bytes]) -> int:
    """The process id of a worker's engine child."""
    (child,) = descendants(worker.pid)
    return child


def wait_gone(pids: list[int]) -> list[int]:
    """Wait for the end of processes that are not ours; those that live on after the patience is over."""
    deadline = time.monotonic() + PATIENCE_S
    left = []
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                left.append(pid)
        finally:
            os.close(fd)
    return left


def end(*processes: subprocess.Popen[bytes]) -> None:
    """Stop what a test has left running."""
    for process in processes:
        if process.poll() is None:
            below = descendants(process.pid)
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                for pid in [process.pid, *below]:
                    os.kill(pid, signal.SIGKILL)
                process.wait()
