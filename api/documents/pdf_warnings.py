"""What a reader of a PDF sees and its text has not, by page; and when there is too little of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from api.documents.extract_pdf import PdfPage
from api.documents.warning import UploadWarning, counted, ranges, warning
from api.problems import ApiError

_PRIVATE = re.compile("[\ue000-\uf8ff\ufffd\U000f0000-\U0010ffff]")
_NOTABLE_SHARE = 0.02
"""Of a page's characters without a map: a page about mathematics may have one or two."""
_HOPELESS_SHARE = 0.5
OCR = "run OCR on the PDF and upload the result"
_SHOWN = {
    "picture": ("is a picture", "are pictures"),
    "drawing": ("is a drawing", "are drawings"),
    "letters": (
        "has letters in a font without a character map",
        "have letters in fonts without a character map",
    ),
    "nothing": ("is empty", "are empty"),
}


def pdf_warnings(pages: Sequence[PdfPage], texts: Sequence[str]) -> list[UploadWarning]:
    """Raises ApiError 422 with `no_text_layer` or `no_character_map` where there is nothing to read."""
    unmapped = list(_unmapped(pages, texts))
    without_text = [number for number, text in enumerate(texts, 1) if not text.strip()]
    if len(without_text) == len(pages):
        raise _no_text(pages)
    return [
        *_without_text(pages, without_text),
        *_pictures(pages, texts),
        *unmapped,
        *_columns(pages),
        *_forms(pages),
        *_comments(pages),
    ]


def _no_text(pages: Sequence[PdfPage]) -> ApiError:
    num_shown = _num_shown(pages)
    if not pages:
        detail = "the PDF has no pages: save it anew and upload that"
    elif num_shown["nothing"] == len(pages):
        detail = "the PDF has no text: " + (
            "its one page is empty" if len(pages) == 1 else f"all of its {len(pages):,} pages are empty"
        )
        detail += "; check that it is the right file"
    else:
        kinds = _of_kinds(num_shown)
        shown = f"its one page {kinds[2:]}" if len(pages) == 1 else f"of its {len(pages):,} pages {kinds}"
        detail = f"the PDF has no text layer: {shown}; {OCR}"
    return ApiError(422, "no_text_layer", detail, params={"num_pages": len(pages), **_params(num_shown)})


def _without_text(pages: Sequence[PdfPage], without_text: list[int]) -> Iterator[UploadWarning]:
    if not without_text:
        return
    num_shown = _num_shown([pages[number - 1] for number in without_text])
    detail = (
        f"{len(without_text):,} of {counted(len(pages), 'page')} have no text ({ranges(without_text)}): "
        f"{_of_kinds(num_shown)}"
    )
    if num_shown["nothing"] < len(without_text):
        detail += f"; what is written in them is left out: {OCR}"
    yield warning("pages_without_text", detail, pages=without_text, **_params(num_shown))


def _num_shown(pages: Sequence[PdfPage]) -> dict[str, int]:
    return {kind: sum(page.get("drawn") == kind for page in pages) for kind in _SHOWN}


def _params(num_shown: dict[str, int]) -> dict[str, int]:
    return {
        "num_pictures": num_shown["picture"],
        "num_drawings": num_shown["drawing"],
        "num_without_map": num_shown["letters"],
        "num_empty": num_shown["nothing"],
    }


def _of_kinds(num_shown: dict[str, int]) -> str:
    """`3 are pictures, 1 is empty`."""
    return ", ".join(
        f"{num_shown[kind]:,} {one if num_shown[kind] == 1 else several}"
        for kind, (one, several) in _SHOWN.items()
        if num_shown[kind]
    )


def _pictures(pages: Sequence[PdfPage], texts: Sequence[str]) -> Iterator[UploadWarning]:
    numbers = [
        number
        for number, (page, text) in enumerate(zip(pages, texts, strict=True), 1)
        if page.get("is_picture") and text.strip()
    ]
    if numbers:
        detail = (
            f"pages that are mostly a picture, with a few words of text: {ranges(numbers)}; what is written "
            f"in the picture is left out: {OCR}"
        )
        yield warning("pages_mostly_picture", detail, pages=numbers)


def _unmapped(pages: Sequence[PdfPage], texts: Sequence[str]) -> Iterator[UploadWarning]:
    """Raises ApiError 422 where at least half of the text is wrong."""
    num_all = num_wrong = 0
    notable: list[int] = []
    for number, (page, text) in enumerate(zip(pages, texts, strict=True), 1):
        # Control characters are left out of the text, and a font without a map may give them.
        unmapped = page.get("num_unmapped", 0)
        of_page = max(len("".join(text.split())), unmapped)
        wrong = min(of_page, unmapped + len(_PRIVATE.findall(text)))
        num_all += of_page
        num_wrong += wrong
        if wrong > _NOTABLE_SHARE * of_page:
            notable.append(number)
    if num_wrong == 0:
        return
    share = 100 * num_wrong / num_all
    counts = {"num_characters": num_wrong, "percent": round(share, 1)}
    if num_wrong >= _HOPELESS_SHARE * num_all:
        raise ApiError(
            422,
            "no_character_map",
            f"{num_wrong:,} of {num_all:,} characters are drawn with fonts that don't say which ones they "
            f"are, so their text would be wrong; {OCR}",
            params=counts,
        )
    if notable:
        detail = (
            f"{num_wrong:,} of {num_all:,} characters are drawn with fonts that don't say which ones they "
            f"are and may be wrong, most of them on pages {ranges(notable)}; if those matter, {OCR}"
        )
        yield warning("characters_without_map", detail, pages=notable, **counts)


def _columns(pages: Sequence[PdfPage]) -> Iterator[UploadWarning]:
    numbers = [number for number, page in enumerate(pages, 1) if page.get("reads_across")]
    if numbers:
        detail = (
            "pages with two columns, or a table of two, that the PDF has row by row: "
            f"{ranges(numbers)}; in columns the lines are mixed: save the text from another source"
        )
        yield warning("columns_row_by_row", detail, pages=numbers)


def _forms(pages: Sequence[PdfPage]) -> Iterator[UploadWarning]:
    if any(page.get("is_xfa") for page in pages):
        detail = (
            "the PDF is an XFA form: only what it shows to readers without XFA is in the text; open it in a "
            "program that shows the form, print it as PDF and upload that"
        )
        yield warning("xfa_form", detail)
    numbers = [number for number, page in enumerate(pages, 1) if page.get("num_fields")]
    if numbers:
        num_fields = sum(page.get("num_fields", 0) for page in pages)
        detail = (
            "what was filled in or typed onto pages stands at the end of their text, not where it is seen: "
            f"{counted(num_fields, 'value')} on pages {ranges(numbers)}"
        )
        yield warning("form_values_at_page_end", detail, pages=numbers, num_fields=num_fields)


def _comments(pages: Sequence[PdfPage]) -> Iterator[UploadWarning]:
    numbers = [number for number, page in enumerate(pages, 1) if page.get("num_comments")]
    if numbers:
        num_comments = sum(page.get("num_comments", 0) for page in pages)
        detail = f"comments in the PDF are left out: {num_comments:,} on pages {ranges(numbers)}"
        yield warning("comments_left_out", detail, pages=numbers, num_comments=num_comments)


def joined_words(guessed: Sequence[str]) -> list[UploadWarning]:
    """What to say of words that a line's end broke, where nothing tells whether the hyphen is their own."""
    if not guessed:
        return []
    several = list(dict.fromkeys(guessed))
    shown = ", ".join(several[:5]) + (" and others" if len(several) > 5 else "")
    detail = (
        f"{counted(len(several), 'word')} that a line's end broke may have had a hyphen, which is left out: "
        f"{shown}"
    )
    return [warning("hyphens_left_out", detail, words=several[:100], num_words=len(several))]
