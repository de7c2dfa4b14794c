"""Documents: every accepted form of a text, its pages, its token counts, and its life."""

from __future__ import annotations

import codecs
import hashlib
import tempfile
import threading
import unicodedata
from pathlib import Path

import pytest
from api_rig import MODEL, Api, write_model_folder
from hypothesis import given
from hypothesis import strategies as st
from pdf_files import pdf

from api.documents.pages import marked_pages
from api.documents.pdf import Limits, pdf_text
from api.problems import ApiError

TEXT = "Füße, façade, ﬁn.\nSecond line."


def read(api: Api, name: str, data: bytes) -> tuple[dict[str, object], str]:
    answer = api.http.post("/v1/documents", files={"file": (name, data)})
    assert answer.status_code == 201, answer.text
    document = answer.json()
    return document, api.http.get(f"/v1/documents/{document['id']}/text").text


@pytest.mark.parametrize(
    "data",
    [
        TEXT.encode(),
        codecs.BOM_UTF8 + TEXT.encode(),
        codecs.BOM_UTF16_LE + TEXT.encode("utf-16-le"),
        codecs.BOM_UTF16_BE + TEXT.encode("utf-16-be"),
        TEXT.replace("\n", "\r\n").encode(),
        TEXT.replace("\n", "\r").encode(),
    ],
    ids=["utf-8", "utf-8 bom", "utf-16 le", "utf-16 be", "crlf", "cr"],
)
def test_every_form_of_a_text_reads_the_same(api: Api, data: bytes) -> None:
    document, text = read(api, "a.bin", data)
    assert text == TEXT
    assert document["num_chars"] == len(TEXT)
    assert document["text_sha256"] == hashlib.sha256(TEXT.encode()).hexdigest()
    assert document["sha256"] == hashlib.sha256(data).hexdigest()
    assert (document["num_bytes"], document["media_type"]) == (len(data), "text/plain")


def test_characters_are_kept_as_they_were_written(api: Api) -> None:
    decomposed = unicodedata.normalize("NFD", "é")
    assert read(api, "a.txt", decomposed.encode())[1] == decomposed


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("# Title\n\nText", "text/markdown"),
        ("See [this](http://x).", "text/markdown"),
        ("Text", "text/plain"),
    ],
)
def test_markdown_is_known_by_its_content(api: Api, text: str, kind: str) -> None:
    assert read(api, "name-says-nothing.pdf", text.encode())[0]["media_type"] == kind


def test_a_json_document_is_the_same_as_the_file(api: Api) -> None:
    answer = api.http.post("/v1/documents", json={"name": "dir/a.md", "text": TEXT})
    assert (answer.status_code, answer.json()["name"]) == (201, "a.md")
    again = api.http.post("/v1/documents", files={"file": ("a.md", TEXT.encode())})
    assert (again.status_code, again.json()) == (200, answer.json())


def test_the_same_content_twice_is_one_document(api: Api) -> None:
    first = api.http.post("/v1/documents", files={"file": ("a.txt", b"same")})
    second = api.http.post("/v1/documents", files={"file": ("a.txt", b"same")})
    assert (first.status_code, second.status_code) == (201, 200)
    assert first.json() == second.json()
    assert first.headers["Location"] == second.headers["Location"] == f"/v1/documents/{first.json()['id']}"
    assert len(api.http.get("/v1/documents").json()["data"]) == 1


def test_the_same_content_at_the_same_time_is_one_document(api: Api) -> None:
    answers: list[tuple[int, str]] = []

    def upload() -> None:
        answer = api.http.post("/v1/documents", files={"file": ("a.txt", b"x" * 100_000)})
        answers.append((answer.status_code, answer.json()["id"]))

    threads = [threading.Thread(target=upload) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(status for status, _ in answers) == [200] * 7 + [201]
    assert len({name for _, name in answers}) == 1


PAGED = "# Report\n\n<!-- page 1 -->\none\n<!-- page 2 -->\ntwo\n  [PAGE 4]\nfour"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no pages at all", []),
        (PAGED, [(1, "# Report"), (2, "<!-- page 2"), (4, "  [PAGE 4]")]),
        ("one\n\ftwo\n\fthree", [(1, "one"), (2, "two"), (3, "three")]),
        ("one\n\f", [(1, "one")]),
        ("one\f\fthree", [(1, "one"), (2, "\f"), (3, "three")]),
        ("before\n[page 3]\nthree", [(2, "before"), (3, "[page 3]")]),
        ("\n\n[page 3]\nthree", [(3, "\n\n[page 3]")]),
        ("[page 2]\na\n[page 1]\nb", [(2, "[page 2]")]),
        ("[page 1]\na\fb\n[page 2]\nb", [(1, "[page 1]"), (2, "[page 2]")]),
        ("see [page 3] for more", []),
    ],
)
def test_page_marks_are_found(text: str, expected: list[tuple[int, str]]) -> None:
    pages = marked_pages(text)
    assert [page["number"] for page in pages] == [number for number, _ in expected]
    for page, (_, start) in zip(pages, expected, strict=True):
        assert text[page["start"] : page["end"]].startswith(start)


@given(st.lists(st.sampled_from(["\f", "[page 1]\n", "\n[page 7]\n", "<!-- page 3 -->", "\n", "text", " "])))
def test_pages_cover_their_text_without_a_gap(parts: list[str]) -> None:
    text = "".join(parts)
    pages = marked_pages(text)
    ends = [page["end"] for page in pages]
    assert [page["start"] for page in pages] == ([0, *ends[:-1]] if pages else [])
    assert [page["number"] for page in pages] == sorted({page["number"] for page in pages})
    assert not pages or ends[-1] == len(text)


def test_a_pdf_is_read_page_by_page(api: Api) -> None:
    written = ["The first page.", "", "The third page."]
    document, text = read(api, "report.txt", pdf(written))
    pages = api.http.get(f"/v1/documents/{document['id']}/pages").json()
    assert (document["media_type"], document["num_pages"]) == ("application/pdf", 3)
    assert [text[page["start"] : page["end"]].strip() for page in pages] == [
        "The first page.",
        "",
        "The third page.",
    ]
    assert [page["number"] for page in pages] == [1, 2, 3]
    assert pages[0]["start"] == 0
    assert pages[-1]["end"] == len(text) == document["num_chars"]


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (pdf(["", ""]), "no_text_layer"),
        (pdf(["secret"], encrypt=True), "pdf_encrypted"),
        (pdf(["cut"])[:200], "pdf_broken"),
        (b"\n\n" + b"%PDF-1.4\nand then nothing", "pdf_broken"),
    ],
    ids=["no text layer", "encrypted", "cut", "nothing"],
)
def test_a_pdf_without_readable_text_is_refused(api: Api, data: bytes, code: str) -> None:
    answer = api.http.post("/v1/documents", files={"file": ("a.pdf", data)})
    assert (answer.status_code, answer.json()["code"]) == (422, code)


@pytest.mark.parametrize(
    "limits",
    [
        Limits(wall_s=0.001, memory_bytes=2**31, max_chars=10_000),
        Limits(wall_s=30, memory_bytes=2**31, max_chars=10),
    ],
    ids=["time", "output"],
)
def test_a_pdf_over_a_limit_is_refused(tmp_path: Path, limits: Limits) -> None:
    (tmp_path / "a.pdf").write_bytes(pdf(["More than ten characters."]))
    with pytest.raises(ApiError) as refusal:
        pdf_text(tmp_path / "a.pdf", limits)
    assert (refusal.value.status, refusal.value.code) == (422, "pdf_too_costly")


def test_a_reader_without_memory_is_a_refusal_and_not_a_crash(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(pdf(["Text."]))
    with pytest.raises(ApiError) as refusal:
        pdf_text(tmp_path / "a.pdf", Limits(wall_s=30, memory_bytes=2**24, max_chars=1000))
    assert refusal.value.status == 422


def test_no_upload_stays_in_the_temporary_folder(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for data in (b"text", b"\x00", b"%PDF-", pdf(["Text."])):
        api.http.post("/v1/documents", files={"file": ("a", data)})
    assert list(tmp_path.glob("longleaf-*")) == []


def test_a_document_in_use_is_not_deleted(api: Api) -> None:
    document = api.upload()
    job_id = api.submit(document)["id"]
    answer = api.http.delete(f"/v1/documents/{document}")
    assert (answer.status_code, answer.json()["code"]) == (409, "document_in_use")
    assert answer.json()["params"] == {"job": job_id}
    api.http.post(f"/v1/jobs/{job_id}/cancel")
    assert api.http.delete(f"/v1/documents/{document}").status_code == 204
    for path in ("", "/text", "/pages"):
        assert api.http.get(f"/v1/documents/{document}{path}").status_code == 404
    assert api.job(job_id)["spec"]["documents"] == [document]


def test_deleted_content_can_come_again(api: Api) -> None:
    first = api.upload("again")
    api.http.delete(f"/v1/documents/{first}")
    answer = api.http.post("/v1/documents", files={"file": ("a", b"again")})
    assert answer.status_code == 201
    assert answer.json()["id"] != first


def test_tokens_are_counted_for_the_default_model_at_upload(api: Api) -> None:
    document = api.upload("one two three four")
    assert api.http.get(f"/v1/documents/{document}").json()["num_tokens"] == {MODEL: 4}


def test_a_count_is_kept_by_tokenizer_and_not_by_name(api: Api) -> None:
    write_model_folder(api.services.settings.models, "other/same")
    document = api.upload("one two three")
    shown = api.http.get(f"/v1/documents/{document}").json()["num_tokens"]
    assert shown == {MODEL: 3, "other/same": 3}
    folder = api.services.settings.models / MODEL
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + " ")
    assert api.http.get(f"/v1/documents/{document}").json()["num_tokens"] == {"other/same": 3}


def test_without_the_model_folder_there_is_no_count_and_no_refusal(api: Api) -> None:
    folder = api.services.settings.models / MODEL
    (folder / "tokenizer.json").unlink()
    document = api.upload("word " * 1000)
    assert api.http.get(f"/v1/documents/{document}").json()["num_tokens"] == {}
    assert api.submit(document)["state"] == "queued"


def test_an_unreadable_model_folder_is_as_good_as_none(api: Api) -> None:
    (api.services.settings.models / MODEL / "config.json").write_text("{broken")
    assert api.submit(api.upload("word " * 1000))["state"] == "queued"


def test_documents_are_listed_in_pages(api: Api) -> None:
    ids = {api.upload(f"document {number}") for number in range(3)}
    first = api.http.get("/v1/documents", params={"limit": 2}).json()
    second = api.http.get("/v1/documents", params={"limit": 2, "after": first["next"]}).json()
    assert {item["id"] for item in first["data"] + second["data"]} == ids
    assert (first["has_more"], second["has_more"], second["next"]) == (True, False, None)
