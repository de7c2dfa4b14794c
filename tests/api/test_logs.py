"""Logs as JSON: one object a line, with the ids by which a request and a job are followed."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import httpx
import pytest
from api_rig import Api
from test_start import api_process

from jobs.logs import JsonFormatter

JOB = "job_" + "0" * 20


def line(message: str, *words: object, **more: object) -> dict[str, object]:
    record = logging.LogRecord("a.b", logging.WARNING, "f.py", 1, message, words, None)
    record.__dict__.update(more)
    return dict(json.loads(JsonFormatter().format(record)))


def test_a_line_has_the_job_that_it_speaks_of() -> None:
    found = line("%s attempt %d\nis gone", JOB, 2)
    assert found["job_id"] == JOB
    assert found["message"] == f"{JOB} attempt 2\nis gone"
    assert (found["level"], found["logger"]) == ("warning", "a.b")
    assert "job_id" not in line("nothing of the kind: job_1")


def test_an_exception_stays_on_its_line() -> None:
    try:
        raise ValueError("broken\nin two")
    except ValueError:
        text = JsonFormatter().format(
            logging.LogRecord("a", logging.ERROR, "f.py", 1, "failed", (), sys.exc_info())
        )
    assert "\n" not in text
    assert "broken\nin two" in json.loads(text)["exception"]


def test_every_request_has_a_line_with_its_id(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "api.access"):
        api.http.get("/v1/jobs?limit=1", headers={"X-Request-ID": "from-the-proxy"})
        api.http.get("/v1/jobs/none", headers={"Authorization": "Bearer wrong"})
    ours = [record.fields for record in caplog.records if record.name == "api.access"]  # type: ignore[attr-defined]
    assert [(found["path"], found["status"], found["tenant"]) for found in ours] == [
        ("/v1/jobs", 200, "default"),
        ("/v1/jobs/none", 401, None),
    ]


def test_a_service_that_is_told_so_writes_json_alone(tmp_path: Path) -> None:
    process = api_process(tmp_path, LOG_FORMAT="json")
    assert process.stderr is not None
    lines = [json.loads(process.stderr.readline())]
    while "startup complete" not in lines[-1]["message"]:
        lines.append(json.loads(process.stderr.readline()))
    url = (
        next(found["message"] for found in lines if "listening on" in found["message"]).split()[2].rstrip(",")
    )
    httpx.get(f"{url}/v1/jobs/{JOB}", headers={"X-Request-ID": "abc"})
    lines.append(json.loads(process.stderr.readline()))
    while lines[-1]["logger"] != "api.access":
        lines.append(json.loads(process.stderr.readline()))
    assert (lines[-1]["request_id"], lines[-1]["job_id"], lines[-1]["status"]) == ("abc", JOB, 404)
    process.terminate()
    for rest in process.communicate(timeout=60)[1].splitlines():
        json.loads(rest)
