"""Text in an encoding that is all ASCII bytes, so that it looks like UTF-8: it is known by its escapes."""

from __future__ import annotations

import re
import unicodedata

_ISO_2022 = re.compile(rb"\x1b\$(?:[@AB]|[()\-./][A-Z@])")
_ISO_2022_OTHERS = ((b"\x1b$)C", "ISO-2022-KR"), (b"\x1b$)A", "ISO-2022-CN"), (b"\x1b$)G", "ISO-2022-CN"))
_HZ = re.compile(rb"~\{(?:[\x21-\x77][\x21-\x7e])+~\}")
_UTF_7 = re.compile(rb"\+[A-Za-z0-9+/]{3,}-?")
_MIN_UTF_7 = 3


def disguised(data: bytes) -> str | None:
    """The encoding that bytes are in which would pass for UTF-8; None where they are what they seem."""
    if not data.isascii():
        return None
    if _ISO_2022.search(data):
        return next((name for escape, name in _ISO_2022_OTHERS if escape in data), "ISO-2022-JP")
    if _HZ.search(data) and _text(data, "hz"):
        return "HZ-GB-2312"
    # A plus sign is common: all of them must begin something, and some must be letters of other alphabets.
    shifted = _UTF_7.findall(data)
    if len(set(shifted)) >= _MIN_UTF_7 and len(shifted) + data.count(b"+-") >= data.count(b"+"):
        text = _text(data, "utf-7")
        foreign = [] if text is None else [c for c in text if not c.isascii()]
        if foreign and all(unicodedata.category(c)[0] in "LMPSZ" for c in foreign) and _same_script(foreign):
            return "UTF-7"
    return None


def _text(data: bytes, codec: str) -> str | None:
    try:
        return data.decode(codec)
    except UnicodeDecodeError:
        return None


def _same_script(characters: list[str]) -> bool:
    """Whether they could be of one text: at most three blocks of 512 in all but a tenth of them."""
    blocks: dict[int, int] = {}
    for character in characters:
        block = min(ord(character) >> 9, 0x27)  # from CJK on, all is one
        blocks[block] = blocks.get(block, 0) + 1
    return sum(sorted(blocks.values(), reverse=True)[:3]) * 10 >= len(characters) * 9
