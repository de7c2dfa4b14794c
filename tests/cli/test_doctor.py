"""`longleaf doctor` on installations that lack something: what is named, what is to be done, how it ends."""

from __future__ import annotations

import os
import re
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import redis

from cache_store import Keyring, SnapshotStore
from cli import doctor_network
from cli.doctor_keys import snapshot_keys, worker_token
from cli.doctor_network import environment, model_source, port, proxy
from cli.finding import Finding
from cli.settings import Settings
from jobs import PROTOCOL, VERSION, meeting_key
from tests.cli.fake_api import Request, fake_api
from tests.cli.stored_prefixes import make_data
from tests.cli.test_command import ROOT, longleaf


def doctor(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "LONGLEAF_DATA": str(folder / "data"), "PYTHONPATH": str(ROOT)} | variables
    return subprocess.run(
        [sys.executable, "-m", "cli", "doctor"],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_working_installation_ends_with_0_and_changes_nothing(tmp_path: Path) -> None:
    done = doctor(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in (
        "environment", "Python", "clock", "MLX", "compiler", "data folder", "temporary folder", "Redis",
        "database", "snapshot keys", "worker token", "models folder", "model", "model's source", "proxy",
        "port",
    ):  # fmt: skip
        assert f" {name}: " in done.stdout
    assert re.search(r"MLX: .*, which may use [1-9]\d*\.\d GB", done.stdout)
    assert "bad" not in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_everything_that_is_wrong_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "longleaf.db").write_bytes(b"not a database at all" * 100)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = doctor(
            tmp_path,
            LONGLEAF_PORT=port,
            LONGLEAF_MODEL="no/such",
            HF_ENDPOINT="http://127.0.0.1:1",
            REDIS_URL="unix:///tmp/longleaf-nothing-here.sock",
        )
    assert done.returncode == 1
    assert "bad  Redis: no answer" in done.stdout
    assert "bad  database: " in done.stdout
    assert "longleaf restore FILE" in done.stdout
    assert f"warn port: port {port} on 127.0.0.1 is in use" in done.stdout
    assert "bad  model's source: no/such is not on this machine" in done.stdout
    assert "the hub at http://127.0.0.1:1 cannot be reached (Connection refused): " in done.stdout
    assert "python -m worker.models pull no/such" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize("answer", [{"info": {"title": "Longleaf"}}, {"info": {"title": "other"}}, [], "<p>"])
def test_a_port_that_longleaf_has_is_as_it_should_be(answer: object) -> None:
    with fake_api(lambda request: request.reply(200, answer)) as url:
        found = port(Settings(port=int(url.rsplit(":", 1)[1])))
    is_ours = answer == {"info": {"title": "Longleaf"}}
    assert (found.state, found.mend == "") == (("ok", True) if is_ours else ("warn", False))


def test_an_address_that_is_not_here_is_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_network, "_is_longleaf", lambda settings: True)
    found = port(Settings(host="192.0.2.1"))
    assert (found.state, "LONGLEAF_HOST" in found.mend) == ("bad", True)


def test_a_port_whose_program_says_nothing_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_network, "ANSWER_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert port(Settings(port=taken.getsockname()[1])).state == "warn"


def test_a_redis_that_may_forget_jobs_is_a_warning(tmp_path: Path, redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            done = doctor(tmp_path, REDIS_URL=redis_url)
        finally:
            client.config_set("maxmemory-policy", "noeviction")
    assert "warn Redis: " in done.stdout
    assert "set maxmemory-policy noeviction" in done.stdout


def test_a_database_of_a_newer_version_stops_the_start(tmp_path: Path) -> None:
    assert longleaf(tmp_path, "keys", "list").returncode == 0
    with closing(sqlite3.connect(tmp_path / "longleaf.db")) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.commit()
    done = doctor(tmp_path, LONGLEAF_DATA=str(tmp_path))
    assert done.returncode == 1
    assert "bad  database: schema 9999" in done.stdout


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("postgresql+psycopg://u:SECRET@127.0.0.1:1/x", "Connection refused"),
        ("mysql://u:SECRET@127.0.0.1/x", "postgresql+psycopg://USER:PASSWORD@HOST:5432/NAME is accepted"),
        ("postgresql+psycopg://u:SECRET@127.0.0.1:port/x", "LONGLEAF_DATABASE_URL="),
    ],
)
def test_an_address_of_no_database_is_said_without_its_password(tmp_path: Path, url: str, said: str) -> None:
    done = doctor(tmp_path, LONGLEAF_DATABASE_URL=url)
    assert done.returncode == 1
    line = next(line for line in done.stdout.splitlines() if "database: " in line)
    assert line.startswith("bad  database: ")
    assert said in line
    assert "correct LONGLEAF_DATABASE_URL" in done.stdout
    assert "SECRET" not in done.stdout + done.stderr


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    folder.mkdir(mode=0o700)
    Keyring(folder).make("")
    Keyring(folder).make("ab" * 8)
    return folder


def keys_found(folder: Path) -> Finding:
    return snapshot_keys(Settings(snapshot_keys=folder))


def test_a_folder_of_keys_that_is_in_order_is_counted(keys: Path) -> None:
    assert keys_found(keys) == Finding("snapshot keys", "ok", f"2 in {keys}")


def test_prefixes_from_before_the_keys_are_a_warning(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGLEAF_DATA", str(tmp_path / "data"))
    make_data(tmp_path / "data")
    found = keys_found(keys)
    assert found.state == "warn"
    assert found.detail.startswith("7 blocks (")
    assert "longleaf prefixes rm --plain" in found.mend
    SnapshotStore(tmp_path / "data" / "snapshots", 1 << 30, 0, keyring=Keyring(keys)).remove_plain()
    assert keys_found(keys).state == "ok"


def test_a_folder_of_keys_that_is_not_there_is_bad(keys: Path) -> None:
    for folder in (keys / "missing", keys / "default.key"):
        found = keys_found(folder)
        assert found.state == "bad"
        assert f"mkdir -m 700 {folder}" in found.mend


@pytest.mark.parametrize(("name", "mode", "mend"), [("", 0o750, "700"), ("default.key", 0o644, "600")])
def test_keys_that_others_may_read_are_a_warning(keys: Path, name: str, mode: int, mend: str) -> None:
    (keys / name).chmod(mode)
    found = keys_found(keys)
    assert found.state == "warn"
    assert f"({mode:o})" in found.detail
    assert found.mend == f"chmod {mend} {keys / name}"


def test_a_file_that_holds_no_key_is_named(keys: Path) -> None:
    (keys / "default.key").write_text("not a key")
    (keys / "tenant-x.key").symlink_to("/etc/hostname")
    found = keys_found(keys)
    assert found.state == "warn"
    assert found.detail == f"{keys}/default.key holds no key that can be read (1 more)"


def token_found(monkeypatch: pytest.MonkeyPatch, folder: Path, **variables: str) -> Finding:
    for name, value in {"LONGLEAF_DATA": str(folder), **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(folder)
    return worker_token(Settings())


def test_the_token_of_the_data_folder_is_for_one_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "none yet" in token_found(monkeypatch, tmp_path).detail
    token = tmp_path / "worker.token"
    token.write_text("llk_x\n")
    token.chmod(0o600)
    assert token_found(monkeypatch, tmp_path) == Finding("worker token", "ok", str(token))
    token.chmod(0o640)
    assert token_found(monkeypatch, tmp_path).mend == f"chmod 600 {token}"


@pytest.mark.parametrize("token", ["llk_a b", "llk_é", "llk_a\nb"])
def test_a_token_with_a_slip_is_bad_and_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    found = token_found(monkeypatch, tmp_path, LONGLEAF_WORKER_TOKEN=token)
    assert found.state == "bad"
    assert "LONGLEAF_WORKER_TOKEN holds no token" in found.detail
    assert token not in found.detail


def test_a_token_file_that_is_not_there_or_empty_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "token"
    variables = {"LONGLEAF_WORKER_TOKEN_FILE": str(path)}
    assert "cannot be read" in token_found(monkeypatch, tmp_path, **variables).detail
    path.write_text("\n")
    assert token_found(monkeypatch, tmp_path, **variables).detail == f"{path} is empty"


def test_the_api_is_asked_whether_it_takes_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: Request) -> None:
        if request.headers.get("Authorization") == "Bearer llk_good":
            welcome = {"version": VERSION, "protocol": PROTOCOL, "model": "m", "mark": meeting_key("x")}
            request.reply(200, welcome)
        else:
            request.reply(401, {"code": "key_invalid", "detail": "this key is not known"})

    with fake_api(answer) as api:
        variables = {"LONGLEAF_API": api, "LONGLEAF_WORKER_TOKEN": "llk_good"}
        good = token_found(monkeypatch, tmp_path, **variables)
        assert good.state == "ok"
        assert f"taken by {api} (Longleaf {VERSION})" in good.detail
        bad = token_found(monkeypatch, tmp_path, **variables | {"LONGLEAF_WORKER_TOKEN": "llk_bad"})
        assert bad.state == "bad"
        assert "refuses the token" in bad.detail
        # A client's LONGLEAF_API alone makes no worker of this machine.
        monkeypatch.delenv("LONGLEAF_WORKER_TOKEN")
        assert token_found(monkeypatch, tmp_path, LONGLEAF_API=api).state == "ok"


def test_an_env_file_whose_settings_nobody_reads_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOG_FORMAT", raising=False)
    env = tmp_path / ".env"
    env.write_bytes(b"OWNER=J\xfcrgen\nDATABASE_URL=x\n")
    assert environment(Settings()).state == "ok"
    env.write_text("# ours\nexport LONGLEAF_MODEL=x\nREDIS_URL=redis://theirs\n")
    found = environment(Settings())
    assert (found.state, found.detail) == ("warn", "LONGLEAF_MODEL, REDIS_URL in .env here is not read")


def test_a_log_format_of_others_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOG_FORMAT", "pretty")
    assert environment(Settings()).detail == "LOG_FORMAT='pretty' is passed over"


@pytest.mark.parametrize(
    ("variables", "state", "said"),
    [
        ({}, "ok", "none"),
        ({"http_proxy": "http://u:SECRET@10.0.0.1:3128"}, "warn", "would be asked for 127.0.0.1 too"),
        ({"http_proxy": "http://10.0.0.1:3128", "no_proxy": "localhost,127.0.0.1"}, "ok", "10.0.0.1:3128"),
        ({"ALL_PROXY": "socks5://10.0.0.1:1080", "no_proxy": "*"}, "ok", "socks5://10.0.0.1:1080"),
        ({"https_proxy": "socks4://u:SECRET@10.0.0.1:1"}, "bad", "https_proxy='socks4://…@10.0.0.1:1'"),
    ],
)
def test_the_proxies_are_tried(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], state: str, said: str
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = proxy(Settings())
    assert (found.state, said in found.detail, "SECRET" in found.detail) == (state, True, False)


def test_a_model_that_is_here_asks_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner--name").mkdir()
    (tmp_path / "owner--name" / "config.json").write_text("{}")
    monkeypatch.setattr(doctor_network, "ask", lambda *words: ({}, "asked"))
    assert model_source(Settings(models=tmp_path, model="owner/name")).state == "ok"
    assert model_source(Settings(models=tmp_path, model="owner/other")).detail == "asked"
