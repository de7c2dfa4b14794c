"""Bytes to normalised text. What a file is, is decided by its content, never by its name."""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass, field
from pathlib import Path

from api.documents import formats, markup
from api.documents.encodings import disguised
from api.documents.pages import Page, marked_pages
from api.documents.pdf import Limits, is_pdf, pdf_text
from api.documents.warning import UploadWarning, counted, warning
from api.problems import ApiError

_BOMS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_UTF_32 = (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)
_CONTROL = re.compile(r"[\x00-\x06\x0e-\x1a\x1c-\x1f\x7f]")
_MARKDOWN = re.compile(r"^(#{1,6} \S|```|\* \S|- \S|> \S|\|.*\|\s*$)|\[[^\]\n]+\]\([^)\n]+\)", re.MULTILINE)
_LOST = "\ufffd"
_BLANK = "\ufeff\u200b\u2060"
_SOURCES = {"html_source": "text/html", "mail_source": "message/rfc822"}
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
    if is_pdf(path):
        text, pages, warnings = pdf_text(path, limits)
        return Extracted(text, pages, "application/pdf", warnings)
    try:
        return from_text(normalise(decode(path.read_bytes())))
    except ApiError as error:
        # Only what is no text is looked at for a format: a text may begin as it likes.
        known = formats.named(path) if error.status == 415 and "params" not in error.extra else None
        if known is None:
            raise
        name, what_to_do = known
        raise ApiError(
            415,
            error.code,
            f"this is {name}, which is not read here: {what_to_do}; {ACCEPTED}",
            params={"format": name},
        ) from None


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
    warnings = [*markup.remarks(text), *_damage(text)]
    kind = "text/markdown" if _MARKDOWN.search(text) else "text/plain"
    kind = next((_SOURCES[found["code"]] for found in warnings if found["code"] in _SOURCES), kind)
    return Extracted(text, marked_pages(text), kind, warnings)


def _damage(text: str) -> list[UploadWarning]:
    """What was lost before the text came here: a converter writes U+FFFD for what it could not read."""
    number = text.count(_LOST)
    if number == 0:
        return []
    detail = (
        f"{counted(number, 'character')} of the text, the first at {text.index(_LOST):,}, may be lost: "
        "U+FFFD is what a converter writes for what it can't read; convert the original again"
    )
    return [warning("unreadable_characters", detail, num_characters=number)]


def decode(data: bytes) -> str:
    """UTF-8, or what a byte order mark says. Raises ApiError 415 with the reason."""
    if data.startswith(_UTF_32):
        raise _wrong_encoding("UTF-32", "a byte order mark of UTF-32")
    mark = next(((bom, name) for bom, name in _BOMS if data.startswith(bom)), None)
    bom, encoding = mark or (b"", "utf-8")
    if mark is None and b"\0" in data:
        if _is_utf_16(data):
            raise _wrong_encoding("UTF-16", "every other byte is NUL and there is no byte order mark")
        reason = f"this is a binary file (a NUL byte at offset {data.index(0)}); {ACCEPTED}"
        raise ApiError(415, "unsupported_media_type", reason)
    if mark is None and (disguise := disguised(data)) is not None:
        raise _wrong_encoding(disguise, f"{disguise} writes everything in ASCII, and its escapes are there")
    data = data[len(bom) :]
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        reason = (
            f"the file is not {encoding.upper()} (byte 0x{data[error.start]:02x} at offset {error.start})"
        )
        detail = f"{reason}; {ACCEPTED}: save it as UTF-8 and upload that"
        raise ApiError(415, "unsupported_media_type", detail) from None


def _is_utf_16(data: bytes) -> bool:
    """Text in letters of ASCII, mostly, as UTF-16 writes it: all NULs are on one side of their pairs."""
    even, odd = data[::2].count(0), data[1::2].count(0)
    return min(even, odd) == 0 and max(even, odd) * 4 > len(data)


def _wrong_encoding(encoding: str, why: str) -> ApiError:
    return ApiError(
        415,
        "unsupported_media_type",
        f"the text is probably in {encoding} ({why}); {ACCEPTED}: save it as UTF-8 and upload that",
        params={"encoding": encoding},
    )


def normalise(text: str) -> str:
    """One kind of line end and no byte order mark. Unicode stays as it was written."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
