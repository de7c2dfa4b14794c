"""`longleaf up` and `longleaf down`: Redis, API and a worker on one machine, on one data folder."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from cli.client import Client
from cli.redis_server import NoServer, command, find_program, socket_path
from cli.settings import Settings
from cli.supervisor import KILL_WAIT_S, Supervisor, answers_ping
from cli.up_lock import AlreadyRunning, UpInfo, UpLock, is_alive
from jobs.listening import CannotListen, listen
from jobs.loopback import address_of, in_url


def up(settings: Settings) -> int:
    """Run everything until a signal; the exit status: 0 stopped, 1 something died, 2 refused."""
    lock = UpLock(settings.data)
    try:
        _acquire(lock)
    except AlreadyRunning as error:
        print(_running(settings.data, error.info), file=sys.stderr)
        return 2
    except OSError as error:
        print(f"the data folder {settings.data} cannot be used: {error.strerror}", file=sys.stderr)
        return 2
    try:
        return _run(settings, lock)
    except NoServer as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        lock.release()


def down(data: Path) -> int:
    """Stop what runs on the data folder; the exit status."""
    lock = UpLock(data)
    try:
        lock.acquire()
    except AlreadyRunning as error:
        if error.info is None or not is_alive(error.info.pid):
            print("it is stopping already", flush=True)
        else:
            os.kill(error.info.pid, signal.SIGTERM)
        try:
            lock.acquire(KILL_WAIT_S + 15)
        except AlreadyRunning as still:
            print(f"it did not stop: {_running(data, still.info)}", file=sys.stderr)
            return 1
        print("stopped")
    else:
        print(f"nothing runs on {data}")
    lock.release()
    return 0


def _acquire(lock: UpLock) -> None:
    try:
        lock.acquire()
    except AlreadyRunning as error:
        # The holder may be dead and its processes on their way out: they hold the lock until they are.
        if error.info is None or is_alive(error.info.pid):
            raise
        print(f"process {error.info.pid} was killed; waiting until what it started has stopped", flush=True)
        lock.acquire(KILL_WAIT_S + 5)


def _running(data: Path, info: UpInfo | None) -> str:
    if info is None:
        return f"Longleaf is just starting on {data}"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(info.started_at))
    return (
        f"Longleaf already runs on {data}: {info.url}, process {info.pid}, model {info.model}, "
        f"since {since}; "
        f"stop it with `longleaf down --data {shlex.quote(str(data))}`"
    )


def _run(settings: Settings, lock: UpLock) -> int:
    if trouble := _port_trouble(settings.host, settings.port):
        print(trouble, file=sys.stderr)
        return 2
    url = f"http://{_reachable(settings.host)}:{settings.port}"
    pull = [
        sys.executable,
        "-m",
        "worker.models",
        "pull",
        settings.model,
        "--models-dir",
        str(settings.models),
    ]
    if (status := subprocess.run(pull).returncode) != 0:
        print(f"the model {settings.model} is not there and could not be made (see above)", file=sys.stderr)
        return 2 if status == 1 else 1

    folder = settings.data / "redis"
    redis_url, redis_socket = settings.redis_url, None
    if redis_url is None:
        folder.mkdir(parents=True, exist_ok=True)
        program, redis_socket = find_program(), socket_path(folder)
        redis_url = f"unix://{redis_socket}"
    lock.write(
        UpInfo(pid=os.getpid(), url=url, started_at=time.time(), model=settings.model_id, redis_url=redis_url)
    )
    env = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "LONGLEAF_DATA": str(settings.data.resolve()),
        "LONGLEAF_MODELS": str(settings.models.resolve()),
        "LONGLEAF_MODEL": settings.model,
        "LONGLEAF_HOST": settings.host,
        "LONGLEAF_PORT": str(settings.port),
        "LONGLEAF_API": url,
        "REDIS_URL": redis_url,
    }
    supervisor = Supervisor("redis", lambda: redis_socket is None or answers_ping(redis_socket))
    # `exec`: signals reach the program and not a shell around it.
    if redis_socket is not None:
        supervisor.add_process("redis", "exec " + shlex.join(command(program, folder, redis_socket)), env=env)
    for name in ("api", "worker"):
        supervisor.add_process(name, f"exec {shlex.join([sys.executable, '-m', name])}", env=env)
    threading.Thread(target=_announce, args=(url,), daemon=True).start()
    supervisor.loop()
    if supervisor.asked:
        return 0
    ended = ", ".join(f"{name} (exit {code})" for name, code in supervisor.ended().items())
    print(f"stopped because one of them ended by itself: {ended}; its last lines are above", file=sys.stderr)
    return 1


def _announce(url: str) -> None:
    """Print the one line that scripts wait for, once jobs are worked on."""
    with Client(url, timeout_s=5.0) as client:
        while client.not_ready() is not None:
            time.sleep(0.2)
    print(f"ready: {url}", flush=True)


def _reachable(host: str) -> str:
    """The host by which this machine connects to what listens on `host`."""
    address = address_of(host)
    if address is not None and address.is_unspecified:
        return "127.0.0.1" if address.version == 4 else "[::1]"
    return in_url(host)


def _port_trouble(host: str, port: int) -> str | None:
    try:
        for sock in listen(host, port):
            sock.close()
    except CannotListen as error:
        return str(error)
    return None
