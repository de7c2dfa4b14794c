"""Prefixes as one file, to carry to another machine: a plain tar of block files under a manifest.

The manifest comes first and names every block with the xxh3 of its file, so that a cut file is noticed;
the blocks carry their own checksums too. A key vouches for a name, not for the bytes: import what you trust.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import xxhash

from cache_store import files
from cache_store.errors import BadBlock, CacheStoreError
from cache_store.header import MAX_HEADER_BYTES
from cache_store.index import SUFFIX
from cache_store.key import BlockKey
from cache_store.prefixes import chain_of
from cache_store.store import SnapshotStore

_MANIFEST = "longleaf-prefixes.json"
_VERSION = 1


class BadExport(CacheStoreError):
    """A file that is no whole export; what of it was read before is stored."""


def export_prefixes(store: SnapshotStore, keys: Sequence[BlockKey], path: Path) -> int:
    """Write prefixes with what is attached to them to a file that is not there yet; how many blocks it has.

    Every byte is checked on the way. Raises BadBlock for a block that is bad or gone, OSError for the file.
    """
    entries = {entry.key: entry for entry in store.entries()}
    wanted = {entry.key: entry for key in keys for entry in chain_of(entries, key)}
    wanted |= {entry.key: entry for entry in entries.values() if entry.attached and entry.parent in wanted}
    temp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            checksums = {key.hex: xxhash.xxh3_64_hexdigest(store.read_file(key)) for key in wanted}
            with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
                manifest = {"version": _VERSION, "blocks": checksums}
                _add(tar, _MANIFEST, json.dumps(manifest).encode())
                for key in wanted:
                    _add(tar, key.hex + SUFFIX, store.read_file(key))
            file.flush()
            os.fsync(file.fileno())
        os.link(temp, path)  # unlike rename, never over what is there
        files.sync_folder(path.parent)
    finally:
        files.remove(temp)
    return len(wanted)


def import_prefixes(store: SnapshotStore, path: Path) -> Iterator[tuple[BlockKey, bool]]:
    """Store the blocks of an exported file; each key with whether it is stored now.

    Raises BadExport where the file is none or is cut or damaged, OSError where it cannot be read.
    """
    with path.open("rb") as file:
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                yield from _blocks(store, path, tar)
        except (tarfile.TarError, EOFError, ValueError, BadBlock) as error:
            raise BadExport(f"{path} is no whole export of prefixes: {error}; export it again") from error


def _blocks(store: SnapshotStore, path: Path, tar: tarfile.TarFile) -> Iterator[tuple[BlockKey, bool]]:
    left: dict[str, str] = {}
    for number, member in enumerate(tar):
        file = tar.extractfile(member)
        if file is None:
            raise ValueError(f"{member.name} is no file")
        if not number:
            left = _manifest(member, file)
            continue
        raw, name = file.read(), member.name.removesuffix(SUFFIX)
        if left.pop(name, None) != xxhash.xxh3_64_hexdigest(raw):
            raise ValueError(f"{member.name} has not the checksum that the manifest tells")
        key = BlockKey.from_hex(name)
        yield key, store.write_file(key, raw, path)
    if left:
        raise ValueError(f"{len(left)} blocks are missing")


def _manifest(member: tarfile.TarInfo, file: IO[bytes]) -> dict[str, str]:
    if member.name != _MANIFEST or member.size > MAX_HEADER_BYTES:
        raise ValueError(f"it begins with {member.name}, not {_MANIFEST}")
    manifest = json.load(file)
    if not isinstance(manifest, dict) or manifest.get("version") != _VERSION:
        raise ValueError(f"version {_VERSION} of the manifest is read, no other")
    return dict(manifest["blocks"])


def _add(tar: tarfile.TarFile, name: str, raw: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(raw), 0o600
    tar.addfile(member, io.BytesIO(raw))
