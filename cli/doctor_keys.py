"""What `longleaf doctor` says of secrets in files: the keys of stored prefixes, and a worker's token."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from cli.finding import Finding, ask
from cli.settings import Settings

_KEYS = """
import json, sys
from pathlib import Path
from cache_store import Keyring, SnapshotStore
keys, snapshots = map(Path, sys.argv[1:])
entries = SnapshotStore(snapshots, 1 << 62, 0).entries() if snapshots.is_dir() else []
plain = [entry.disk_bytes for entry in entries if not entry.key_id]
unreadable = [path.name for path in Keyring(keys).unreadable()]
print(json.dumps({"unreadable": unreadable, "num_plain": len(plain), "plain_bytes": sum(plain)}))
"""
_TOKEN = """
import json, sys
from worker.join import sign_on
from worker.redis_server import CannotStart
from worker.settings import SettingsError, load_settings
try:
    settings = load_settings()
    token = settings.token()
    named = settings.worker_token is not None or settings.worker_token_file is not None
    asked = named and "api" in settings.model_fields_set
    version = sign_on(settings.api, token).version if asked else ""
except (SettingsError, CannotStart) as error:
    sys.exit(" ".join(str(error).split()))
path = settings.worker_token_file or settings.local_worker_token
print(json.dumps({
    "path": "" if settings.worker_token is not None else str(path),
    "is_there": token is not None, "named": named, "api": settings.api if asked else "", "version": version,
}))
"""


def snapshot_keys(settings: Settings) -> Finding:
    name, folder = "snapshot keys", settings.snapshot_keys
    if folder is None:
        return Finding(name, "ok", "none: stored prefixes are not encrypted")
    if not folder.is_dir():
        mend = f"mount what it is on, or make it: `mkdir -m 700 {folder}`"
        return Finding(name, "bad", f"LONGLEAF_SNAPSHOT_KEYS={folder} is no folder", mend)
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        mend = "let the user who runs the worker read and write it"
        return Finding(name, "bad", f"{folder} cannot be read and written: no tenant gets a key", mend)
    found, error = ask(_KEYS, str(folder), str(settings.snapshots))
    if error:
        return Finding(name, "bad", error, "install the locked packages again: `make clean demo`")
    if found["unreadable"]:
        first, more = found["unreadable"][0], len(found["unreadable"]) - 1
        detail = f"{folder / first} holds no key that can be read" + (f" ({more} more)" if more else "")
        mend = "put it back from where a copy is kept, or remove it: its tenant's next job makes another"
        return Finding(name, "warn", detail, mend)
    keys = sorted(folder.glob("*.key"))
    for path in (folder, *keys):
        if _is_shared(path):
            mend = f"chmod {'700' if path is folder else '600'} {path}"
            return Finding(name, "warn", f"{path} is open to other users ({_mode(path)})", mend)
    if found["num_plain"]:
        num_bytes = f"{found['plain_bytes'] / 1e6:,.1f} MB"
        detail = f"{found['num_plain']:,} blocks ({num_bytes}) from before them are not encrypted"
        return Finding(name, "warn", detail, "no job finds them any more: `longleaf prefixes rm --plain`")
    return Finding(name, "ok", f"{len(keys)} in {folder}")


def worker_token(settings: Settings) -> Finding:
    """A worker's own; the API is asked whether it takes it where LONGLEAF_API and a token are set."""
    name = "worker token"
    found, error = ask(_TOKEN)
    if error:
        mend = "on the API's host `longleaf keys create --scope worker` makes one"
        return Finding(name, "bad", error, mend)
    path = Path(found["path"]) if found["path"] else None
    if not found["is_there"]:
        if found["named"]:
            mend = "on the API's host `longleaf keys create --scope worker` makes one"
            return Finding(name, "bad", f"{path or 'LONGLEAF_WORKER_TOKEN'} is empty", mend)
        return Finding(name, "ok", "none yet; the API makes one for the workers on its data folder")
    if path is not None and _is_shared(path):
        detail = f"{path} is open to other users ({_mode(path)})"
        return Finding(name, "warn", detail, f"chmod 600 {path}")
    taken = f", taken by {found['api']} (Longleaf {found['version']})" if found["api"] else ""
    return Finding(name, "ok", f"{path or 'LONGLEAF_WORKER_TOKEN'}{taken}")


def _is_shared(path: Path) -> bool:
    return bool(path.stat().st_mode & 0o077)


def _mode(path: Path) -> str:
    return f"{stat.S_IMODE(path.stat().st_mode):o}"
