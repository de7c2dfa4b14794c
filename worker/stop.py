"""Why the worker is to stop: signals say so, or it found out that it cannot go on."""

from __future__ import annotations

import signal
from types import FrameType


class StopRequest:
    """SIGTERM or SIGINT once: drain. Again: at once.

    Handlers only set flags. Raising from one could lose a job between Redis and our hands.
    """

    def __init__(self) -> None:
        self.requested = False
        self.forced = False
        self.trouble: str | None = None
        """Why it cannot go on; None where it was told to stop."""

    def listen(self) -> None:
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def give_up(self, trouble: str) -> None:
        """Stop, as after a first signal, with this as the reason."""
        self.trouble = trouble
        self.requested = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.forced = self.requested
        self.requested = True
