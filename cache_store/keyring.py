"""One key for each tenant, in a folder of its own: who deletes one has made unreadable what it encrypted.

    <folder>/default.key            of the tenant without a name
    <folder>/tenant-<name>.key      of any other; a name that makes no file name stands there as its digest
    <folder>/lock                   held while a key is made

A key is 256 random bits, in a file of 64 hexadecimal digits and a line end that only its owner may read. It
is read anew at each use: nothing here outlives its file. It knows no block.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from cache_store import files
from cache_store.errors import KeyringError

log = logging.getLogger("cache_store")

DATA_KEY_BYTES = 32
# No capitals: many file systems take them for small letters, and two tenants would have one key.
_TENANT = re.compile(r"[0-9a-z_-]{1,64}")
_FILE = re.compile(rb"([0-9a-fA-F]{64})\s*")
# Nothing that is derived from a key for one use tells anything of another use.
_ID = b"longleaf-key-id"
_NAMES = b"longleaf-names"
_FILE_KEY = b"longleaf-file"


class DataKey:
    """A tenant's key, and what is derived from it."""

    def __init__(self, raw: bytes) -> None:
        if len(raw) != DATA_KEY_BYTES:
            raise ValueError(f"a key has {DATA_KEY_BYTES} bytes, not {len(raw)}")
        self._raw = raw

    @property
    def id(self) -> bytes:
        """16 bytes that tell it from other keys and nothing else."""
        return blake2b(key=self._raw, digest_size=16, person=_ID).digest()

    def names(self, salt: bytes) -> bytes:
        """32 bytes for chains of block keys to begin with: who lacks the key can try no document's name."""
        return blake2b(salt, key=self._raw, digest_size=32, person=_NAMES).digest()

    def file_key(self, salt: bytes) -> bytes:
        """The 32 bytes that one file is encrypted with; salt: random, the file's own."""
        return blake2b(salt, key=self._raw, digest_size=32, person=_FILE_KEY).digest()


class Keyring:
    """The keys in a folder.

    Raises KeyringError where the folder is not there: one that is not mounted must not be made anew, for
    nothing that its keys encrypted would be found again.
    """

    def __init__(self, folder: Path) -> None:
        if not os.path.isdir(folder):
            raise KeyringError(
                f"no folder {folder} for the keys of stored prefixes: make it (mkdir -m 700), or mount what "
                "it is on"
            )
        self.folder = folder
        self._reported: set[str] = set()

    def get(self, tenant: str) -> DataKey | None:
        """The tenant's key; None where it has none or it cannot be read (logged once)."""
        try:
            return _read(self._path(tenant))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._report(tenant, error)
            return None

    def unreadable(self) -> list[Path]:
        """The files that are to hold a key and hold none, or none that can be read. Raises OSError."""
        found = []
        for path in sorted(self.folder.glob("*.key")):
            try:
                _read(path)
            except (OSError, ValueError):
                found.append(path)
        return found

    def make(self, tenant: str) -> DataKey:
        """The tenant's key, made where it has none.

        Raises KeyringError where it cannot be, or where a file of its name holds no key: that is left as it
        is.
        """
        path = self._path(tenant)
        if key := self.get(tenant):
            return key
        try:
            with files.locked(self.folder / "lock"):
                if not path.exists():
                    self._write(path)
        except OSError as error:
            raise KeyringError(f"key {path} cannot be made: {error}") from error
        key = self.get(tenant)
        if key is None:
            raise KeyringError(f"{path} holds no key; put it back from where it is kept, or remove it")
        return key

    def remove(self, tenant: str) -> bool:
        """Delete the tenant's key; False where it has none. Raises OSError."""
        removed = files.remove(self._path(tenant))
        files.sync_folder(self.folder)
        return removed

    def _path(self, tenant: str) -> Path:
        if not tenant:
            return self.folder / "default.key"
        plain = _TENANT.fullmatch(tenant)
        return self.folder / f"tenant-{tenant if plain else blake2b(tenant.encode()).hexdigest()}.key"

    def _write(self, path: Path) -> None:
        """Under the lock: what another writer left of its temporary file is overwritten."""
        temp = path.with_name(f".{path.name}.tmp")
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            files.write_at(fd, [memoryview(secrets.token_hex(DATA_KEY_BYTES).encode() + b"\n")], 0)
            os.fsync(fd)
            os.rename(temp, path)
        except BaseException:
            with suppress(OSError):
                files.remove(temp)
            raise
        finally:
            files.close(fd)
        files.sync_folder(self.folder)

    def _report(self, tenant: str, why: object) -> None:
        if tenant not in self._reported:
            self._reported.add(tenant)
            log.warning("%s is not used, and nothing that it encrypted: %s", self._path(tenant), why)


def _read(path: Path) -> DataKey:
    """Raises OSError, and ValueError where the file holds no key."""
    fd = os.open(path, files.READ_FLAGS)
    try:
        match = _FILE.fullmatch(os.pread(fd, 256, 0))
    finally:
        files.close(fd)
    if match is None:
        raise ValueError("it is not one line of 64 hexadecimal digits")
    return DataKey(bytes.fromhex(match[1].decode()))
