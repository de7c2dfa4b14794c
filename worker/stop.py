"""What the worker was told by signals: to stop after giving its job back, or to stop now."""

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

    def listen(self) -> None:
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.forced = self.requested
        self.requested = True
