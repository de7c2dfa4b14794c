"""What a worker that joins is refused with: API, token, version, Redis or model, and the next step."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from redis import Redis

from jobs import PROTOCOL, VERSION, meeting_key
from tests.cli.fake_api import Request, fake_api
from tests.tls_proxy import tls_proxy
from worker.join import join
from worker.redis_server import CannotStart
from worker.settings import Settings, SettingsError

MARK = meeting_key("here")


def welcoming(request: Request) -> None:
    request.reply(200, {"version": VERSION, "protocol": PROTOCOL, "model": "no/such", "mark": MARK})


def settings(folder: Path, api: str, redis_url: str, **more: str | Path) -> Settings:
    return Settings(data=folder, models=folder, api=api, redis_url=redis_url, **more)  # type: ignore[arg-type]


def refusal(folder: Path, redis_url: str, answer: Callable[[Request], None], **more: str | Path) -> str:
    with fake_api(answer) as api, pytest.raises(CannotStart) as caught:
        join(settings(folder, api, redis_url, **more))
    return str(caught.value)


def test_no_api_is_named_with_its_address(tmp_path: Path, redis_url: str) -> None:
    with pytest.raises(CannotStart, match=r"no API at http://127.0.0.1:1 .*LONGLEAF_HOST"):
        join(settings(tmp_path, "http://127.0.0.1:1", redis_url))


def test_something_else_than_longleaf_is_told_apart(tmp_path: Path, redis_url: str) -> None:
    said = refusal(tmp_path, redis_url, lambda request: request.reply(404, "<h1>no</h1>", "text/html"))
    assert f"is it Longleaf {VERSION}" in said
    assert "does not answer as Longleaf does" in refusal(
        tmp_path, redis_url, lambda request: request.reply(200, {"hello": 1})
    )


@pytest.mark.parametrize("model", ["--models-dir=/etc", "../../etc", "/etc", "..", "a/b/c", "a\n", ""])
def test_an_api_that_names_no_model_is_not_joined(tmp_path: Path, redis_url: str, model: str) -> None:
    welcome = {"version": VERSION, "protocol": PROTOCOL, "model": model, "mark": MARK}
    said = refusal(tmp_path, redis_url, lambda request: request.reply(200, welcome))
    assert "does not answer as Longleaf does" in said


def test_a_token_is_sent_and_a_refused_one_is_said_to_be(tmp_path: Path, redis_url: str) -> None:
    shown: list[str | None] = []

    def refuse(request: Request) -> None:
        shown.append(request.headers.get("Authorization"))
        request.reply(401, {"code": "key_invalid", "detail": "this key is not known"})

    (tmp_path / "token").write_text("llk_file\n")
    said = refusal(tmp_path, redis_url, refuse, worker_token_file=tmp_path / "token")
    assert "refuses the token of this worker (this key is not known)" in said
    assert "longleaf keys create --scope worker" in said
    refusal(tmp_path, redis_url, refuse, worker_token="llk_given")
    assert "asks for a worker's token" in refusal(tmp_path, redis_url, refuse)
    assert shown == ["Bearer llk_file", "Bearer llk_given", None]


def test_a_token_file_that_is_not_there_is_named(tmp_path: Path, redis_url: str) -> None:
    with pytest.raises(SettingsError, match=r"LONGLEAF_WORKER_TOKEN_FILE=.*missing"):
        join(settings(tmp_path, "http://127.0.0.1:1", redis_url, worker_token_file=tmp_path / "missing"))


def test_the_apis_own_refusal_is_repeated(tmp_path: Path, redis_url: str) -> None:
    detail = "install the same version on both"
    said = refusal(
        tmp_path,
        redis_url,
        lambda request: request.reply(409, {"code": "protocol_mismatch", "detail": detail}),
    )
    assert said.endswith(detail)


def test_another_redis_than_the_apis_is_refused(tmp_path: Path, redis_url: str) -> None:
    said = refusal(tmp_path, redis_url, welcoming)
    assert "is not the one that the API at" in said


def test_a_redis_that_refuses_the_password_is_said_to_without_it(tmp_path: Path, redis_url: str) -> None:
    with Redis.from_url(redis_url) as redis:
        redis.set(MARK, 1)
        redis.config_set("requirepass", "right")
        try:
            said = refusal(tmp_path, f"{redis_url}?password=wrong", welcoming)
        finally:
            redis.config_set("requirepass", "")
    assert "refuses" in said
    assert "password=" not in said


def test_redis_is_reached_over_tls_and_a_certificate_that_nobody_vouches_for_is_refused(
    tmp_path: Path, redis_url: str
) -> None:
    with Redis.from_url(redis_url) as redis:
        redis.set(MARK, 1)
    with tls_proxy(redis_url.removeprefix("unix://"), tmp_path) as (port, certificate):
        url = f"rediss://localhost:{port}/0"
        # What is refused behind it is the model: Redis was reached, and is the right one.
        said = refusal(tmp_path, f"{url}?ssl_ca_certs={certificate}", welcoming)
        assert said.startswith("the model no/such")
        said = refusal(tmp_path, url, welcoming)
    assert f"the certificate of Redis at {url} is not trusted" in said
    assert "ssl_ca_certs=" in said


def test_a_model_that_cannot_be_had_is_the_apis_default_and_refused(tmp_path: Path, redis_url: str) -> None:
    with Redis.from_url(redis_url) as redis:
        redis.set(MARK, 1)
    said = refusal(tmp_path, redis_url, welcoming)
    assert f"the model no/such is not in {tmp_path} and could not be made" in said
    assert "the model ./nothing.gguf" in refusal(tmp_path, redis_url, welcoming, model="./nothing.gguf")


def test_the_command_ends_with_one_line_and_status_1(tmp_path: Path, redis_url: str) -> None:
    words = ["--join", redis_url, "--data", str(tmp_path), "--model", "m", "--memory", "1GB"]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "cli", "worker", *words],
        cwd=root,
        env={**os.environ, "LONGLEAF_API": "http://127.0.0.1:1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("worker: no API at http://127.0.0.1:1 ")
    assert done.stderr.count("\n") == 1
