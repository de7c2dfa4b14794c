"""Standard input, output and error of a program that anything may have started: launchd, cron, a closed pipe.

It makes them safe to use; what is written to them is not its matter.
"""

from __future__ import annotations

import io
import os
import signal
import sys


def prepare() -> None:
    """Open what was closed, and let no character of a path or a name stop a line.

    A closed one would be the number of the next file that is opened: a database that a library's warning is
    then written into.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number, so this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            opened = os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False)
            setattr(sys, name, opened)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def end_with_reader() -> None:
    """Let the end of whoever reads the output end this program without a word, as other commands do.

    Only for one that writes to nothing else whose reader may go.
    """
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
