"""What a file is, by its structure: text may mention anything, and what is no text is named."""

from __future__ import annotations

import gzip
import io
import zipfile
from pathlib import Path

import pytest
from api_rig import Api
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pdf_files import pdf

from api.documents import formats
from api.documents.encodings import disguised
from api.documents.pdf import is_pdf


@pytest.fixture
def api(shared_api: Api) -> Api:
    return shared_api


def upload(api: Api, data: bytes) -> dict[str, object]:
    answer = api.http.post("/v1/documents", files={"file": ("a.bin", data)})
    return dict(answer.json()) | {"http": answer.status_code}


PDF_LISTING = pdf(["A page."]).decode()
MAIL = (
    "Received: from a.example by b.example; Mon, 2 Mar 2026 10:00:00 +0100\nFrom: Anna <anna@mill.example>\n"
    "To: Ben <ben@mill.example>\nSubject: The dam\n\tin two lines\nDate: Mon, 2 Mar 2026 10:00:00 +0100\n"
    "Message-ID: <1@mill.example>\nMIME-Version: 1.0\nContent-Type: text/plain\n"
)
TEXTS = {
    "notes on PDF": "# Notes on PDF\n\nEvery PDF begins with the bytes %PDF-1.7 and ends with %%EOF.\n",
    "PDF as first word": "%PDF-1.7 is the header of a PDF, and 1 0 obj begins an object.\n",
    "PDF in a line of its own": "The header is\n%PDF-1.7\nand then come objects such as 1 0 obj.\n",
    "listing of a PDF": f"A small PDF:\n\n```\n{PDF_LISTING}```\n\nThat is all.\n",
    "magic numbers": "GIF89a, BM, MZ, ID3, BZh, PK, RIFF and ustar are magic numbers.\n",
    "BM": "BM is the abbreviation of benchmark.\n",
    "MZ": "MZ-700 was a computer.\n",
    "memo": "From: Anna\nTo: Ben\nSubject: The dam\nDate: 2 March 2026\n\nDear Ben,\n",
    "mail quoted in a text": f"Ben, look at this:\n\n{MAIL}\nThe dam is dry.\n",
    "patch": "From 0123456789abcdef0123456789abcdef01234567 Mon Sep 17 00:00:00 2001\n"
    "From: Anna <a@b.example>\nDate: Mon, 2 Mar 2026 10:00:00 +0100\nSubject: [PATCH] Dam\n"
    "MIME-Version: 1.0\n\n---\n a | 2 +-\n",
    "from": "From Russia with love, at 10:00 in 1963.\n",
    "front matter": "---\nfrom: Anna\nmessage-id: 1\n---\n\n# Title\n",
    "headers of HTTP": "HTTP/1.1 200 OK\nDate: Mon, 2 Mar 2026 10:00:00 GMT\nServer: x\n\n<html>\n",
    "markdown with HTML": '<div align="center">\n\n# Title\n\n</div>\n',
    "text about HTML": "A page begins with <!DOCTYPE html> and <html>.\n",
    "comment": "<!-- page 1 -->\n\n# Holding the water\n",
    "SVG": '<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"><text>a</text></svg>\n',
    "XML": '<?xml version="1.0"?>\n<htmlbook><p>a</p></htmlbook>\n',
    "PHP": "<?php echo '<html>'; ?>\n",
    "JSON": '{"html": "<html>", "from": "a"}\n',
    "CSV": "From,To,Subject\nAnna,Ben,The dam\n",
    "LaTeX": "{\\rm text} \\documentclass{article}\n",
    "text about RTF": "{\\rtf is how RTF begins.\n",
    "PostScript code": "%! is how PostScript begins.\n",
    "plus signs": "C++ and a+b+c, +49 30 1234567, +1 555 123 4567, 1+1, +abc- and x+-y.\n",
    "tildes": "~{x} and ~{ab~} in a template ~/file.\n",
    "log of a terminal": "\x1b[31mred\x1b[0m \x1b(B and more.\n",
    "base64": "data: a+b/cd+EFGH/+ijk= and +AAA+BBB+CCC\n",
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_stays_text_whatever_it_mentions(api: Api, name: str) -> None:
    found = upload(api, TEXTS[name].encode())
    assert found["http"] in (200, 201), found
    assert found["media_type"] in ("text/plain", "text/markdown")
    assert found["warnings"] == []
    assert api.http.get(f"/v1/documents/{found['id']}/text").text == TEXTS[name]


@pytest.mark.parametrize(
    "before",
    [
        b"",
        b"\n\n",
        b"\xef\xbb\xbf",
        b"\0" * 128,
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"\x80junk\x00",
        b"junk" * 200 + b"\n",
    ],
    ids=["nothing", "lines", "bom", "nul", "http", "bytes", "letters"],
)
def test_a_pdf_is_one_with_something_before_its_header(tmp_path: Path, before: bytes) -> None:
    (tmp_path / "a").write_bytes(before + pdf(["A page."]))
    assert is_pdf(tmp_path / "a")


def test_a_pdf_with_its_binary_comment_in_the_line_of_its_header_is_one(api: Api) -> None:
    data = pdf(["A page."]).replace(b"%PDF-1.4\n", b"%PDF-1.4 %\xe2\xe3\xcf\xd3\n", 1)
    assert upload(api, data)["media_type"] == "application/pdf"


def zipped(members: dict[str, str]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def ole2(*entries: str) -> bytes:
    """The header of an OLE2 file and its directory, in the second sector after it."""
    header = bytearray(512)
    header[:8] = bytes.fromhex("d0cf11e0a1b11ae1")
    header[30:32], header[48:52] = (9).to_bytes(2, "little"), (1).to_bytes(4, "little")
    directory = b"".join(name.encode("utf-16-le").ljust(128, b"\0") for name in ("Root Entry", *entries))
    return bytes(header) + bytes(512) + directory


KINDS = [
    (zipped({"[Content_Types].xml": "<x/>", "word/document.xml": "<w/>"}), "a Word document (.docx)"),
    (zipped({"[Content_Types].xml": "<x/>", "xl/workbook.xml": "<w/>"}), "an Excel workbook (.xlsx)"),
    (zipped({"ppt/presentation.xml": "<p/>"}), "a PowerPoint presentation (.pptx)"),
    (zipped({"mimetype": "application/epub+zip"}), "an EPUB book"),
    (zipped({"META-INF/container.xml": "<c/>"}), "an EPUB book"),
    (zipped({"mimetype": "application/vnd.oasis.opendocument.text"}), "an OpenDocument text (.odt)"),
    (zipped({"Index/Document.iwa": ""}), "a document of Pages, Numbers or Keynote"),
    (zipped({"report.pdf": pdf(["A page."]).decode()}), "a ZIP archive"),
    (zipped({}), "a ZIP archive"),
    (
        zipped({"word/document.xml": "<w/>" * 99})[:300],
        "a ZIP archive, or an Office file made as one, that is damaged",
    ),
    (ole2("WordDocument"), "an old Word document (.doc)"),
    (ole2("Workbook"), "an old Excel workbook (.xls)"),
    (ole2("PowerPoint Document"), "an old PowerPoint presentation (.ppt)"),
    (ole2("__nameid_version1.0"), "a message of Outlook (.msg)"),
    (ole2("EncryptionInfo", "EncryptedPackage"), "an Office document with a password"),
    (ole2("Something")[:600], "an old Office file"),
    (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "a PNG image"),
    (b"\xff\xd8\xff\xe0\0\x10JFIF\0", "a JPEG image"),
    (b"II*\0\x08\0\0\0", "a TIFF image"),
    (b"\0\0\0\x18ftypheic\0\0\0\0", "a HEIF image"),
    (b"\0\0\0\x18ftypisom\0\0\0\0", "a film or sound file (MP4)"),
    (b"RIFF\x24\0\0\0WEBPVP8 \0", "a WebP image"),
    (b"RIFF\x24\0\0\0WAVEfmt \0", "a sound file (WAV)"),
    (gzip.compress(b"text"), "a gzip file"),
    (b"7z\xbc\xaf\x27\x1c\0\4", "a 7z archive"),
    (b"name".ljust(257, b"\0") + b"ustar\x0000", "a tar archive"),
    (
        b"a.pdf".ljust(257, b"\0") + b"ustar\x0000".ljust(255, b"\0") + pdf(["A page."]) + bytes(1024),
        "a tar archive",
    ),
    (b"Book".ljust(60, b"\0") + b"BOOKMOBI", "an e-book (MOBI)"),
    (b"SQLite format 3\0", "an SQLite database"),
    (b"\x7fELF\2\1\1\0", "a program"),
    (rb"{\rtf1\ansi\deff0 {\fonttbl {\f0 Times;}}\f0 The dam.\par}", "an RTF document"),
    (b"%!PS-Adobe-3.0\n%%Title: a\n", "a PostScript file"),
    (
        (MAIL + "Content-Transfer-Encoding: base64\n\nVGhl\n").encode(),
        "the source of an e-mail with encoded parts",
    ),
]


@pytest.mark.parametrize(("data", "kind"), KINDS, ids=[kind for _, kind in KINDS])
def test_what_is_no_text_is_named_with_what_to_do(api: Api, data: bytes, kind: str) -> None:
    found = upload(api, data)
    assert (found["http"], found["code"]) == (415, "unsupported_media_type")
    detail = str(found["detail"])
    assert detail.startswith(f"this is {kind}")
    assert any(word in detail for word in ("save", "unpack", "run OCR", "export", "write down", "convert"))
    assert str(found["params"]["format"]).startswith(kind)  # type: ignore[index]


def test_rtf_as_json_is_refused_too(api: Api) -> None:
    body = {"name": "a.rtf", "text": r"{\rtf1\ansi The dam.\par}"}
    answer = api.http.post("/v1/documents", json=body)
    assert (answer.status_code, answer.json()["params"]["format"]) == (415, "an RTF document")


def test_a_zip_that_lies_about_its_list_is_named_without_reading_it(tmp_path: Path) -> None:
    data = bytearray(zipped({"word/document.xml": "<w/>"}))
    place = data.rindex(b"PK\5\6")
    for size in (2**31, 2**20 + 1, 7):
        data[place + 12 : place + 16] = size.to_bytes(4, "little")
        (tmp_path / "a").write_bytes(data)
        found = formats.named(tmp_path / "a")
        assert found is not None
        assert "ZIP" in found[0]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    junk=st.binary(max_size=200), data=st.sampled_from([data for data, _ in KINDS]), place=st.integers(0, 400)
)
def test_no_damage_to_a_file_breaks_its_naming(tmp_path: Path, junk: bytes, data: bytes, place: int) -> None:
    damaged = data[:place] + junk + data[place + len(junk) :]
    path = tmp_path / "damaged"
    path.write_bytes(damaged)
    formats.named(path)
    is_pdf(path)
    disguised(damaged)


SOURCES = [
    ("<!DOCTYPE html>\n<html><body><p>The dam.</p></body></html>", "text/html", "html_source"),
    ("\n<!-- saved -->\n<HTML lang=en><p>The dam.", "text/html", "html_source"),
    (
        '<?xml version="1.0"?>\n<!DOCTYPE html PUBLIC "x">\n<html xmlns="y"><p>a</p></html>',
        "text/html",
        "html_source",
    ),
    (MAIL + "\nThe dam is dry.\n", "message/rfc822", "mail_source"),
    ("From anna Mon Mar  2 10:00:00 2026\n" + MAIL + "\nThe dam is dry.\n", "message/rfc822", "mail_source"),
]


@pytest.mark.parametrize(("text", "media_type", "code"), SOURCES)
def test_a_source_is_taken_and_said_to_be_one(api: Api, text: str, media_type: str, code: str) -> None:
    found = upload(api, text.encode())
    assert (found["media_type"], [item["code"] for item in found["warnings"]]) == (media_type, [code])  # type: ignore[attr-defined]
    assert "save" in found["warnings"][0]["detail"]  # type: ignore[index]
    assert api.http.get(f"/v1/documents/{found['id']}").json()["warnings"] == found["warnings"]


def test_characters_that_a_converter_lost_are_counted(api: Api) -> None:
    found = upload(api, "Gr\ufffd\ufffde aus K\ufffdln".encode())
    [lost] = found["warnings"]  # type: ignore[misc]
    assert (lost["code"], lost["params"]) == ("unreadable_characters", {"num_characters": 3})  # type: ignore[has-type]


JAPANESE, CHINESE, KOREAN = "第一章 はじめに。この本は", "第一章 你好，世界", "안녕하세요 세계"
ENCODED = [
    (JAPANESE.encode("iso-2022-jp"), "ISO-2022-JP"),
    (("Chapter 1\n\n" * 500 + JAPANESE).encode("iso-2022-jp"), "ISO-2022-JP"),
    (KOREAN.encode("iso2022_kr"), "ISO-2022-KR"),
    (CHINESE.encode("hz"), "HZ-GB-2312"),
    (JAPANESE.encode("utf-7") + "さようなら 世界".encode("utf-7") + b" " + "日本".encode("utf-7"), "UTF-7"),
    ("Grüße aus Köln für Jürgen, schöne Straße".encode("utf-7"), "UTF-7"),
    ("The dam is dry.".encode("utf-16-le"), "UTF-16"),
    ("The dam is dry.".encode("utf-16-be"), "UTF-16"),
    ("The dam is dry.".encode("utf-32"), "UTF-32"),
]


@pytest.mark.parametrize(("data", "encoding"), ENCODED)
def test_an_encoding_that_would_pass_for_another_is_named(api: Api, data: bytes, encoding: str) -> None:
    found = upload(api, data)
    assert (found["http"], found["code"]) == (415, "unsupported_media_type")
    assert found["params"] == {"encoding": encoding}
    assert "UTF-8" in str(found["detail"])


@given(st.text(alphabet=st.characters(codec="ascii", exclude_characters="\x1b")))
def test_words_in_ascii_are_what_they_seem(text: str) -> None:
    assert disguised(text.replace("+", "").replace("~", "").encode()) is None
