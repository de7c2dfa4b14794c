"""The name of a snapshot store, kept in the data folder: a restarted worker is known by what it holds."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

FILE = "store-name"


def store_name(data: Path) -> str:
    """The name kept in a data folder, made where there is none.

    Workers on one folder have one name. Where the folder cannot be written, the name is good for this run.
    """
    path = data / FILE
    fresh = secrets.token_hex(8)
    partial = path.with_name(f"{FILE}.{fresh}")
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            partial.write_text(fresh)
            try:
                os.link(partial, path)
            except FileExistsError:
                pass  # another worker was faster
            finally:
                partial.unlink()
        return path.read_text().strip() or fresh
    except OSError:
        return fresh
