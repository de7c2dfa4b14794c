"""The parts of `longleaf up`, played by small programs: which ended first, what it said, what times mean."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from cli.supervisor import Supervisor
from tests.cli.test_command import ROOT

_RUN = """
import sys
from cli.supervisor import Supervisor
from cli.up import _why
from pathlib import Path
supervisor = Supervisor("redis", lambda: True)
for name, command in zip(("redis", "api", "worker"), sys.argv[1:]):
    supervisor.add_process(name, command)
supervisor.loop()
print("first:", supervisor.first, file=sys.stderr)
print(_why(supervisor, Path("/data/redis")), file=sys.stderr)
"""


def supervise(*commands: str, code: str = _RUN) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *commands],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_part_that_ended_first_is_named_with_what_it_said_and_not_the_others() -> None:
    """The others say much when they are stopped, and end with a status of their own."""
    noisy = "trap 'echo stopping now; exit 3' TERM; while :; do sleep 0.05; done"
    done = supervise(noisy, "echo starting; echo 'api: the port is taken' >&2; exit 1", noisy)
    assert done.stderr.splitlines() == [
        "first: api",
        "stopped because the api ended by itself: api (exit 1); it said last:",
        "    starting",
        "    api: the port is taken",
        "→ what it said may be enough; `longleaf doctor` checks everything that a start needs",
    ]


def test_of_a_traceback_only_what_was_raised_is_said_again() -> None:
    python = f"exec {shlex.quote(sys.executable)} -c 'def f(): raise ValueError(\"no such thing\")\nf()'"
    done = supervise("exec sleep 60", python, "exec sleep 60")
    assert done.stderr.splitlines()[2:3] == ["    ValueError: no such thing"]


def test_without_redis_the_others_are_not_started(tmp_path: Path) -> None:
    started = tmp_path / "started"
    never_up = _RUN.replace("lambda: True", "lambda: False")
    refused = 'echo "Can\'t handle RDB format version 12"; exit 1'
    done = supervise(refused, f"touch {started}", f"touch {started}", code=never_up)
    assert not started.exists()
    why, said, mend = done.stderr.splitlines()[1:]
    assert why == "stopped because the redis ended by itself: redis (exit 1); it said last:"
    assert said == "    Can't handle RDB format version 12"
    assert "move /data/redis/appendonlydir away" in mend


def test_a_clock_that_is_set_ends_no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part may take its time to stop; setting the clock on by an hour meanwhile is not an hour's wait."""
    times = iter([datetime(2026, 1, 1, 12), datetime(2026, 1, 1, 13), datetime(1970, 1, 1)])

    class Jumping(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return next(times)

    monkeypatch.setattr("cli.supervisor.datetime", Jumping)
    clock = Supervisor("redis", lambda: True)._clock
    first, second = clock.now(), clock.now()
    assert timedelta(0) <= second - first < timedelta(minutes=10)
