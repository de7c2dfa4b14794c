"""What a bench says about where and how it ran."""

from __future__ import annotations

import platform
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    match = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return match[1] if match else platform.processor() or platform.machine()


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
