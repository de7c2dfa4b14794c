"""A document's name: how clients spell it, and what the same content is called under another one."""

from __future__ import annotations

import pytest
from api_rig import Api
from sqlalchemy import select

from api.attempt import run_request
from api.models import Job


def send(api: Api, disposition: str, text: str = "Text.") -> tuple[int, str]:
    """An upload whose part has this Content-Disposition; the answer's status and name, or its detail."""
    part = f"--X\r\nContent-Disposition: form-data; {disposition}\r\n\r\n{text}\r\n--X--\r\n"
    headers = {"Content-Type": "multipart/form-data; boundary=X"}
    answer = api.http.post("/v1/documents", headers=headers, content=part.encode())
    body = answer.json()
    return answer.status_code, str(body.get("name", body.get("detail")))


SPELLINGS = [
    ("filename*=UTF-8''%D0%BE%D1%82%D1%87%D1%91%D1%82.txt", "отчёт.txt"),
    ("filename*=utf-8'ru'%d0%be.txt; filename=plain.txt", "о.txt"),
    ("filename=\"plain.txt\"; filename*=UTF-8''%E2%82%AC.txt", "€.txt"),
    ("filename*=\"UTF-8''%D0%BE.txt\"", "о.txt"),
    ("FileName*=ISO-8859-1''f%FCr.txt", "für.txt"),
    ("filename*0*=UTF-8''%D0%BE; filename*1*=%D1%82; filename*2=.txt", "от.txt"),
    ("filename*0=long-; filename*1=name.txt", "long-name.txt"),
    ("filename*0=длинное-; filename*1=имя.txt", "длинное-имя.txt"),
    ('filename="отчёт 1.txt"', "отчёт 1.txt"),
    ('filename="=?UTF-8?B?0L7RgtGH0ZHRgi50eHQ=?="', "отчёт.txt"),
    ('filename="=?utf-8?q?f=C3=BCr_uns?= =?utf-8?q?=2Etxt?="', "für uns.txt"),
    ('filename="say %22yes%22.txt"', 'say "yes".txt'),
    ('filename="say \\"yes\\".txt"', 'say "yes".txt'),
    ('filename="100%25 of it.txt"', "100%25 of it.txt"),
    ("filename=bare.txt", "bare.txt"),
    ('filename="a;b.txt"', "a;b.txt"),
    ('filename="=?nonsense?q?x?=.txt"', "=?nonsense?q?x?=.txt"),
    ("filename*=UTF-8''..%2F..%2Fetc%2Fpasswd", "passwd"),
    ("filename*=UTF-8''a%E2%80%AEb.txt", "ab.txt"),
    ("filename*=UTF-8''a%00%0D%0Ab.txt", "ab.txt"),
    ("filename*=nonsense''a.txt", "a.txt"),
    ("filename=\"plain.txt\"; filename*=idna''x.txt", "plain.txt"),
    ('filename="plain.txt"; filename*=', "plain.txt"),
    ('filename=""', "document"),
]


@pytest.mark.parametrize(("spelling", "name"), SPELLINGS)
def test_a_file_has_its_name_however_a_client_spells_it(api: Api, spelling: str, name: str) -> None:
    assert send(api, f'name="file"; {spelling}') == (201, name)


@pytest.mark.parametrize(
    ("given_name", "kept"),
    [
        ("../../etc/passwd", "passwd"),
        ("C:\\x\\a.txt", "a.txt"),
        ("a\u202eb.txt", "ab.txt"),
        ("..", "document"),
        ("", "document"),
        ("x" * 300, "x" * 255),
    ],
)
def test_a_name_is_only_a_name(api: Api, given_name: str, kept: str) -> None:
    assert api.http.post("/v1/documents", json={"name": given_name, "text": "a"}).json()["name"] == kept


def test_the_field_name_goes_before_the_name_of_the_file(api: Api) -> None:
    for data, name in (({"name": "My title"}, "My title"), ({"name": "Another"}, "Another"), ({}, "a.txt")):
        answer = api.http.post("/v1/documents", data=data, files={"file": ("a.txt", b"same")})
        assert answer.json()["name"] == name


@pytest.mark.parametrize("as_json", [False, True], ids=["file", "json"])
def test_the_same_content_has_the_name_that_was_given_last(api: Api, as_json: bool) -> None:
    def upload(name: str) -> dict[str, object]:
        form = {"json": {"name": name, "text": "same"}} if as_json else {"files": {"file": (name, b"same")}}
        answer = api.http.post("/v1/documents", **form)  # type: ignore[arg-type]
        return dict(answer.json())

    first, second = upload("contract-2025.txt"), upload("contract-2026.txt")
    assert (second["id"], second["name"]) == (first["id"], "contract-2026.txt")
    assert first["warnings"] == []
    [renamed] = second["warnings"]  # type: ignore[misc]
    assert (renamed["code"], renamed["params"]) == ("renamed", {"former_name": "contract-2025.txt"})  # type: ignore[has-type]
    # It is said once: the document itself has nothing to warn of.
    shown = api.http.get(f"/v1/documents/{first['id']}").json()
    assert (shown["name"], shown["warnings"]) == ("contract-2026.txt", [])
    assert upload("contract-2026.txt")["warnings"] == []


def test_the_same_content_without_a_name_keeps_its_name(api: Api) -> None:
    send(api, 'name="file"; filename="contract.txt"')
    for disposition in ('name="file"; filename=""', 'name="file"; filename=".."'):
        assert send(api, disposition) == (200, "contract.txt")


def test_a_job_keeps_the_names_of_its_submission(api: Api) -> None:
    documents = [api.upload("one", "a.txt"), api.upload("two", "b.txt")]
    body = {"type": "summarize", "documents": documents, "max_output_tokens": 8}
    assert api.http.post("/v1/jobs", json=body).status_code == 202
    api.upload("one", "another.txt")
    with api.services.database.read() as session:
        job = session.scalars(select(Job)).one()
        assert [ref.name for ref in run_request(session, job).documents] == ["a.txt", "b.txt"]
    later = api.http.post("/v1/jobs", json=body).json()["id"]
    with api.services.database.read() as session:
        job = session.get_one(Job, later)
        assert [ref.name for ref in run_request(session, job).documents] == ["another.txt", "b.txt"]


def test_a_job_from_before_names_were_kept_has_those_of_its_documents(api: Api) -> None:
    job_id = api.submit(api.upload("one", "a.txt"))["id"]
    with api.services.database.write() as session:
        session.connection().exec_driver_sql("UPDATE job_documents SET name = NULL")
    with api.services.database.read() as session:
        job = session.get_one(Job, job_id)
        assert [ref.name for ref in run_request(session, job).documents] == ["a.txt"]
