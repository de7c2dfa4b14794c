"""`longleaf up`: one command that starts everything, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli import Client
from tests.e2e.stack import (
    MODEL,
    descendants,
    end,
    environment,
    free_port,
    start,
    wait_gone,
    wait_ready,
    wait_until,
)
from worker.models import default_models_dir, ensure

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


NASTY = 'Application Support %20 #1? it\'s "é" 日本語 [x]=$HOME;& ' + "long" * 20
"""Letters that mean something to a shell, an address, a pattern or a parser; and too long for a socket."""


class Up:
    def __init__(self, folder: Path, **more: str) -> None:
        self.port = free_port()
        self.data = folder / NASTY
        self.env = environment(self.data, self.port, **more)
        self.env.pop("REDIS_URL", None)
        self.log = folder / "log"
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        self.process = start(self.log, self.env, "cli", "up")
        with Client(f"http://127.0.0.1:{self.port}") as client:
            wait_ready(client, self.process, self.log)
        return self.process

    def longleaf(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "cli", *words]
        return subprocess.run(
            command, env=self.env, cwd=self.log.parent, capture_output=True, text=True, check=False
        )


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    found = Up(tmp_path)
    try:
        yield found
    finally:
        end(found.process)


def test_ctrl_c_leaves_no_process_and_no_claim(up: Up) -> None:
    ready = f"ready: http://127.0.0.1:{up.port}\n"
    wait_until(lambda: ready in up.log.read_text())
    below = descendants(up.process.pid)
    assert len(below) >= 4, "redis, api, worker and engine"
    there = [up.data, *up.data.rglob("*")]
    assert {path.name for path in there} >= {"longleaf.db-wal", "appendonlydir", "snapshots", "worker.token"}
    assert [path for path in there if path.stat().st_mode & 0o077] == []
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(60) == 0
    assert wait_gone(below) == []
    assert not (up.data / "up.json").exists()


def test_it_runs_without_a_terminal_a_home_and_a_reader_of_what_it_says(tmp_path: Path) -> None:
    """As launchd or systemd start it, and as `longleaf up | head` leaves it."""
    port, data = free_port(), tmp_path / "data"
    env = environment(data, port)
    bare = {name: env[name] for name in env if name.startswith(("LONGLEAF_", "PYTHONPATH"))} | {
        "PATH": "/bin"
    }
    process = subprocess.Popen(
        ["/bin/sh", "-c", f'exec "{sys.executable}" -m cli up <&-'],
        env=bare,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith(b"ready: "):
                break
        assert said[-1].startswith(b"ready: "), b"".join(said).decode()
        process.stdout.close()
        (tmp_path / "note.txt").write_text("The mill at Marrow Quay was built in 1821 by Anna Teal.")
        words = [sys.executable, "-m", "cli", "ask", "note.txt", "Who built the mill?", "--max-tokens", "2"]
        # The access log has a line for each of its requests, which nobody reads.
        asked = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert asked.returncode == 0, asked.stderr
        below = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert wait_gone(below) == []
    finally:
        end(process)


def test_second_up_says_what_is_running(up: Up) -> None:
    second = up.longleaf("up", "--port", str(free_port()))
    assert second.returncode == 2
    assert f"http://127.0.0.1:{up.port}, process {up.process.pid}" in second.stderr
    assert up.process.poll() is None


def test_killed_up_takes_everything_with_it_and_blocks_nothing(up: Up) -> None:
    below = descendants(up.process.pid)
    up.process.kill()
    up.process.wait()
    up.start()
    assert wait_gone(below) == []


def test_down_stops_it(up: Up) -> None:
    below = descendants(up.process.pid)
    stopped = up.longleaf("down")
    assert (stopped.returncode, stopped.stdout) == (0, "stopped\n")
    assert up.process.wait(10) == 0
    assert wait_gone(below) == []
    assert up.longleaf("down").stdout.startswith("nothing runs on")


def test_death_of_one_part_stops_the_rest_and_is_told(up: Up) -> None:
    below = descendants(up.process.pid)
    table = subprocess.run(["ps", "-A", "-o", "pid=,args="], capture_output=True, text=True, check=True)
    lines = [line.split(None, 1) for line in table.stdout.splitlines()]
    (api,) = [int(pid) for pid, args in lines if int(pid) in below and args.endswith("-m api")]
    os.kill(api, signal.SIGKILL)
    assert up.process.wait(60) == 1
    assert wait_gone(below) == []
    why, *_, mend = up.log.read_text().rpartition("stopped because ")[2].splitlines()
    assert why == "the api ended by itself: api (exit -9); it said last:"
    assert mend.startswith("→ the system ends a process this way when memory runs out")


def test_a_model_is_served_by_the_path_of_its_folder(tmp_path: Path) -> None:
    own = tmp_path / "Mein Modell [1] #2 ä?"
    own.symlink_to(ensure(MODEL, default_models_dir()))
    up = Up(tmp_path, LONGLEAF_MODEL=str(own), LONGLEAF_MODELS=str(tmp_path / "Modelle [2] %20 #"))
    try:
        done = up.longleaf("models")
        assert "Mein-Modell-1-2" in done.stdout, done.stderr
        (tmp_path / "note.txt").write_text("The mill at Marrow Quay was built in 1821 by Anna Teal.")
        done = up.longleaf("ask", "note.txt", "Who built the mill?", "--max-tokens", "4")
        assert done.returncode == 0, done.stderr
        assert "output tokens" in done.stdout
    finally:
        end(up.process)
