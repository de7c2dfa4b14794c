"""Which text is the source of something else: RTF, PostScript, mail, HTML.

A word alone tells nothing: Markdown may have HTML in it, and a memo begins with `From:`. What counts is how
the text begins.
"""

from __future__ import annotations

import re

from api.documents.warning import UploadWarning, warning
from api.problems import ApiError

_HEAD_CHARS = 64 * 1024
_RTF = re.compile(r"\{\\rtf\d?(?=[\\{}\s])")
_RTF_CONTROL = re.compile(r"\\(?:ansi|mac|pca?|fonttbl|pard?|deff\d+|viewkind\d)\b")
_POSTSCRIPT = re.compile(r"%!PS-Adobe-\d")
_HTML = re.compile(
    r"\s*(?:<\?xml\b[^>]*\?>\s*)?(?:<!--(?:(?!-->).){0,4000}-->\s*)*(?:<!doctype\s+html\b[^>]*>|<html(?=[\s>])[^>]*>)",
    re.IGNORECASE | re.DOTALL,
)
_TAG = re.compile(r"<[^<>]*>")
_FIELD = re.compile(r"([!-9;-~]+):(?:[ \t]|$)")
_MBOX = re.compile(r"From \S.{0,200}\d\d:\d\d.{0,20}\d{4}")
_GIT_PATCH = re.compile(r"From [0-9a-f]{40} Mon Sep 17 00:00:00 2001")
_BY_MACHINES = {"received", "message-id", "mime-version", "return-path", "delivered-to", "dkim-signature"}
_ENCODED_PART = re.compile(
    r"^content-transfer-encoding:[ \t]*(?:base64|quoted-printable)", re.IGNORECASE | re.MULTILINE
)


def remarks(text: str) -> list[UploadWarning]:
    """What has to be said of a text that is a source.

    Raises:
        ApiError: 415 for a source in which nobody would find the text.
    """
    head = text[:_HEAD_CHARS]
    if _RTF.match(head) and _RTF_CONTROL.search(head):
        raise _refused("an RTF document", "save it as PDF or as text and upload that")
    if _POSTSCRIPT.match(head):
        raise _refused("a PostScript file", "convert it to PDF (ps2pdf) and upload that")
    if is_mail(head):
        if _ENCODED_PART.search(text):
            raise _refused("the source of an e-mail with encoded parts", "save the message as PDF or as text")
        detail = (
            "this is the source of e-mail: its technical headers are part of the text; "
            "save the message as PDF or as text for what a reader sees"
        )
        return [warning("mail_source", detail)]
    if _HTML.match(head):
        share = round(100 * sum(map(len, _TAG.findall(text))) / len(text))
        detail = (
            f"this is the source of an HTML page: its tags are part of the text ({share} % of it); "
            "save the page as PDF or as text for what a reader sees"
        )
        return [warning("html_source", detail, tags_percent=share)]
    return []


def is_mail(text: str) -> bool:
    """Whether a text begins with the header that mail programs write, not one that a person writes."""
    lines = text.lstrip("\n").split("\n")
    if _GIT_PATCH.match(lines[0]):
        return False
    if _MBOX.match(lines[0]):
        lines.pop(0)
    fields: set[str] = set()
    for line in lines:
        if not line.strip():
            break
        if line[0] in " \t" and fields:
            continue
        field = _FIELD.match(line)
        if field is None:
            return False
        fields.add(field[1].lower())
    return bool(fields & _BY_MACHINES) and bool(fields & {"from", "sender", "return-path", "received"})


def _refused(kind: str, what_to_do: str) -> ApiError:
    return ApiError(
        415,
        "unsupported_media_type",
        f"this is {kind}, whose text is not read here: {what_to_do}",
        params={"format": kind},
    )
