"""Whether a page's lines go across two columns, as a program writes them that prints row by row."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

_MIN_ROWS = 4
_MIN_WIDTH = 0.15
"""Of the page, for each half of a row: the columns of a table of figures are narrower."""
_ALIGNED = 3.0
_MAX_RECTS = 2000

Rect = tuple[float, float, float, float]
"""Left, top, right and bottom of a run of text, in points."""


def reads_across(text_page: Any, page_width: float) -> bool:
    """Whether most rows consist of two long runs with a gap between them, all at one place.

    A table of two columns of prose looks the same, and reads right.
    """
    num_rows = 0
    starts: list[float] = []
    for row in _rows(_rects(text_page)):
        num_rows += 1
        for left, right in pairwise(row):
            height = max(left[1] - left[3], 1.0)
            is_wide = min(left[2] - left[0], right[2] - right[0]) >= _MIN_WIDTH * page_width
            if is_wide and right[0] - left[2] > 1.5 * height:
                starts.append(right[0])
                break
    if len(starts) < max(_MIN_ROWS, num_rows / 2):
        return False
    middle = sorted(starts)[len(starts) // 2]
    return sum(abs(start - middle) < _ALIGNED for start in starts) * 5 >= len(starts) * 4


def _rows(rects: Iterator[Rect]) -> Iterator[list[Rect]]:
    """Runs that follow each other on one line."""
    row: list[Rect] = []
    for rect in rects:
        if row and not (_on_one_line(row[-1], rect) and rect[0] >= row[-1][2]):
            yield row
            row = []
        row.append(rect)
    if row:
        yield row


def _on_one_line(one: Rect, other: Rect) -> bool:
    shared = min(one[1], other[1]) - max(one[3], other[3])
    return shared > 0.5 * min(one[1] - one[3], other[1] - other[3])


def _rects(text_page: Any) -> Iterator[Rect]:
    from pypdfium2 import raw

    sides = [ctypes.c_double() for _ in range(4)]
    for index in range(min(_MAX_RECTS, raw.FPDFText_CountRects(text_page, 0, -1))):
        if raw.FPDFText_GetRect(text_page, index, *map(ctypes.byref, sides)):
            left, top, right, bottom = (side.value for side in sides)
            yield left, top, right, bottom
