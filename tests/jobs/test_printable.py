"""What a terminal gets of text that others wrote, and what it keeps of it."""

from __future__ import annotations

import json

import pytest

from jobs.printable import escaped_line, json_text, one_line, printable

CONTROL = [chr(c) for c in (*range(0x20), *range(0x7F, 0xA0), 0xD800) if chr(c) not in "\n\t\x85"]
HIDDEN = [
    "\xad", "\u061c", "\u200b", "\u200e", "\u200f", "\u2060", "\u2064", "\ufeff", "\U000e0041",
    *(chr(c) for c in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))),
]  # fmt: skip


@pytest.mark.parametrize("character", CONTROL + HIDDEN, ids=ascii)
def test_no_character_steers_or_hides(character: str) -> None:
    text = f"a{character}b"
    assert printable(text) == ("ab" if character in HIDDEN else "a\ufffdb")
    for shown in (printable(text), one_line(text), escaped_line(text)):
        assert shown.isprintable()
    written = json_text({"a": [text]})
    assert all(c.isprintable() or c == "\n" for c in written)
    assert json.loads(written) == {"a": [text]}


@pytest.mark.parametrize(
    "text",
    [
        "one\n\ttwo",
        "Füße, 東京, שלום, سلام",
        "क्\u200dष می\u200cخواهم",
        "\U0001f468\u200d\U0001f469 \u2764\ufe0f",
    ],
)  # fmt: skip
def test_what_people_write_stays_as_it_is(text: str) -> None:
    assert printable(text) == text
    assert json_text(text, None) == json.dumps(text, ensure_ascii=False)


def test_line_ends_of_every_kind_are_lines_and_one_line_has_none() -> None:
    text = "a\r\nb\x85c\u2028d\u2029e"
    assert printable(text) == "a\nb\nc\nd\ne"
    assert one_line(text) == "a b c d e"
    assert escaped_line("a\nb\u202ec") == "a\\nb\\u202ec"
