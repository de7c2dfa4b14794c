"""What `longleaf doctor` finds, and how it asks code that may be broken: in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ASK_S = 120


@dataclass(frozen=True)
class Finding:
    """`mend` is empty where there is nothing to do."""

    name: str
    state: Literal["ok", "warn", "bad"]
    detail: str
    mend: str = ""


def ask(code: str, *words: str) -> tuple[dict[str, Any], str]:
    """What the code prints as JSON, and else the last line of its complaint."""
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, *words],
            capture_output=True,
            text=True,
            timeout=ASK_S,
            env={**os.environ, "PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired:
        return {}, f"no answer within {ASK_S} s"
    if done.returncode == 0:
        return json.loads(done.stdout), ""
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return {}, lines[-1]
