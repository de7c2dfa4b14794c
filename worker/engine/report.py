"""What the engine tells while it works, and where it learns that it must stop."""

from __future__ import annotations

from typing import Literal, Protocol

from jobs import Output

Phase = Literal["load", "restore", "prefill", "decode"]


class Report(Protocol):
    """Of one output. Those of a batch are told by turns, and only the oldest of its progress in decode."""

    def check(self) -> None:
        """Raise `Stopped` if the job must stop. Called between chunks and tokens."""

    def progress(self, phase: Phase, num_done: int, num_total: int, cached_tokens: int) -> None:
        """Tokens done in a phase. Called often; the receiver thins it out by the clock."""

    def delta(self, text: str) -> None:
        """New text of the answer, thinking left out; never half a character."""

    def done(self, output: Output) -> None:
        """The answer is complete; others of the batch may go on."""


class Silent:
    """A report that nobody reads."""

    def check(self) -> None:
        pass

    def progress(self, phase: Phase, num_done: int, num_total: int, cached_tokens: int) -> None:
        pass

    def delta(self, text: str) -> None:
        pass

    def done(self, output: Output) -> None:
        pass
