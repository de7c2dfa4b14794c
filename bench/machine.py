"""What a bench says about where and how it ran."""

from __future__ import annotations

import platform
import re
import shlex
import subprocess
import sys
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


def command(bench: str) -> str:
    """The command that runs now; of files and folders the names alone, for where they lie says nothing."""
    return f"python -m bench.{bench} {shlex.join(Path(word).name for word in sys.argv[1:])}".strip()


def result_path(folder: Path, bench: str, device: str) -> Path:
    """Where a bench keeps its result for a device, such as `engine.nvidia_h200.json`."""
    return folder / f"{bench}.{re.sub(r'[^a-z0-9]+', '_', device.lower()).strip('_')}.json"
