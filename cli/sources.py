"""The documents that a command line names: files, ids, and what comes through a pipe.

Everything is read before anything is sent, so what cannot be read costs no upload.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO

from cli.client import Client
from cli.words import refuse, say

MAX_PIPE_BYTES = 2_000_000_000
"""A pipe may have no end; an upload of this size is refused by any API."""
_STANDARD_INPUTS = ("-", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")
_ID = re.compile(r"doc_[0-9A-Za-z]+")
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class _Copy:
    """What a file held when it was read: one that grows meanwhile, or a pipe, has no length to announce."""

    name: str
    file: BinaryIO


def is_document(word: str) -> bool:
    """Whether a word of the command line can only be meant as a document."""
    return word in _STANDARD_INPUTS or bool(_ID.fullmatch(word)) or _exists(word)


def document_ids(client: Client, words: Sequence[str], name: str | None = None) -> list[str]:
    """The ids of the documents that the words name, in their order; files are uploaded.

    Args:
        name: what to call the one document that is uploaded.

    Raises:
        typer.Exit: for a word that names nothing that can be read.
    """
    if sum(word in _STANDARD_INPUTS for word in words) > 1:
        refuse("standard input can be read once: name it once")
    with ExitStack() as copies:
        found = [_read(word, copies) for word in words]
        files = [one for one in found if isinstance(one, _Copy)]
        if name is not None and len(files) != 1:
            refuse(f"--name names one file or pipe, and there are {len(files)} of them here")
        return [
            one if isinstance(one, str) else _uploaded(client, one.file, name or one.name) for one in found
        ]


def _uploaded(client: Client, file: BinaryIO, name: str) -> str:
    """The id of an uploaded file, of which is told what its text has not."""
    document = client.upload_file(file, name)
    for warning in document.warnings or ():
        say(f"{name}: {warning.detail}")
    return document.id


def _read(word: str, copies: ExitStack) -> str | _Copy:
    """An id as it is, else a copy of what the word leads to."""
    if word in _STANDARD_INPUTS:
        return _copy_of_input(copies)
    if not _exists(word):
        if _ID.fullmatch(word):
            return word
        refuse(_nothing_there(word))
    try:
        status = os.stat(word)
        if reason := _unreadable_kind(status.st_mode):
            refuse(f"{word} is {reason}")
        with open(word, "rb") as file:
            own_name = "pipe" if stat.S_ISFIFO(status.st_mode) else Path(word).name
            return _Copy(own_name, _copied(word, file, copies))
    except OSError as error:
        refuse(_cannot_read(word, error))
        raise


def _copy_of_input(copies: ExitStack) -> _Copy:
    if sys.stdin is None or sys.stdin.closed:
        refuse("there is no standard input to read: name a file")
    if sys.stdin.isatty():
        say("reading the document from the terminal; Ctrl-D on a line of its own ends it")
    try:
        return _Copy("stdin", _copied("standard input", sys.stdin.buffer, copies))
    except OSError as error:
        refuse(_cannot_read("standard input", error))
        raise


def _copied(word: str, file: IO[bytes], copies: ExitStack) -> BinaryIO:
    """A file of the same bytes, without a name. Raises OSError where reading fails."""
    copy = copies.enter_context(tempfile.TemporaryFile(prefix="longleaf-"))  # noqa: SIM115
    num_bytes = 0
    while chunk := file.read(_CHUNK_BYTES):
        num_bytes += len(chunk)
        if num_bytes > MAX_PIPE_BYTES:
            refuse(f"{word} has more than {MAX_PIPE_BYTES:,} bytes: no API takes a document of that size")
        try:
            copy.write(chunk)
        except OSError as error:
            refuse(f"there is no room for a copy of {word} in {tempfile.gettempdir()} ({error.strerror})")
    copy.seek(0)
    return copy


def _exists(word: str) -> bool:
    """Whether there is a file of this name, be it one that cannot be read."""
    try:
        os.lstat(word)
    except PermissionError:
        return True
    except (OSError, ValueError):
        return False
    return True


def _nothing_there(word: str) -> str:
    shown = word if len(word) <= 80 else f"{word[:80]}…"
    return f"there is no file {shown!r}, and a document's id looks like doc_…; `-` reads standard input"


def _unreadable_kind(mode: int) -> str | None:
    if stat.S_ISDIR(mode):
        return "a folder: name the files in it, for example with *"
    if stat.S_ISSOCK(mode):
        return "a socket, and only files, pipes and standard input are read"
    if stat.S_ISBLK(mode) or stat.S_ISCHR(mode):
        return "a device, and only files, pipes and standard input are read"
    return None


def _cannot_read(word: str, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{word} is a link to a file that is not there"
    if isinstance(error, PermissionError):
        return f"{word} may not be read by this user: change its permissions (chmod), or copy it"
    if error.errno == errno.EIO:
        return f"{word} cannot be read: its disk reports an error; copy it from a backup"
    return f"{word} cannot be read: {error.strerror or type(error).__name__}"
