"""Why the engine refuses or stops."""

from __future__ import annotations

from typing import Any

from jobs import Problem


class EngineError(Exception):
    """The work cannot be done; says why in the words that the caller gets.

    Args:
        code: stable and machine-readable.
        detail: one sentence that names the limit, the value and the next step.
        params: the numbers in `detail`.
    """

    def __init__(self, code: str, detail: str, **params: Any) -> None:
        super().__init__(detail)
        self.problem = Problem(code=code, detail=detail, params=params)


class Stopped(Exception):
    """The job was told to stop between two pieces of work."""
