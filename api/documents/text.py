"""Bytes to normalised text. What a file is, is decided by its content, never by its name."""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass, field
from pathlib import Path

from api.documents.pages import Page, marked_pages
from api.documents.pdf import Limits, pdf_text
from api.documents.warning import UploadWarning
from api.problems import ApiError

_BOMS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_CONTROL = re.compile(r"[\x00-\x06\x0e-\x1a\x1c-\x1f\x7f]")
_MARKDOWN = re.compile(r"^(#{1,6} \S|```|\* \S|- \S|> \S|\|.*\|\s*$)|\[[^\]\n]+\]\([^)\n]+\)", re.MULTILINE)
_BLANK = "\ufeff\u200b\u2060"
ACCEPTED = "text in UTF-8 or in UTF-16 with a byte order mark, Markdown, and PDF are accepted"


@dataclass(frozen=True, slots=True)
class Extracted:
    text: str
    pages: list[Page]
    media_type: str
    warnings: list[UploadWarning] = field(default_factory=list)


def extract(path: Path, limits: Limits) -> Extracted:
    """Read a file as text.

    Raises:
        ApiError: 415 for a binary file or an unknown encoding, 422 for an empty document or a PDF
            that is broken, encrypted, without text, or too costly.
    """
    with path.open("rb") as file:
        head = file.read(1024)
    if b"%PDF-" in head:
        text, pages = pdf_text(path, limits)
        return Extracted(text, pages, "application/pdf")
    return from_text(normalise(decode(path.read_bytes())))


def from_text(text: str) -> Extracted:
    """The same for text that is already decoded and normalised."""
    if not text.strip().strip(_BLANK).strip():
        raise ApiError(422, "document_empty", "the document has no text: it is empty or only white space")
    num_control = len(_CONTROL.findall(text))
    if "\0" in text or num_control * 100 > len(text):
        raise ApiError(
            415,
            "unsupported_media_type",
            f"this is a binary file ({num_control} control characters); {ACCEPTED}",
        )
    kind = "text/markdown" if _MARKDOWN.search(text) else "text/plain"
    return Extracted(text, marked_pages(text), kind)


def decode(data: bytes) -> str:
    """UTF-8, or what a byte order mark says. Raises ApiError 415 with the reason."""
    mark = next(((bom, name) for bom, name in _BOMS if data.startswith(bom)), None)
    bom, encoding = mark or (b"", "utf-8")
    if mark is None and b"\0" in data:
        reason = f"this is a binary file (a NUL byte at offset {data.index(0)}); {ACCEPTED}"
        raise ApiError(415, "unsupported_media_type", reason)
    data = data[len(bom) :]
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        reason = (
            f"the file is not {encoding.upper()} (byte 0x{data[error.start]:02x} at offset {error.start})"
        )
        raise ApiError(415, "unsupported_media_type", f"{reason}; {ACCEPTED}") from None


def normalise(text: str) -> str:
    """One kind of line end and no byte order mark. Unicode stays as it was written."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
