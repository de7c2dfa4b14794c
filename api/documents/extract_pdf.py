"""The text of one PDF, page by page: `python -m api.documents.extract_pdf FILE LIMITS`.

It runs alone in a process that limits itself before it opens the file: PDFium is C++ that reads what
strangers wrote. It prints one JSON line per page, with the text and what is not in it (`PdfPage`), or one
`{"code", "detail"}` and nothing more.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any, TypedDict

from api.documents.pdf_columns import reads_across
from api.documents.pdf_fields import plain, written_on

SAVE_AGAIN = "it is damaged or cut off; open it in a viewer, save it as a PDF again and upload that"
_PASSWORD_ERROR = 4
_SPARSE_CHARS = 100
"""With fewer characters a page may be a picture with a stamp on it: what is drawn there is looked at."""
_MOSTLY = 0.5
_MAX_PROBES = 1000


class PdfPage(TypedDict, total=False):
    """A page; a number that is 0 is left out."""

    text: str
    """U+FFFE stands for a hyphen that ended a line."""
    num_unmapped: int
    """Characters whose font doesn't say which ones they are."""
    drawn: str
    """What a page with hardly any text shows: one of those that pdf_warnings.py has words for."""
    is_picture: bool
    """A picture covers most of it."""
    reads_across: bool
    """Its text may go across two columns, row by row."""
    num_fields: int
    """Filled fields of a form, at the end of the text."""
    num_comments: int
    """Comments and notes, which are left out."""
    is_xfa: bool
    """Of a form in XFA, whose pages here only say so."""


def limit(cpu_s: int, memory_bytes: int, output_bytes: int) -> None:
    """Cap processor seconds, address space and the size of any file that is written, the output's too."""
    for kind, value in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, output_bytes),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        try:
            resource.setrlimit(kind, (value, hard))
        except (ValueError, OSError):
            # macOS accepts no cap on address space; time and output are capped there all the same.
            if kind != resource.RLIMIT_AS:
                raise


def extract(path: str, max_chars: int) -> int:
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(path)
    except pypdfium2.PdfiumError as error:
        if error.err_code == _PASSWORD_ERROR:
            return refuse("pdf_encrypted", "the PDF needs a password; remove it and upload again")
        return refuse("pdf_broken", f"the PDF cannot be read: {SAVE_AGAIN}")
    num_chars = 0
    try:
        form_type = document.get_formtype()
        if form_type:
            document.init_forms()
        for index in range(len(document)):
            try:
                page = read_page(document, index)
            except pypdfium2.PdfiumError:
                return refuse("pdf_broken", f"page {index + 1} of the PDF cannot be read: {SAVE_AGAIN}")
            if form_type == pypdfium2.raw.FORMTYPE_XFA_FULL:
                page["is_xfa"] = True
            num_chars += len(page["text"])
            if num_chars > max_chars:
                return refuse("pdf_too_costly", f"the PDF has more than {max_chars} characters of text")
            print(json.dumps(page))
    except MemoryError:
        return refuse("pdf_too_costly", "reading the PDF needs more memory than is allowed")
    return 0


def read_page(document: Any, index: int) -> PdfPage:
    page = document[index]
    try:
        text_page = page.get_textpage()
        text = plain(text_page.get_text_range())
        found = PdfPage(text=text)
        if num_unmapped := count_unmapped(text_page):
            found["num_unmapped"] = num_unmapped
        if len("".join(text.split())) < _SPARSE_CHARS:
            found["drawn"], is_picture = what_is_drawn(page)
            if is_picture:
                found["is_picture"] = True
            elif num_unmapped and not text.strip():
                found["drawn"] = "letters"
        if reads_across(text_page, page.get_width()):
            found["reads_across"] = True
        fields, comments = written_on(document, page)
        if fields:
            found["text"] = "\n".join([text.rstrip("\n"), *fields] if text.strip() else fields)
            found["num_fields"] = len(fields)
        if comments:
            found["num_comments"] = comments
        return found
    finally:
        page.close()


def count_unmapped(text_page: Any) -> int:
    """How many characters have no map, by every n-th one on a long page: each costs a call."""
    from pypdfium2 import raw

    raw_page, num_chars = text_page.raw, int(text_page.count_chars())
    stride = num_chars // _MAX_PROBES + 1
    places = range(0, num_chars, stride)
    found = [place for place in places if raw.FPDFText_HasUnicodeMapError(raw_page, place) == 1]
    return len(found) * stride


def what_is_drawn(page: Any) -> tuple[str, bool]:
    """What a page shows besides text, and whether one picture or several cover most of it."""
    from pypdfium2 import raw

    drawn, covered = "nothing", 0.0
    width, height = page.get_size()
    for item in page.get_objects(max_depth=8):
        if item.type == raw.FPDF_PAGEOBJ_IMAGE:
            drawn = "picture"
            left, bottom, right, top = item.get_bounds()
            covered += max(0.0, min(right, width) - max(left, 0)) * max(
                0.0, min(top, height) - max(bottom, 0)
            )
        elif item.type in (raw.FPDF_PAGEOBJ_PATH, raw.FPDF_PAGEOBJ_SHADING) and drawn == "nothing":
            drawn = "drawing"
    return drawn, covered > _MOSTLY * width * height


def refuse(code: str, detail: str) -> int:
    print(json.dumps({"code": code, "detail": detail}))
    return 0


def main() -> int:
    path, limits = sys.argv[1], json.loads(sys.argv[2])
    limit(limits["cpu_s"], limits["memory_bytes"], limits["output_bytes"])
    return extract(path, limits["max_chars"])


if __name__ == "__main__":
    sys.exit(main())
