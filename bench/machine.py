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
    """What git says of this repository; nothing where there is no git or no repository."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def commit() -> str:
    return git("rev-parse", "--short", "HEAD") or "unknown"


def result_path(folder: Path, bench: str, device: str) -> Path:
    """Where a bench keeps its result for a device, such as `engine.nvidia_h200.json`."""
    return folder / f"{bench}.{re.sub(r'[^a-z0-9]+', '_', device.lower()).strip('_')}.json"
