"""Write block 0 of a chain, and die by SIGKILL before the n-th system call that changes the folder.

Usage: die_while_saving.py FOLDER BUDGET_BYTES STEP
STEP `half`: die within the write, with half of its bytes done. Prints `survived` where there is no such step.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stored_blocks import make_chain, put

from cache_store import SnapshotStore

CALLS = ("mkdir", "open", "ftruncate", "pwritev", "fsync", "rename", "unlink", "close", "utime")


def main(folder: str, budget_bytes: str, step: str) -> None:
    made = 0

    def wrap(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            nonlocal made
            made += 1
            if step == "half" and name == "pwritev":
                fd, views, offset = arguments
                call(fd, [view[: view.nbytes // 2] for view in views[:3]], offset)
            if step == str(made - 1) or (step == "half" and name == "pwritev"):
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return run

    for name in CALLS:
        setattr(os, name, wrap(name, getattr(os, name)))
    store = SnapshotStore(Path(folder), int(budget_bytes), 0)
    put(store, make_chain(1), 0)
    print("survived", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
