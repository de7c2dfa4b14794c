"""What an upload says of a PDF whose text is not all that a reader sees."""

from __future__ import annotations

from typing import Any

import pytest
from api_rig import Api
from pdf_files import DRAWING, NOTHING, PICTURE, UNMAPPED, drawn, filled_form, lines, widget

from api.documents.hyphens import MARK, settle
from api.documents.warning import ranges


@pytest.fixture
def api(shared_api: Api) -> Api:
    return shared_api


LONG = "A line of the contract, which goes on for as long as a line may go on in it."
PAGE = lines(LONG, LONG)


def upload(api: Api, data: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """The document, and its warnings by their code; the document shows the same later."""
    answer = api.http.post("/v1/documents", files={"file": ("a.pdf", data)})
    assert answer.status_code in (200, 201), answer.text
    body = answer.json()
    assert api.http.get(f"/v1/documents/{body['id']}").json() == body
    assert all(set(found) == {"code", "detail", "params"} for found in body["warnings"])
    return body, {found["code"]: found for found in body["warnings"]}


def text_of(api: Api, document: dict[str, Any]) -> str:
    return api.http.get(f"/v1/documents/{document['id']}/text").text


def test_a_pdf_of_text_alone_has_nothing_to_warn_of(api: Api) -> None:
    assert upload(api, drawn([PAGE, lines("Another short page.")]))[0]["warnings"] == []


def test_pages_without_text_are_named_and_counted_by_what_they_show(api: Api) -> None:
    document, found = upload(api, drawn([PAGE, PICTURE, PICTURE, PAGE, DRAWING, NOTHING]))
    assert (document["num_pages"], list(found)) == (6, ["pages_without_text"])
    assert found["pages_without_text"]["params"] == {
        "pages": [2, 3, 5, 6],
        "num_pictures": 2,
        "num_drawings": 1,
        "num_empty": 1,
        "num_without_map": 0,
    }
    assert found["pages_without_text"]["detail"] == (
        "4 of 6 pages have no text (2–3, 5–6): 2 are pictures, 1 is a drawing, 1 is empty; what is written "
        "in them is left out: run OCR on the PDF and upload the result"
    )


def test_empty_pages_alone_need_no_ocr(api: Api) -> None:
    _, found = upload(api, drawn([PAGE, NOTHING]))
    assert found["pages_without_text"]["detail"] == "1 of 2 pages have no text (2): 1 is empty"


def test_a_scan_with_a_stamp_of_text_on_it_is_named(api: Api) -> None:
    _, found = upload(api, drawn([PAGE, PICTURE + b" " + lines("Scanned"), PICTURE + b" " + PAGE]))
    assert found["pages_mostly_picture"]["params"] == {"pages": [2]}


@pytest.mark.parametrize(
    ("pages", "detail"),
    [
        ([NOTHING], "the PDF has no text: its one page is empty; check that it is the right file"),
        ([NOTHING] * 3, "the PDF has no text: all of its 3 pages are empty; check that it is the right file"),
        (
            [PICTURE],
            "the PDF has no text layer: its one page is a picture; run OCR on the PDF and upload the result",
        ),
        (
            [PICTURE, NOTHING, DRAWING, DRAWING],
            "the PDF has no text layer: of its 4 pages 1 is a picture, 2 are drawings, 1 is empty; run OCR "
            "on the PDF and upload the result",
        ),
    ],
)
def test_a_refusal_says_what_the_pages_show(api: Api, pages: list[bytes], detail: str) -> None:
    answer = api.http.post("/v1/documents", files={"file": ("a.pdf", drawn(pages))})
    assert (answer.status_code, answer.json()["code"]) == (422, "no_text_layer")
    assert answer.json()["detail"] == detail
    assert answer.json()["params"]["num_pages"] == len(pages)


def test_letters_that_nobody_can_name_are_refused(api: Api) -> None:
    answer = api.http.post("/v1/documents", files={"file": ("a.pdf", drawn([UNMAPPED]))})
    assert (answer.status_code, answer.json()["code"]) == (422, "no_character_map")
    assert answer.json()["params"] == {"num_characters": 3, "percent": 100.0}


def test_a_page_with_letters_that_nobody_can_name_is_named(api: Api) -> None:
    _, found = upload(api, drawn([PAGE, PAGE + b" " + UNMAPPED, UNMAPPED, PAGE]))
    assert found["characters_without_map"]["params"]["pages"] == [2, 3]
    assert found["characters_without_map"]["params"]["num_characters"] == 6


def test_one_odd_sign_among_many_letters_is_no_warning(api: Api) -> None:
    sign = UNMAPPED.replace(b'(!"#)', b"(!)")
    assert upload(api, drawn([PAGE + b" " + sign]))[0]["warnings"] == []


def test_the_values_of_a_form_are_in_the_text_and_said_to_be(api: Api) -> None:
    fields = [
        widget("Name", "(Alice Example)"),
        widget("topmost[0].f1[0]", "(4,600 EUR)", more="/TU (Amount)"),
        widget("Empty", "()"),
        widget("Agreed", "/Yes", "/FT /Btn", "/AS /Yes /AP << /N << /Yes 4 0 R /Off 4 0 R >> >>"),
        widget("Refused", "/Off", "/FT /Btn", "/AS /Off /AP << /N << /Yes 4 0 R /Off 4 0 R >> >>"),
        widget("Country", "(no)", "/FT /Ch /Ff 131072", "/Opt [[(no) (Norway)] [(se) (Sweden)]]"),
        widget("Hidden", "(not to be seen)", more="/F 2"),
        widget("Secret", "(hunter2)", "/FT /Tx /Ff 8192"),
    ]
    document, found = upload(api, filled_form(fields, lines("Name:", "Amount:")))
    assert text_of(api, document).split("\n") == [
        "Name:",
        "Amount:",
        "Name: Alice Example",
        "Amount: 4,600 EUR",
        "Agreed: Yes",
        "Country: Norway",
    ]
    assert found["form_values_at_page_end"]["params"] == {"pages": [1], "num_fields": 4}


def test_a_form_whose_only_text_is_filled_in_is_read(api: Api) -> None:
    document, _ = upload(api, filled_form([widget("Name", "(Alice)")], NOTHING))
    assert text_of(api, document) == "Name: Alice"


def test_typed_on_text_is_read_and_comments_are_counted(api: Api) -> None:
    notes = [
        "<< /Type /Annot /Subtype /FreeText /Contents (Paid in cash) /DA (/F1 12 Tf) /Rect [0 0 99 99] >>",
        "<< /Type /Annot /Subtype /Text /Contents (Is that so?) /Rect [0 0 9 9] >>",
        "<< /Type /Annot /Subtype /Highlight /Rect [0 0 9 9] >>",
        "<< /Type /Annot /Subtype /Link /Contents (a link) /Rect [0 0 9 9] >>",
    ]
    document, found = upload(api, drawn([PAGE, PAGE], annotations=notes))
    pages = text_of(api, document).split("\n\n")
    assert (pages[0].endswith("\nPaid in cash"), "Is that so" in pages[0]) == (True, False)
    assert found["comments_left_out"]["params"] == {"pages": [1], "num_comments": 1}


def across(rows: list[tuple[str, str]]) -> bytes:
    """Two columns whose lines are drawn row by row."""
    line = "BT /F1 11 Tf 1 0 0 1 %d %d Tm (%s) Tj ET "
    shown = (
        line % (72, 700 - 16 * number, left) + line % (330, 700 - 16 * number, right)
        for number, (left, right) in enumerate(rows)
    )
    return "".join(shown).encode()


PROSE = [
    ("Left column one. The river", "Right column one. The town"),
    ("rises in the hills and runs", "was founded in 1821 and has"),
    ("south for ninety miles to", "four thousand people, most"),
    ("the sea at Port Amber.", "of whom work at the mill."),
]
FIGURES = [
    (name, str(number)) for number, name in enumerate(("Corn and barley from the hills", "Rye", "Oats") * 4)
]


def test_columns_that_are_written_row_by_row_are_named(api: Api) -> None:
    _, found = upload(api, drawn([PAGE, across(PROSE), across(FIGURES), across(PROSE[:2]) + b" " + PAGE]))
    assert found["columns_row_by_row"]["params"] == {"pages": [2]}


def test_columns_that_are_written_one_after_the_other_are_read_so(api: Api) -> None:
    one = [(left, "") for left, _ in PROSE] + [("", right) for _, right in PROSE]
    assert upload(api, drawn([across(one)]))[0]["warnings"] == []


@pytest.mark.parametrize(
    ("broken", "whole"),
    [
        ("form W|2,", "form W-2,"),
        ("the COVID|19 clause", "the COVID-19 clause"),
        ("section B|7", "section B-7"),
        ("see https://example.org/annual|report.", "see https://example.org/annual-report."),
        ("to anna|maria@example.org", "to annamaria@example.org"),
        ("anna@mill|house.example", "anna@mill-house.example"),
        ("Anna|Maria signed", "Anna-Maria signed"),
        ("an X|ray", "an X-ray"),
        ("price|determining; a price, determining it", "price-determining; a price, determining it"),
        ("long|term; the long-term plan", "long-term; the long-term plan"),
        ("imple|mentation of it", "implementation of it"),
        ("in|formation; information in a formation", "information; information in a formation"),
        ("(IMPLE|MENTATION)", "(IMPLEMENTATION)"),
        ("Ein| und Ausgabe", "Ein- und Ausgabe"),
        ("Ein|und Ausgabe", "Ein- und Ausgabe"),
        ("a|", "a-"),
        ("one|two|three", "onetwothree"),
    ],
)
def test_a_hyphen_at_a_lines_end_stays_where_it_is_the_words_own(broken: str, whole: str) -> None:
    assert settle([broken.replace("|", MARK)])[0] == [whole]


def test_other_pages_tell_too(api: Api) -> None:
    assert settle([f"price{MARK}determining", "Its price is determining."])[0][0] == "price-determining"


def test_a_word_that_was_joined_by_guess_is_named(api: Api) -> None:
    pages = [
        lines("The rate uses price-", "determining factors and form W-", "2, by imple-", "mentation."),
        PAGE,
    ]
    document, found = upload(api, drawn(pages))
    assert text_of(api, document).startswith("The rate uses pricedetermining factors and form W-2, by")
    params = found["hyphens_left_out"]["params"]
    assert params == {"words": ["pricedetermining", "implementation"], "num_words": 2}


def test_page_numbers_are_shown_as_ranges() -> None:
    assert ranges([1, 2, 3, 5, 7, 8]) == "1–3, 5, 7–8"
    assert ranges(range(1, 100, 2), most=3) == "1, 3, 5 and 47 more"
