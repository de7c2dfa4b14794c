"""`longleaf up` and `longleaf down`: Redis, API and a worker on one machine, on one data folder."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from cli import data_folder
from cli.client import Client
from cli.data_folder import Unusable
from cli.output import Output
from cli.redis_server import (
    NoServer,
    address,
    answers_ping,
    command,
    find_program,
    keep_program,
    place_socket,
    remove_place,
)
from cli.settings import Settings
from cli.supervisor import KILL_WAIT_S, Supervisor
from cli.up_lock import AlreadyRunning, UpInfo, UpLock, is_alive
from jobs.listening import CannotListen, listen
from jobs.loopback import address_of, in_url
from jobs.private_files import make_private, only_for_user
from jobs.settings import without_password

_OUT, _ERR = Output(1), Output(2)
"""Who started `up` may have closed them, or stop reading at any time: nothing ends or waits for that."""


def up(settings: Settings) -> int:
    """Run everything until a signal; the exit status: 0 stopped, 1 something died, 2 refused."""
    umask = only_for_user()
    if not os.path.isabs(os.path.expanduser("~")):
        os.environ["HOME"] = str(settings.data.absolute())  # where libraries keep what they have compiled
    lock = UpLock(settings.data)
    try:
        if risk := data_folder.try_out(settings.data):
            _say(_ERR, f"{risk}: other users of this machine may read documents and answers there")
        _acquire(lock)
    except AlreadyRunning as error:
        _say(_ERR, _running(settings.data, error.info))
        return 2
    except Unusable as error:
        _say(_ERR, str(error))
        return 2
    except OSError as error:
        _say(_ERR, f"the data folder {settings.data} cannot be used: {error.strerror}; run `longleaf doctor`")
        return 2
    try:
        make_private(settings.data)
        return _run(settings, lock, umask)
    except NoServer as error:
        _say(_ERR, str(error))
        return 2
    finally:
        lock.release()


def down(data: Path) -> int:
    """Stop what runs on the data folder; the exit status."""
    lock = UpLock(data)
    try:
        lock.acquire()
    except OSError as error:
        print(
            f"the data folder {data} cannot be used: {error.strerror}; see `longleaf doctor`", file=sys.stderr
        )
        return 2
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
        _say(_OUT, f"process {error.info.pid} was killed; waiting until what it started has stopped")
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


def _run(settings: Settings, lock: UpLock, umask: int) -> int:
    if trouble := _port_trouble(settings.host, settings.port):
        _say(_ERR, trouble)
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
    # Models may be shared with other users.
    if (status := subprocess.run(pull, umask=umask).returncode) != 0:
        _say(_ERR, f"the model {settings.model} is not there and could not be made (see above)")
        return 2 if status == 1 else 1

    folder = settings.data / "redis"
    redis_url, redis_socket = settings.redis_url, None
    if redis_url is not None:
        # The name is common: this may be another project's.
        shown = without_password(redis_url.partition("?")[0])
        _say(_OUT, f"the queue is at {shown} (REDIS_URL); unset that for a Redis of its own")
    else:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        program, redis_socket = find_program(folder), place_socket(folder)
        keep_program(folder, program)
        redis_url = address(redis_socket)
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
    try:
        supervisor.loop()
    finally:
        if redis_socket is not None:
            remove_place(folder, redis_socket)
    if supervisor.asked:
        return 0
    _say(_ERR, _why(supervisor, folder))
    return 1


def _why(supervisor: Supervisor, redis_folder: Path) -> str:
    """Which part ended first, what it said last, and what to do."""
    first, ended = str(supervisor.first), supervisor.ended()
    said = supervisor.printer.last_lines(first)
    # Not the lines of a traceback that say where: what was raised stands after them.
    last = [line for line in said if not line.startswith((" ", "Traceback "))][-4:]
    lines = [f"stopped because the {first} ended by itself: {first} (exit {ended.get(first)}); it said last:"]
    lines += [f"    {line}" for line in last or ["nothing"]]
    return "\n".join([*lines, f"→ {_mend(first, ended.get(first), ' '.join(said), redis_folder)}"])


def _mend(part: str, code: int | None, said: str, redis_folder: Path) -> str:
    if code == -signal.SIGKILL:
        return (
            "the system ends a process this way when memory runs out: serve a smaller model with --model, or "
            "set LONGLEAF_MEMORY_BYTES"
        )
    if part == "redis" and re.search(r"RDB format|RDB version|[Bb]ad file format|AOF", said):
        files = shlex.quote(str(redis_folder / "appendonlydir"))
        return (
            f"this server cannot read the queue's files: move {files} away (jobs that have not ended are "
            "queued again from the database)"
        )
    return "what it said may be enough; `longleaf doctor` checks everything that a start needs"


def _say(where: Output, text: str) -> None:
    where.write(text + "\n")


def _announce(url: str) -> None:
    """Print the one line that scripts wait for, once jobs are worked on."""
    with Client(url, timeout_s=5.0) as client:
        while client.not_ready() is not None:
            time.sleep(0.2)
    _say(_OUT, f"ready: {url}")


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
