"""How much memory a process has in hand, asked from outside it.

It is the resident set: on a CPU and on Apple Silicon what the model and its KV take is part of it, and on an
NVIDIA GPU it is not, for device memory belongs to the driver.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def resident_bytes(pid: int) -> int:
    """Bytes of a process that are in memory; 0 for one that is gone."""
    try:
        if sys.platform == "linux":
            num_pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            return num_pages * os.sysconf("SC_PAGE_SIZE")
        said = subprocess.run(
            ["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, timeout=5, check=True
        )
        return int(said.stdout) * 1024
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0
