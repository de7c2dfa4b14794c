"""The name that a multipart part gives its file, in each of the forms that clients write.

Browsers write UTF-8 and escape three characters; HTTP libraries write `filename*` (RFC 5987, and RFC 2231's
parts `filename*0*`); mail libraries write encoded words (RFC 2047). It knows nothing of what a name may be.
"""

from __future__ import annotations

import re
from email.errors import HeaderParseError
from email.header import decode_header, make_header
from email.message import Message
from email.utils import collapse_rfc2231_value

from starlette.formparsers import MultiPartParser

_HEADER = "Content-Disposition"
_EXTENDED = re.compile(rb"filename\*", re.IGNORECASE)
_ENCODED_WORDS = re.compile(
    r"\s*=\?[^?\s]+\?[bq]\?[^?]*\?=(\s+=\?[^?\s]+\?[bq]\?[^?]*\?=)*\s*", re.IGNORECASE
)
_ESCAPED = {"%22": '"', "%0D": "\r", "%0A": "\n"}


class NamedParts(MultiPartParser):
    """A parser of multipart bodies whose files have their names in plain characters."""

    def on_headers_finished(self) -> None:
        part = self._current_part
        extended = extended_filename(part.content_disposition or b"")
        if extended is not None and part.content_disposition is not None:
            # The parser leaves `filename*` out, and takes a part without `filename` for a field.
            part.content_disposition += b'; filename=""'
        super().on_headers_finished()
        if part.file is not None:
            part.file.filename = extended or plain_filename(part.file.filename or "")


def extended_filename(disposition: bytes) -> str | None:
    """The value of `filename*` or of its numbered parts, which goes before `filename`; None without them."""
    if not _EXTENDED.search(disposition):
        return None
    message = Message()
    message[_HEADER] = disposition.decode("latin-1")
    values = [value for name, value in message.get_params([], header=_HEADER) if name.lower() == "filename"]
    # What has a charset is a tuple here: (charset, language, value). Parts without one come last.
    for value in values:
        if isinstance(value, tuple):
            try:
                return collapse_rfc2231_value(value) or None
            except ValueError:  # a codec that is none of text
                return None
    return values[-1].encode("latin-1").decode(errors="replace") or None if values else None


def plain_filename(given: str) -> str:
    """`filename` without the escapes of browsers and the encoded words of mail."""
    if _ENCODED_WORDS.fullmatch(given):
        try:
            return str(make_header(decode_header(given)))
        except (HeaderParseError, LookupError, ValueError):
            return given  # a charset that nobody knows, or bytes that are not in it
    return re.sub("%(?:22|0D|0A)", lambda match: _ESCAPED[match[0].upper()], given, flags=re.IGNORECASE)
