"""The files of a data folder, which are for their user alone whatever the umask says and whatever is there.

Every program of ours calls `only_for_user` before it writes anything; those that use a data folder call
`make_private` on it once at their start, which mends what an older version or a copy left open.
"""

from __future__ import annotations

import fnmatch
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

OURS = ("longleaf.db*", "worker.token*", "store-name*", "up.*", "redis", "snapshots", ".longleaf-*")
"""What API, worker and the command make in a data folder."""
_HARMLESS = (".DS_Store", ".localized", "lost+found")


def only_for_user() -> int:
    """Make what this process and its children create from now on unreadable for others; the umask before."""
    return os.umask(0o077)


def make_private(data: Path) -> None:
    """Close a data folder, and what is ours in it, to other users.

    A folder that holds other things too (a home, /tmp) keeps its own mode. What belongs to another user stays
    as it is: `longleaf doctor` names it.
    """
    for path in open_to_others(data):
        with suppress(OSError):
            path.chmod(stat.S_IMODE(path.stat().st_mode) & 0o700)


def open_to_others(data: Path) -> Iterator[Path]:
    """The data folder and what is ours in it, as far as others may read or write it and we may mend it."""
    if is_ours_alone(data) and _is_open(data):
        yield data
    for path in ours(data):
        if _is_open(path):
            yield path
        if path.is_dir():
            yield from _open_below(path)


def ours(data: Path) -> list[Path]:
    """What is ours at the top of a data folder; nothing where it cannot be listed."""
    try:
        names = sorted(os.listdir(data))
    except OSError:
        return []
    return [data / name for name in names if any(fnmatch.fnmatchcase(name, ours) for ours in OURS)]


def is_ours_alone(data: Path) -> bool:
    """Whether a folder holds nothing but what a data folder has."""
    try:
        names = set(os.listdir(data))
    except OSError:
        return False
    return not names - {path.name for path in ours(data)} - set(_HARMLESS)


def _open_below(folder: Path) -> Iterator[Path]:
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                continue
            if _is_open_mode(entry.stat(follow_symlinks=False)):
                yield Path(entry.path)
            if entry.is_dir(follow_symlinks=False):
                yield from _open_below(Path(entry.path))


def _is_open(path: Path) -> bool:
    try:
        return _is_open_mode(path.stat())
    except OSError:
        return False


def _is_open_mode(status: os.stat_result) -> bool:
    return bool(status.st_mode & 0o077) and status.st_uid == os.geteuid()
