"""Callbacks: signed as the specification says, sent until they are taken, and never to an address within."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import anyio
import pytest
from api_rig import Api, FakeWorker, eventually, make_settings, result, running
from standardwebhooks.webhooks import Webhook

from api.addresses import may_call
from api.webhooks import RETRY_AFTER_S, Webhooks
from jobs import EventType

HERE = [ip_network("127.0.0.0/8")]


class Receiver(BaseHTTPRequestHandler):
    """Keeps what it is sent and answers with the statuses of its server, the last one again and again."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.got.append((self.path, dict(self.headers), body))  # type: ignore[attr-defined]
        statuses = self.server.statuses  # type: ignore[attr-defined]
        self.send_response(statuses.pop(0) if len(statuses) > 1 else statuses[0])
        self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def receiver(*statuses: int) -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        server.statuses, server.got = list(statuses), []  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def url(server: Any, path: str = "/hook?a=1") -> str:
    return f"http://127.0.0.1:{server.server_address[1]}{path}"


@pytest.fixture
def api(tmp_path: Path, empty_database: Path, redis_url: str) -> Iterator[Api]:
    """Callbacks to this machine are allowed, and sent by the test alone but for one pass at the start."""
    settings = make_settings(tmp_path, empty_database, redis_url, callback_networks=HERE, reconcile_s=3600.0)
    with running(settings) as made:
        yield made


def ended(api: Api, callback_url: str, kind: EventType = EventType.SUCCEEDED) -> str:
    job = str(api.submit(callback_url=callback_url)["id"])
    FakeWorker(api.redis).say(
        job, 1, kind, result() if kind is EventType.SUCCEEDED else {"code": "x", "detail": "y"}
    )
    api.wait_state(job, "succeeded", "failed")
    return job


def send(api: Api, now: float = 2e9, webhooks: Webhooks | None = None) -> None:
    anyio.run((webhooks or api.services.webhooks).send_due, now)


def log(api: Api, job: str) -> list[dict[str, Any]]:
    return list(api.http.get(f"/v1/jobs/{job}/deliveries").json())


def test_the_end_of_a_job_is_told_with_a_signature_that_others_understand(api: Api) -> None:
    with receiver(204) as server:
        job = ended(api, url(server))
        send(api, time.time())
        ((path, headers, body),) = server.got
    assert path == "/hook?a=1"
    secret = api.http.get("/v1/webhooks/secret").json()["secret"]
    told = Webhook(secret).verify(body.decode(), headers)
    assert told["type"] == "job.succeeded"
    assert told["data"]["id"] == job
    with pytest.raises(Exception, match="signature"):
        Webhook(secret).verify(body.decode().replace("succeeded", "cancelled"), headers)
    (delivery,) = log(api, job)
    assert delivery["state"] == "delivered"
    assert [attempt["status"] for attempt in delivery["attempts"]] == [204]
    assert headers["webhook-id"] == delivery["id"]


def test_after_a_rotation_both_secrets_sign_until_the_old_one_ends(api: Api) -> None:
    old = api.http.get("/v1/webhooks/secret").json()
    new = api.http.post("/v1/webhooks/secret/rotate", json={"overlap_s": 3600}).json()
    assert new["secret"] != old["secret"]
    assert (old["old_until"], new["old_until"] is None) == (None, False)
    assert api.http.get("/v1/webhooks/secret").json() == new
    with receiver(204) as server:
        ended(api, url(server))
        send(api, time.time())
        ended(api, url(server))
        send(api, time.time() + 3601)
        (_, during, first), (_, after, second) = server.got
    assert Webhook(old["secret"]).verify(first.decode(), during)["type"] == "job.succeeded"
    assert Webhook(new["secret"]).verify(first.decode(), during)["type"] == "job.succeeded"
    assert len(during["webhook-signature"].split(" ")) == 2
    assert len(after["webhook-signature"].split(" ")) == 1
    # The library also refuses a time so far ahead, which is not what is asked here.
    signed_by = {
        s: Webhook(s).sign(after["webhook-id"], when(after), second.decode()) for s in secrets(old, new)
    }
    assert after["webhook-signature"] == signed_by[new["secret"]] != signed_by[old["secret"]]


def secrets(*views: dict[str, Any]) -> list[str]:
    return [view["secret"] for view in views]


def when(headers: dict[str, str]) -> datetime:
    return datetime.fromtimestamp(int(headers["webhook-timestamp"]), UTC)


def test_a_leaked_secret_ends_at_once_and_a_second_rotation_ends_the_first(api: Api) -> None:
    rotate = partial(api.http.post, "/v1/webhooks/secret/rotate")
    first, second, third = (rotate(json={"overlap_s": s}).json() for s in (3600, 3600, 0))
    assert len({view["secret"] for view in (first, second, third)}) == 3
    assert third["old_until"] is None
    with receiver(204) as server:
        ended(api, url(server))
        send(api, time.time())
        ((_, headers, body),) = server.got
    Webhook(third["secret"]).verify(body.decode(), headers)
    for ended_secret in (first["secret"], second["secret"]):
        with pytest.raises(Exception, match="signature"):
            Webhook(ended_secret).verify(body.decode(), headers)


@pytest.mark.parametrize("body", [{"overlap_s": -1}, {"overlap_s": 2_592_001}, {"overlap": 1}])
def test_an_overlap_out_of_bounds_changes_nothing(api: Api, body: dict[str, int]) -> None:
    before = api.http.get("/v1/webhooks/secret").json()
    assert api.http.post("/v1/webhooks/secret/rotate", json=body).status_code == 422
    assert api.http.get("/v1/webhooks/secret").json() == before


@pytest.mark.parametrize("kind", [EventType.SUCCEEDED, EventType.FAILED])
def test_a_message_is_sent_while_the_service_runs(
    tmp_path: Path, empty_database: Path, redis_url: str, kind: EventType
) -> None:
    settings = make_settings(tmp_path, empty_database, redis_url, callback_networks=HERE)
    with receiver(200) as server, running(settings) as api:
        ended(api, url(server), kind)
        eventually(lambda: server.got)
        assert json.loads(server.got[0][2])["type"] == kind


def test_a_receiver_that_fails_is_asked_again_under_the_same_id_until_it_takes_it(api: Api) -> None:
    with receiver(500, 302, 200) as server:
        job, now = ended(api, url(server)), 2e9
        send(api, now)
        send(api, now + 4)  # too early
        assert len(server.got) == 1
        send(api, now + 5)
        send(api, now + 5 + 299)
        assert len(server.got) == 2
        send(api, now + 5 + 300)
        send(api, now + 1e6)
        assert len(server.got) == 3
        assert {path for path, _, _ in server.got} == {"/hook?a=1"}  # no redirect is followed
        assert len({headers["webhook-id"] for _, headers, _ in server.got}) == 1
    (delivery,) = log(api, job)
    assert [attempt["status"] for attempt in delivery["attempts"]] == [500, 302, 200]
    assert delivery["state"] == "delivered"


def test_a_receiver_that_never_answers_well_is_given_up(api: Api) -> None:
    with receiver(503) as server:
        job, now = ended(api, url(server)), 2e9
        for delay in (0, *RETRY_AFTER_S, 1e9):
            now += delay
            send(api, now)
        assert len(server.got) == len(RETRY_AFTER_S) + 1
    assert log(api, job)[0]["state"] == "given_up"


def test_gone_is_not_asked_again(api: Api) -> None:
    with receiver(410) as server:
        job = ended(api, url(server))
        send(api)
        assert log(api, job)[0]["state"] == "given_up"


def test_a_receiver_that_is_not_there_is_in_the_log_with_the_reason(api: Api) -> None:
    with receiver(200) as server:
        gone = url(server)
    job = ended(api, gone)
    send(api)
    (attempt,) = log(api, job)[0]["attempts"]
    assert attempt["status"] is None
    assert attempt["error"] == "Connection refused"


def test_a_retried_job_tells_each_of_its_ends(api: Api) -> None:
    with receiver(200) as server:
        job = ended(api, url(server), EventType.FAILED)
        assert api.http.post(f"/v1/jobs/{job}/retry").status_code == 202
        FakeWorker(api.redis).say(job, 2, EventType.SUCCEEDED, result())
        api.wait_state(job, "succeeded")
        send(api)
        kinds = sorted(json.loads(body)["type"] for _, _, body in server.got)
    assert kinds == ["job.failed", "job.succeeded"]


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "10.0.0.1", "169.254.169.254", "[::1]", "[fe80::1]", "[::ffff:127.0.0.1]", "0.0.0.0"],
)
def test_an_address_within_is_refused_at_once(shared_api: Api, host: str) -> None:
    body = {"type": "summarize", "documents": [shared_api.upload()], "callback_url": f"http://{host}/"}
    answer = shared_api.http.post("/v1/jobs", json=body)
    assert (answer.status_code, answer.json()["code"]) == (422, "callback_refused")
    assert "LONGLEAF_CALLBACK_NETWORKS" in answer.json()["detail"]


@pytest.mark.parametrize(
    "bad",
    ["ftp://a.example/", "//a.example", "http://", "http://u:p@a.example/", "http://a.example/\r\nX: y",
     "http://a.example:99999/", "javascript:alert(1)", "http://a b/", "http://é.example/", "http://["],
)  # fmt: skip
def test_what_is_no_url_is_refused(shared_api: Api, bad: str) -> None:
    body = {"type": "summarize", "documents": [shared_api.upload()], "callback_url": bad}
    answer = shared_api.http.post("/v1/jobs", json=body)
    assert (answer.status_code, answer.json()["param"]) == (422, "callback_url")


@pytest.mark.parametrize("name", ["localhost", "2130706433", "0x7f.1"])
def test_a_name_that_leads_within_is_refused_when_it_is_called(api: Api, name: str) -> None:
    with receiver(200) as server:
        job = ended(api, f"http://{name}:{server.server_address[1]}/")
        send(api, webhooks=Webhooks(api.services.database, []))
        assert server.got == []
    (attempt,) = log(api, job)[0]["attempts"]
    assert "public addresses only" in attempt["error"]


def test_the_address_that_was_checked_is_the_one_that_is_called(api: Api) -> None:
    """A name server that says something harmless first has nothing to say a second time."""
    answers = [["127.0.0.1"], ["10.9.9.9"]]

    async def resolve(host: str, port: int) -> list[str]:
        assert host == "rebind.example"
        return answers.pop(0)

    with receiver(200) as server:
        job = ended(api, f"http://rebind.example:{server.server_address[1]}/")
        send(api, webhooks=Webhooks(api.services.database, HERE, resolve))
        assert [headers["Host"] for _, headers, _ in server.got] == [
            f"rebind.example:{server.server_address[1]}"
        ]
    assert log(api, job)[0]["state"] == "delivered"
    assert len(answers) == 1


def test_of_several_addresses_only_the_allowed_ones_are_called(api: Api) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        return ["10.9.9.9", "127.0.0.1"]

    with receiver(200) as server:
        ended(api, f"http://mixed.example:{server.server_address[1]}/")
        send(api, webhooks=Webhooks(api.services.database, HERE, resolve))
        assert len(server.got) == 1


ADDRESSES = {
    "8.8.8.8": True, "2606:4700::1111": True, "10.0.0.1": False, "172.16.0.1": False, "192.168.1.1": False,
    "127.0.0.1": False, "169.254.169.254": False, "0.0.0.0": False, "100.64.0.1": False, "224.0.0.1": False,
    "255.255.255.255": False, "::1": False, "::": False, "fe80::1%eth0": False, "fd00::1": False,
    "::ffff:10.0.0.1": False, "64:ff9b::7f00:1": False, "2002:7f00:1::": False, "ff02::1": False,
}  # fmt: skip


@pytest.mark.parametrize(("address", "public"), ADDRESSES.items())
def test_public_addresses_alone_may_be_called(address: str, public: bool) -> None:
    assert may_call(address, []) == public


def test_a_foreign_tenants_secret_is_another_one(shared_api: Api) -> None:
    key = partial(shared_api.services.keys.create, scopes=["submit", "read"], name="")
    shown = [{"Authorization": f"Bearer {key(tenant)[1]}"} for tenant in ("hooks a", "hooks b")]
    secrets = {shared_api.http.get("/v1/webhooks/secret", headers=one).json()["secret"] for one in shown}
    assert len(secrets) == 2
