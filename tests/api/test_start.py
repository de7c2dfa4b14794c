"""Starting and stopping: what is wrong is said in one sentence, and Redis may be late."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from api_rig import FakeWorker, eventually, result, running

from api.settings import Settings, load_settings
from jobs import EventType
from jobs.listening import has_ipv6
from jobs.settings import DEFAULT_PORT
from tests.redis_process import start_redis

ROOT = Path(__file__).parents[2]


def api_process(folder: Path, **variables: str) -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("LONGLEAF_", "REDIS_"))}
    env |= {
        "LONGLEAF_DATA": str(folder / "data"),
        "LONGLEAF_MODELS": str(folder / "models"),
        "LONGLEAF_PORT": "0",
    }
    env |= {"PYTHONPATH": str(ROOT), "REDIS_URL": "unix:///tmp/longleaf-nothing-here.sock"} | variables
    return subprocess.Popen(
        [sys.executable, "-m", "api"], cwd=folder, env=env, stderr=subprocess.PIPE, text=True
    )


BAD = [
    ("LONGLEAF_PORT", "eighty", "a whole number"),
    ("LONGLEAF_PORT", "70000", "65535"),
    ("LONGLEAF_MAX_UPLOAD_BYTES", "much", "number of bytes"),
    ("LONGLEAF_MAX_UPLOAD_BYTES", "12", "1024"),
    ("LONGLEAF_MODEL", "a/../etc", "OWNER/NAME"),
    ("LONGLEAF_HOST", "http://127.0.0.1", "without http://"),
    ("LONGLEAF_HOST", "127.0.0.1:8321", "without a port"),
    ("LONGLEAF_CALLBACK_NETWORKS", "fd00::/200", "fd00::/8"),
    ("REDIS_URL", "localhost:6379", "redis://"),
    ("REDIS_URL", "redis://::1:6379/0", "in brackets"),
    ("LONGLEAF_RECONCILE_S", "-1", "a number over 0"),
]


@pytest.mark.parametrize(("name", "value", "accepted"), BAD)
def test_a_bad_setting_stops_the_start(tmp_path: Path, name: str, value: str, accepted: str) -> None:
    process = api_process(tmp_path, **{name: value})
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert name in error
    assert value in error
    assert accepted in error
    assert "Traceback" not in error


def test_every_bad_setting_is_named_at_once(tmp_path: Path) -> None:
    process = api_process(tmp_path, LONGLEAF_PORT="x", LONGLEAF_MODEL="a b")
    error = process.communicate(timeout=60)[1]
    assert "LONGLEAF_PORT" in error
    assert "LONGLEAF_MODEL" in error


def test_an_env_file_in_the_current_folder_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".env").write_bytes(b"OWNER=J\xfcrgen\nLONGLEAF_PORT=many\nLOG_FORMAT=pretty\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LONGLEAF_PORT", raising=False)
    assert load_settings().port == DEFAULT_PORT


def test_a_log_format_of_other_programs_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for value in ("pretty", "text", "JSON"):
        monkeypatch.setenv("LOG_FORMAT", value)
        found[value] = load_settings().log_format
    assert found == {"pretty": "text", "text": "text", "JSON": "json"}


@pytest.mark.parametrize(
    ("host", "asks"),
    [
        ("127.0.0.1", False), ("::1", False), ("localhost", False), ("127.8.8.8", False),
        ("::ffff:127.0.0.1", False), ("0.0.0.0", True), ("::", True), ("192.0.2.1", True),
        ("no-such-host.invalid", True),
    ],
)  # fmt: skip
def test_who_can_be_reached_by_others_asks_for_a_key(settings: Settings, host: str, asks: bool) -> None:
    assert settings.model_copy(update={"host": host}).needs_key == asks


@pytest.mark.skipif(not has_ipv6(), reason="IPv6 is switched off here")
def test_the_api_serves_ipv6(settings: Settings) -> None:
    with running(settings.model_copy(update={"host": "::1", "port": 0})) as api:
        assert api.url.startswith("http://[::1]:")
        assert api.http.get("/v1/documents").status_code == 200


def test_a_busy_port_is_named_with_the_next_step(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        process = api_process(tmp_path, LONGLEAF_PORT=port)
        error = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert f"port {port} on 127.0.0.1 is in use" in error
    assert "LONGLEAF_PORT" in error
    assert "Traceback" not in error


def test_a_data_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("in the way")
    process = api_process(tmp_path)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert "LONGLEAF_DATA" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_is_clean(tmp_path: Path, stop: signal.Signals) -> None:
    process = api_process(tmp_path)
    assert process.stderr is not None
    seen = ""
    while "startup complete" not in seen:
        line = process.stderr.readline()
        assert line, seen
        seen += line
    process.send_signal(stop)
    rest = process.communicate(timeout=60)[1]
    assert "Traceback" not in rest
    assert process.returncode in (0, -stop)


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ll-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


def test_without_redis_jobs_are_accepted_and_wait(settings: Settings, socket_folder: Path) -> None:
    url = f"unix://{socket_folder / 'redis.sock'}"
    with running(settings.model_copy(update={"redis_url": url})) as api:
        ready = api.http.get("/health/ready")
        assert ready.status_code == 503
        assert ready.json()["code"] == "not_ready"
        assert ready.json()["checks"]["database"] == "ok"
        assert "not reachable" in ready.json()["checks"]["redis"]
        assert api.http.get("/health/live").status_code == 200
        assert api.http.get("/v1/workers").json() == []
        first, second = api.submit()["id"], api.submit()["id"]
        assert api.http.post(f"/v1/jobs/{second}/cancel").json()["state"] == "cancelled"
        with start_redis(socket_folder):
            eventually(api.queued)
            worker = FakeWorker(api.redis)
            assert worker.take().job_id == first
            assert api.job(first)["attempt"] == 1
            worker.be_there(first, 1)
            worker.say(first, 1, EventType.SUCCEEDED, result())
            api.wait_state(first, "succeeded")
            assert api.queued() == []


def test_a_redis_that_restarts_empty_loses_no_job(settings: Settings, socket_folder: Path) -> None:
    changes = {"redis_url": f"unix://{socket_folder / 'redis.sock'}", "lost_after_s": 0.2}
    with running(settings.model_copy(update=changes)) as api:
        with start_redis(socket_folder):
            job_id = api.submit()["id"]
            eventually(api.queued)
        with pytest.raises(redis.ConnectionError):
            api.redis.ping()
        with start_redis(socket_folder):
            eventually(api.queued)
            request = FakeWorker(api.redis).take()
            assert request.job_id == job_id
            FakeWorker(api.redis).say(job_id, request.attempt, EventType.SUCCEEDED, result())
            api.wait_state(job_id, "succeeded")


@pytest.mark.parametrize("how", [{"LONGLEAF_HOST": "0.0.0.0"}, {"LONGLEAF_REQUIRE_KEY": "1"}])
def test_an_api_that_needs_keys_does_not_start_without_one(tmp_path: Path, how: dict[str, str]) -> None:
    process = api_process(tmp_path, **how)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert "longleaf keys create" in error
    assert "Traceback" not in error
