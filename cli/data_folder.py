"""Whether a data folder takes what the service does with it, found out by doing it there.

It knows folders and file systems; where the queue's socket goes is in redis_server.py.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pwd
import shlex
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from jobs.private_files import ours

MAX_PATH_BYTES = 450
"""SQLite takes 512 bytes, with the names of the database and of what is written next to it."""

_OTHER_FOLDER = "set LONGLEAF_DATA to a folder on a local disk"


class Unusable(RuntimeError):
    """The service cannot run on the folder: what is wrong with it, and in `mend` what to do."""

    def __init__(self, detail: str, mend: str) -> None:
        super().__init__(f"{detail}; {mend}")
        self.detail, self.mend = detail, mend


def try_out(data: Path) -> str:
    """Do in a folder what the service does, and leave it as it was.

    Returns what others could do with it, where its file system keeps no permissions; "" where it does.

    Raises:
        Unusable: the service cannot run there.
    """
    _check_path(data)
    with present(data), _scratch(data) as scratch:
        _check_ours(data)
        keeps_modes = True
        for what, attempt in (
            ("files", _files),
            ("locks", _locks),
            ("a SQLite database that several processes open", _database),
        ):
            try:
                keeps_modes = attempt(scratch) and keeps_modes
            except (OSError, sqlite3.Error) as error:
                raise _unusable(data, error, f"its file system does not take {what}") from error
    return "" if keeps_modes else f"the file system of {data} keeps no permissions"


@contextmanager
def present(data: Path) -> Iterator[None]:
    """The folder is there meanwhile: made where it is not, and taken away again after that.

    Raises:
        Unusable: it cannot be made.
    """
    missing = [folder for folder in (data, *data.parents) if not folder.exists()]
    made = []
    try:
        for folder in reversed(missing):
            try:
                folder.mkdir(mode=0o700)
            except FileExistsError:
                continue  # by another process meanwhile
            except OSError as error:
                raise _unusable(data, error, f"{folder} cannot be made") from error
            made.append(folder)
        yield
    finally:
        for folder in reversed(made):
            with suppress(OSError):
                folder.rmdir()


@contextmanager
def _scratch(data: Path) -> Iterator[Path]:
    try:
        scratch = Path(tempfile.mkdtemp(prefix=".longleaf-try-", dir=data))
    except OSError as error:
        raise _unusable(data, error, "nothing can be written there") from error
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _check_path(data: Path) -> None:
    for path in (data, *data.parents):
        if path.is_symlink() and not path.exists():
            raise Unusable(
                f"{path} is a link to {os.readlink(path)}, which is not there",
                "mount the disk that it is on, or set LONGLEAF_DATA to another folder",
            )
        if path.exists():
            if not path.is_dir():
                raise Unusable(f"{path} is not a folder", "set LONGLEAF_DATA to another place")
            break
    num_bytes = len(os.fsencode(data.resolve()))
    if num_bytes > MAX_PATH_BYTES:
        raise Unusable(
            f"the path of the data folder has {num_bytes} bytes, and SQLite takes {MAX_PATH_BYTES}",
            "set LONGLEAF_DATA to a shorter one",
        )


def _check_ours(data: Path) -> None:
    """Whether what is ours there may be used: `sudo longleaf up`, once, makes files of root's."""
    for top in ours(data):
        below = sorted(top.iterdir()) if top.is_dir() and os.access(top, os.R_OK | os.X_OK) else []
        for path in (top, *below):
            wanted = os.R_OK | os.W_OK | (os.X_OK if path.is_dir() else 0)
            if path.exists() and not os.access(path, wanted):
                raise Unusable(f"{path} may not be read and written ({_ownership(path)})", _take_over(data))


def _files(scratch: Path) -> bool:
    part, path = scratch / "file.part", scratch / "file"
    fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(fd, b"x" * 4096)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(part, path)
    folder = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    with suppress(OSError):
        path.chmod(0o600)
    return not any(found.stat().st_mode & 0o077 for found in (path, scratch))


def _locks(scratch: Path) -> bool:
    with (scratch / "lock").open("w") as first, (scratch / "lock").open("w") as second:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    raise OSError(errno.ENOLCK, "a second program gets a lock that is taken")


def _database(scratch: Path) -> bool:
    path = scratch / "try.db"
    with closing(sqlite3.connect(path)) as writer, closing(sqlite3.connect(path)) as reader:
        (mode,) = writer.execute("PRAGMA journal_mode=WAL").fetchone()
        if mode != "wal":
            raise sqlite3.OperationalError(f"no write-ahead log, its journal is {mode!r}")
        with writer:
            writer.execute("CREATE TABLE t (x)")
            writer.execute("INSERT INTO t VALUES (1)")
        if reader.execute("SELECT x FROM t").fetchall() != [(1,)]:
            raise sqlite3.OperationalError("what one connection writes another does not see")
    return True


def _unusable(data: Path, error: OSError | sqlite3.Error, what: str) -> Unusable:
    """What a failure in the folder means, and what to do about it."""
    why = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
    number = error.errno if isinstance(error, OSError) else None
    detail = f"the data folder {data} cannot be used: {what} ({why})"
    mend = _OTHER_FOLDER
    if number in (errno.EACCES, errno.EPERM):
        there = next(folder for folder in (data, *data.parents) if folder.exists())
        detail = f"{detail[:-1]}, {_ownership(there)})"
        mend = _take_over(data) if there == data else "set LONGLEAF_DATA to a folder that you may write"
    elif number == errno.EROFS:
        mend = "mount it for writing, or set LONGLEAF_DATA to a folder on another disk"
    elif number in (errno.ENOSPC, errno.EDQUOT):
        mend = "free some space there, or set LONGLEAF_DATA to a larger disk"
    return Unusable(detail, mend)


def _ownership(path: Path) -> str:
    status = path.stat()
    owner, mode = _name(status.st_uid), stat.S_IMODE(status.st_mode)
    return f"it belongs to {owner}, mode {mode:o}; you are {_name(os.geteuid())}"


def _take_over(data: Path) -> str:
    who, where = f"{os.geteuid()}:{os.getegid()}", shlex.quote(str(data))
    return (
        f"`sudo chown -R {who} {where} && chmod -R u+rwX {where}` gives it to you, or set LONGLEAF_DATA to "
        "another folder"
    )


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
