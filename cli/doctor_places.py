"""What `longleaf doctor` says of places: folders, their file systems, the queue's socket, and the clock.

Each is found out by doing there what the service does, and taking it away again.
"""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import tempfile
import time
from datetime import datetime
from pathlib import Path

from cli.data_folder import Unusable, present, try_out
from cli.finding import Finding
from cli.redis_server import NoServer, find_program, place_socket, remove_place
from cli.redis_server import try_out as try_server
from cli.settings import Settings
from jobs.private_files import is_ours_alone, open_to_others, ours

ROOM_BYTES = 5_000_000_000
"""Less free space than this is worth a word: a database, uploads, and snapshots that one wants to keep."""
_UPLOAD_BYTES = 200_000_000
_CLOCK_S = 86_400.0


def data_folder(settings: Settings) -> Finding:
    name, data = "data folder", settings.data
    try:
        risk = try_out(data)
    except Unusable as error:
        return Finding(name, "bad", error.detail, error.mend)
    there = next(folder for folder in (data, *data.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free
    detail = f"{data}, {free / 1e9:,.1f} GB free"
    if risk:
        mend = (
            "others who can reach it read documents and answers; set LONGLEAF_DATA to a disk that keeps modes"
        )
        return Finding(name, "warn", f"{detail}; {risk}", mend)
    if os.geteuid() == 0 and data.exists() and (owner := data.stat().st_uid) != 0:
        mend = "run Longleaf as that user: what root makes there that user cannot use"
        return Finding(name, "warn", f"{detail}; it belongs to user {owner} and you are root", mend)
    if data.exists() and (open_ones := list(open_to_others(data))):
        more = f" and {len(open_ones) - 1} more" if len(open_ones) > 1 else ""
        mend = f"the next start closes them, or now: `chmod -R go= {shlex.quote(str(data))}`"
        return Finding(name, "warn", f"{open_ones[0]}{more} can be read by other users", mend)
    if data.exists() and stat.S_IMODE(data.stat().st_mode) & 0o077 and not is_ours_alone(data) and ours(data):
        detail += "; other things are in it, so it stays open to others, and what is Longleaf's in it is not"
    if free < ROOM_BYTES:
        mend = "free some space, or set LONGLEAF_DATA to a larger disk"
        return Finding(name, "warn", detail, mend)
    return Finding(name, "ok", detail)


def own_server(settings: Settings) -> Finding:
    """The server that `longleaf up` brings, started on an empty folder next to the queue's."""
    folder = settings.data / "redis"
    try:
        with present(folder):
            program, socket = find_program(folder), place_socket(folder)
            remove_place(folder, socket)
            try_server(program, settings.data)
    except NoServer as error:
        return Finding(
            "Redis", "bad", str(error), "install another server, or set REDIS_URL to a running one"
        )
    except (Unusable, OSError):
        return Finding("Redis", "bad", "not tried, for want of a data folder", "see the data folder")
    return Finding("Redis", "ok", f"{program}, started by `longleaf up`, its socket in {socket.parent}")


def temporary_folder(_: Settings) -> Finding:
    """Uploads are kept there while they are read."""
    name = "temporary folder"
    try:
        with tempfile.NamedTemporaryFile(prefix="longleaf-") as file:
            file.write(b"x")
            file.flush()
            folder = Path(file.name).parent
    except OSError as error:
        mend = "set TMPDIR to a folder that you may write"
        return Finding(name, "bad", f"uploads cannot be kept while they are read ({error})", mend)
    free = shutil.disk_usage(folder).free
    detail = f"{folder}, {free / 1e9:,.1f} GB free"
    if free < _UPLOAD_BYTES:
        return Finding(name, "warn", detail, "free some space, or set TMPDIR to a larger disk")
    return Finding(name, "ok", detail)


def models_folder(settings: Settings) -> Finding:
    """A model that is not there yet is stored there."""
    name, folder = "models folder", settings.models
    if settings.model_folder.exists():
        return Finding(name, "ok", str(folder))
    there = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    if not there.is_dir():
        mend = "set LONGLEAF_MODELS to another place"
        return Finding(name, "bad", f"{there} is no folder", mend)
    try:
        with tempfile.TemporaryDirectory(prefix=".longleaf-try-", dir=there):
            pass
    except OSError as error:
        mend = "set LONGLEAF_MODELS to a folder that you may write"
        return Finding(name, "bad", f"{folder} cannot be written ({error.strerror})", mend)
    return Finding(name, "ok", f"{folder}, {shutil.disk_usage(there).free / 1e9:,.1f} GB free")


def clock(settings: Settings) -> Finding:
    """A clock that was set far back ends no job, but certificates, times and expiries are wrong."""
    now = time.time()
    known = [Path(__file__), *(path for path in ours(settings.data) if path.is_file())]
    newest = max(known, key=lambda path: path.stat().st_mtime)
    detail = _said(now)
    if newest.stat().st_mtime > now + _CLOCK_S:
        mend = "set the clock: certificates are refused, and jobs and answers get wrong times"
        return Finding("clock", "warn", f"{detail}, but {newest} is of {_said(newest.stat().st_mtime)}", mend)
    return Finding("clock", "ok", detail)


def _said(at: float) -> str:
    return f"{datetime.fromtimestamp(at):%Y-%m-%d %H:%M}"
