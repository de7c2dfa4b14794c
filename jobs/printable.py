"""What a terminal may be sent of text that a document, a model or a caller wrote.

A control character moves the cursor, renames the window or pretends to be another line; a bidirectional
override shows words in another order; an invisible format character hides what it stands in. The joiners that
scripts and emoji are written with are none of these.
"""

from __future__ import annotations

import json
import re
from typing import Any

_INVISIBLE = (
    "\xad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U0001d173-\U0001d17a\U000e0000-\U000e007f"
)
_LINE_ENDS = re.compile("\r\n|[\x85\u2028\u2029]")
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_HIDDEN = re.compile(f"[{_INVISIBLE}]")
_UNSAFE_IN_JSON = re.compile(f"[\x7f-\x9f\u2028\u2029\ud800-\udfff{_INVISIBLE}]")
_UNSAFE_IN_LINE = re.compile(f"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff{_INVISIBLE}]")

REPLACEMENT = "\ufffd"


def printable(text: str) -> str:
    """The text with its lines and tabs, each control character shown as � and invisible ones left out."""
    return _HIDDEN.sub("", _CONTROL.sub(REPLACEMENT, _LINE_ENDS.sub("\n", text)))


def one_line(text: str) -> str:
    """The same as one line: white space of any kind becomes a space."""
    return " ".join(printable(text).split())


def escaped_line(text: str) -> str:
    """The text as one line that loses nothing: what is not printable becomes an escape like `\\x1b`."""
    return _UNSAFE_IN_LINE.sub(lambda found: ascii(found[0])[1:-1], text)


def json_text(value: Any, indent: int | None = 2) -> str:
    """JSON that loses nothing and sends a terminal nothing: all that is not printable as `\\uXXXX`."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return _UNSAFE_IN_JSON.sub(lambda found: json.dumps(found[0])[1:-1], text)
