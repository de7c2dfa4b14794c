"""Which characters of a text belong to which page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TypedDict

_MARK = re.compile(
    r"^[ \t]*(?:<!--[ \t]*page[ \t]+(\d{1,6})[ \t]*-->|\[page[ \t]+(\d{1,6})\])[ \t]*$",
    re.MULTILINE | re.IGNORECASE,
)


class Page(TypedDict):
    """`text[start:end]`; the pages of a text follow each other and cover it without a gap."""

    number: int
    start: int
    end: int


def marked_pages(text: str) -> list[Page]:
    """Pages of a text with lines `<!-- page 3 -->` or `[page 3]`, or else with form feeds.

    A mark begins its page. What stands before the first mark belongs to page 1 if that is the
    first mark, otherwise to the page before it. A mark that does not count up is ordinary text.
    Returns an empty list where nothing says where pages are.
    """
    starts = list(_marks(text)) or list(_form_feeds(text))
    return spans(starts, len(text))


def spans(starts: list[tuple[int, int]], num_chars: int) -> list[Page]:
    """(number, start) of each page, in order, to pages that end where the next one begins."""
    ends = [*(start for _, start in starts[1:]), num_chars]
    # Without any start there is one end too many.
    return [Page(number=n, start=start, end=end) for (n, start), end in zip(starts, ends, strict=False)]


def _marks(text: str) -> Iterator[tuple[int, int]]:
    last = 0
    for match in _MARK.finditer(text):
        number = int(match[1] or match[2])
        if number <= last:
            continue
        if last == 0:
            if number == 1 or not text[: match.start()].strip():
                yield number, 0
            else:
                yield number - 1, 0
                yield number, match.start()
        else:
            yield number, match.start()
        last = number


def _form_feeds(text: str) -> Iterator[tuple[int, int]]:
    # A form feed ends its page; after the last one there may be nothing.
    start, number = 0, 1
    while (end := text.find("\f", start)) != -1:
        yield number, start
        start, number = end + 1, number + 1
    if number > 1 and text[start:].strip():
        yield number, start
