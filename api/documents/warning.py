"""What an upload's answer says about a text that is not all that its reader would see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict


class UploadWarning(TypedDict):
    """`code` is stable, `detail` one sentence with the next step, `params` its numbers."""

    code: str
    detail: str
    params: dict[str, Any]


def warning(code: str, detail: str, **params: Any) -> UploadWarning:
    return UploadWarning(code=code, detail=detail, params=params)


def ranges(numbers: Sequence[int], most: int = 12) -> str:
    """`[1, 3, 4, 5]` → `1, 3–5`; after `most` ranges it says how many numbers it leaves out."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs[:most]]
    left_out = sum(len(run) for run in runs[most:])
    return ", ".join(shown) + (f" and {left_out} more" if left_out else "")


def counted(number: int, noun: str) -> str:
    """`1 page`, `2 pages`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
