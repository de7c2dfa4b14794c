"""Where `longleaf up` writes its parts' lines: a terminal, a pipe that nobody reads any more, a full disk.

Lines may be lost here, but nothing waits for whoever reads them and nothing ends with them.
"""

from __future__ import annotations

import os
import select
import sys
from collections import deque

from honcho.printer import Message, Printer

from jobs.printable import printable

NUM_LAST_LINES = 12
_PATIENCE_S = 1.0


class Output:
    """A text file for `Printer` on a file descriptor, that neither fails nor blocks for long."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._is_stuck = False

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def flush(self) -> None:
        """Nothing is held back."""

    def write(self, text: str) -> int:
        data = memoryview(text.encode("utf-8", "backslashreplace"))
        try:
            while data and self._takes_more():
                # What fits in a pipe at once: more would wait for its reader.
                data = data[os.write(self._fd, data[: select.PIPE_BUF]) :]
        except OSError:
            pass  # the reader has gone, the terminal was closed, the disk is full
        return len(text)

    def _takes_more(self) -> bool:
        """Whether something can be written; a reader that has stopped reading is waited for once."""
        wait_s = 0.0 if self._is_stuck else _PATIENCE_S
        self._is_stuck = not select.select([], [self._fd], [], wait_s)[1]
        return not self._is_stuck


class KeepingPrinter(Printer):
    """Prints lines, and keeps the last ones of each part."""

    def __init__(self) -> None:
        super().__init__(Output(sys.stdout.fileno()))
        self._last: dict[str, deque[str]] = {}

    def write(self, message: Message) -> None:
        said = message.data.decode(errors="replace") if isinstance(message.data, bytes) else message.data
        data = printable(said)
        kept = self._last.setdefault(message.name, deque(maxlen=NUM_LAST_LINES))
        kept.extend(filter(str.strip, data.splitlines()))
        super().write(message._replace(data=data))

    def last_lines(self, part: str) -> list[str]:
        return list(self._last.get(part, ()))
