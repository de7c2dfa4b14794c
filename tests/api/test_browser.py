"""A page from elsewhere in a browser on this machine: what it can send, and that it changes nothing."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from api_rig import Api, make_settings, running

from api.settings import load_settings

ELSEWHERE = "https://evil.example"


@pytest.mark.parametrize(
    "origin", [ELSEWHERE, "null", "http://127.0.0.1:1", "http://localhost", "", "http://["]
)
def test_a_page_from_elsewhere_can_neither_upload_nor_cancel(shared_api: Api, origin: str) -> None:
    job = shared_api.submit()["id"]
    num_documents = len(shared_api.http.get("/v1/documents?limit=200").json()["data"])
    headers = {"Origin": origin}
    upload = shared_api.http.post(
        "/v1/documents", files={"file": ("a", origin.encode() + b"x")}, headers=headers
    )
    cancel = shared_api.http.post(f"/v1/jobs/{job}/cancel", headers=headers)
    assert [answer.status_code for answer in (upload, cancel)] == [403, 403]
    assert upload.json()["code"] == "origin_refused"
    assert shared_api.job(job)["state"] == "queued"
    assert len(shared_api.http.get("/v1/documents?limit=200").json()["data"]) == num_documents


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_browser_that_names_no_origin_is_known_by_sec_fetch_site(shared_api: Api, site: str) -> None:
    job = shared_api.submit()["id"]
    answer = shared_api.http.post(f"/v1/jobs/{job}/cancel", headers={"Sec-Fetch-Site": site})
    assert (answer.status_code, answer.json()["code"]) == (403, "origin_refused")


def test_its_own_pages_and_programs_may_change_things(shared_api: Api) -> None:
    for headers in ({"Origin": shared_api.url}, {"Sec-Fetch-Site": "same-origin"}, {}):
        job = shared_api.submit()["id"]
        assert shared_api.http.post(f"/v1/jobs/{job}/cancel", headers=headers).status_code == 202


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8321", "127.0.0.1.evil.example", "10.0.0.1", "@["]
)
def test_a_name_that_was_bound_to_this_machine_reads_nothing(shared_api: Api, host: str) -> None:
    shared_api.upload("Private.")
    for path in ("/v1/documents", "/health/ready", "/openapi.json"):
        answer = shared_api.http.get(path, headers={"Host": host})
        assert (answer.status_code, answer.json()["code"]) == (403, "host_refused")


@pytest.mark.parametrize(
    "host",
    [
        "localhost", "localhost:8321", "LOCALHOST", "localhost.", "127.0.0.1", "127.0.1.1", "[::1]:8321",
        "[0:0::1]", "[::ffff:127.0.0.1]:8321", "0.0.0.0:8321", "[::]:8321",
    ],
)  # fmt: skip
def test_this_machine_has_several_names(shared_api: Api, host: str) -> None:
    assert shared_api.http.get("/v1/documents", headers={"Host": host}).status_code == 200


def test_allowed_hosts_are_compared_by_one_spelling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGLEAF_ALLOWED_HOSTS", "Leaf.Home., [FD00:0::1]")
    assert load_settings().allowed_hosts == ["leaf.home", "fd00::1"]


def test_a_name_may_be_allowed_and_a_key_needs_no_name(
    tmp_path: Path, empty_database: Path, redis_url: str
) -> None:
    settings = make_settings(tmp_path, empty_database, redis_url, allowed_hosts=["leaf.home", "fd00::1"])
    with running(settings) as api:
        assert api.http.get("/v1/documents", headers={"Host": "leaf.home"}).status_code == 200
        assert api.http.get("/v1/documents", headers={"Host": "[fd00::1]:8321"}).status_code == 200
        other = {"Host": "other.home", "Origin": ELSEWHERE}
        assert api.http.get("/v1/documents", headers=other).status_code == 403
        key = api.services.keys.create("default", ["submit"], "")[1]
        shown = other | {"Authorization": f"Bearer {key}"}
        sent = httpx.post(api.url + "/v1/documents", json={"name": "a", "text": "b"}, headers=shown)
        assert sent.status_code == 201
