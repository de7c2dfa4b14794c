"""Hyphens at the ends of a PDF's lines: which are a word's own, and which only break it.

PDFium joins both halves and leaves a mark. Where the halves tell (a number, a capital, an address), the
hyphen stays; otherwise the document's other words decide. What nothing tells is joined.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

MARK = "\ufffe"

_BROKEN = re.compile(f"[^\\s{MARK}]*{MARK}\\S*")
_WORD = re.compile(r"[^\W\d_]+(?:-[^\W\d_]+)*")
_LAST = re.compile(r"[^\W_]+$")
_FIRST = re.compile(r"[^\W_]+")
_AND = frozenset(
    ("und", "oder", "bzw", "bis", "and", "or", "to", "et", "ou", "y", "o", "och", "eller", "en", "of")
)
"""After these a hyphen stands for a word that comes later (`Ein- und Ausgabe`)."""


def settle(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """The pages of a PDF with every mark replaced by a hyphen or by nothing.

    Returns them, and the words that were joined though nothing told.
    """
    if not any(MARK in text for text in texts):
        return list(texts), []
    words = {word.casefold() for text in texts for word in _WORD.findall(_BROKEN.sub(" ", text))}
    words |= {part for word in words if "-" in word for part in word.split("-")}
    guessed: list[str] = []

    def settled(match: re.Match[str]) -> str:
        whole, *others = match[0].split(MARK)
        for after in others:
            whole = joined(whole, after)
        return whole

    def joined(before: str, after: str) -> str:
        left, right = _LAST.search(before), _FIRST.match(after)
        if left is None or right is None:
            return f"{before}-{after}"
        if right[0] in _AND:
            return f"{before}- {after}"
        if _is_own(before, left[0], right[0], words):
            return f"{before}-{after}"
        if (left[0] + right[0]).casefold() not in words:
            guessed.append(left[0] + right[0])
        return before + after

    return [_BROKEN.sub(settled, text) for text in texts], guessed


def _is_own(before: str, left: str, right: str, words: set[str]) -> bool:
    """Whether the hyphen between two halves is part of the word."""
    if "://" in before or "@" in before or before.startswith("www."):
        return True
    if not (left.isalpha() and right.isalpha()) or 1 in (len(left), len(right)):
        return True
    if right[0].isupper() and not left.isupper():
        return True
    low, high = left.casefold(), right.casefold()
    if low + high in words:
        return False
    return f"{low}-{high}" in words or (low in words and high in words)
