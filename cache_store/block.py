"""A whole block as bytes: laying it out for a file and reading its payload back into place.

Owns the order of sections and the checks of their bytes. It knows no folder, no budget, and not what
a section means.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from cache_store.errors import BadBlock
from cache_store.files import read_at
from cache_store.header import (
    DTYPE_BYTES,
    EXACT,
    FORMAT_VERSION,
    HAS_PARENT,
    HEADER_ALIGN,
    MAGIC,
    MAX_DIMS,
    MAX_HEADER_BYTES,
    PRELUDE,
    PRELUDE_BYTES,
    ROW,
    SECTION_ALIGN,
    Header,
    Layout,
    SealedHeader,
    parse_header,
    round_up,
)
from cache_store.key import KEY_BYTES, BlockKey, TokenIds
from cache_store.keyring import Keyring
from cache_store.seal import SealedReader, open_header, plain_bytes

# Read, then hash, in pieces: they stay in a processor's cache, and two threads seldom wait for each other.
_PIECE_BYTES = 8 << 20


@dataclass(frozen=True)
class Section:
    """A named array to store. `data`: its bytes in C order, any contiguous buffer of exactly that size."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def layout(
    key: BlockKey,
    parent: BlockKey | None,
    token_ids: TokenIds,
    sections: Sequence[Section],
    exact: bool,
    meta: Mapping[str, Any],
) -> list[memoryview]:
    """The whole file as buffers to write one after another; equal arguments give equal bytes.

    Raises ValueError for a section that does not fit the format and for metadata that is not JSON.
    """
    meta_json = json.dumps(
        meta, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()
    header_bytes = PRELUDE_BYTES + token_ids.nbytes + ROW.itemsize * len(sections) + len(meta_json)
    payload_offset = round_up(header_bytes, HEADER_ALIGN)
    if payload_offset > MAX_HEADER_BYTES:
        raise ValueError(
            f"header of {payload_offset} bytes is over {MAX_HEADER_BYTES}: fewer sections or less metadata"
        )
    table = np.zeros(len(sections), ROW)
    payload: list[memoryview] = []
    end = payload_offset
    for row, section in zip(table, sections, strict=True):
        data = section_bytes(section)
        offset = round_up(end, SECTION_ALIGN)
        payload += [memoryview(bytes(offset - end)), data]
        end = offset + data.nbytes
        row["name"], row["dtype"] = section.name.encode(), section.dtype.encode()
        row["num_dims"], row["offset"], row["size"] = len(section.shape), offset, data.nbytes
        row["shape"][: len(section.shape)] = section.shape
        row["xxh3"] = xxhash.xxh3_64_intdigest(data)
    rest = b"".join([token_ids.tobytes(), table.tobytes(), meta_json]).ljust(
        payload_offset - PRELUDE_BYTES, b"\0"
    )
    front = PRELUDE.pack(
        MAGIC,
        FORMAT_VERSION,
        (EXACT if exact else 0) | (HAS_PARENT if parent else 0),
        header_bytes,
        payload_offset,
        end - payload_offset,
        token_ids.size,
        len(sections),
        len(meta_json),
        key.digest,
        parent.digest if parent else bytes(KEY_BYTES),
        bytes(24),
        xxhash.xxh3_64_intdigest(rest),
        0,
    )[:-8]
    prelude = front + xxhash.xxh3_64_intdigest(front).to_bytes(8, "little")
    return [memoryview(prelude), memoryview(rest), *payload]


def section_bytes(section: Section) -> memoryview:
    """A section's data as plain bytes; ValueError where name, dtype, shape and data do not agree."""
    name, item_bytes = section.name.encode(), DTYPE_BYTES.get(section.dtype)
    if not name or len(name) > 48 or b"\0" in name:
        raise ValueError(f"section name {section.name!r} must be 1 to 48 bytes of UTF-8 without NUL")
    if item_bytes is None:
        raise ValueError(
            f"section {section.name}: dtype {section.dtype!r} is none of {', '.join(DTYPE_BYTES)}"
        )
    if len(section.shape) > MAX_DIMS or any(not 0 <= size < 1 << 32 for size in section.shape):
        raise ValueError(
            f"section {section.name}: shape {section.shape} exceeds {MAX_DIMS} dimensions or 32 bits"
        )
    num_bytes = item_bytes
    for size in section.shape:
        num_bytes *= size
    view = memoryview(section.data)
    if view.nbytes != num_bytes or not view.c_contiguous:
        raise ValueError(
            f"section {section.name}: {section.dtype} {section.shape} is {num_bytes} contiguous bytes, "
            f"the data has {view.nbytes}"
        )
    return view.cast("B") if num_bytes else memoryview(b"")


def writable_bytes(buffers: Sequence[memoryview]) -> list[memoryview]:
    """Buffers to read into, as plain bytes; ValueError for one that cannot be written in one piece."""
    views = [memoryview(buffer) for buffer in buffers]
    if any(view.readonly or not view.c_contiguous for view in views):
        raise ValueError("buffers to read into must be writable and contiguous")
    return [view.cast("B") if view.nbytes else memoryview(bytearray()) for view in views]


def read_payload(fd: int, header: Header, into: Sequence[memoryview]) -> None:
    """Read every section into the caller's buffers (bytes, in table order) and check every byte.

    The buffers' contents are undefined after BadBlock.
    """
    path, layout = header.path, header.layout
    wanted, plan = list(map(len, into)), _plan(layout)
    if wanted != plan.sizes:
        raise BadBlock(path, "section sizes", wanted, plan.sizes)
    sealed = SealedReader(fd, header, header.seal) if header.seal else None
    read = sealed.read_at if sealed else partial(read_at, fd)
    told = header.table["xxh3"].tolist()
    position = header.prelude.payload_offset
    for first, last in plan.runs:
        offset, views = layout.offsets[first], into[first:last]
        if offset > position:
            gap = bytearray(offset - position)
            position += _read(read, [memoryview(gap)], position, path)
            if any(gap):
                raise BadBlock(path, "gaps between sections", "zeros", "other bytes")
        if wanted[first] <= _PIECE_BYTES:
            position += _read(read, views, position, path)
            found = list(map(xxhash.xxh3_64_intdigest, views))
        else:
            digest = xxhash.xxh3_64()
            for start in range(0, wanted[first], _PIECE_BYTES):
                piece = views[0][start : start + _PIECE_BYTES]
                position += _read(read, [piece], position, path)
                digest.update(piece)
            found = [digest.intdigest()]
        if found != told[first:last]:
            bad = next(n for n in range(first, last) if found[n - first] != told[n])
            what = f"checksum of section {layout.sections[bad].name}"
            raise BadBlock(path, what, f"{told[bad]:016x}", f"{found[bad - first]:016x}")
    if sealed:
        sealed.finish()


class _Plan(NamedTuple):
    sizes: list[int]
    """Bytes of each section."""
    runs: list[tuple[int, int]]
    """First section and the one after the last of what is read at once, then hashed: sections without gaps
    between them that fill a piece, or one that is larger and is read in pieces."""


@lru_cache(maxsize=8)
def _plan(layout: Layout) -> _Plan:
    sizes = [section.num_bytes for section in layout.sections]
    runs: list[tuple[int, int]] = []
    end = 0
    for index, (offset, size) in enumerate(zip(layout.offsets, sizes, strict=True)):
        first = runs[-1][0] if runs else index
        if runs and offset == end and end + size - layout.offsets[first] <= _PIECE_BYTES:
            runs[-1] = first, index + 1
        else:
            runs.append((index, index + 1))
        end = offset + size
    return _Plan(sizes, runs)


def _read(
    read: Callable[[Sequence[memoryview], int], int], views: Sequence[memoryview], offset: int, path: Path
) -> int:
    """Fill the buffers; the bytes that were read. Raises BadBlock where the file ends before."""
    wanted = sum(map(len, views))
    count = read(views, offset)
    if count != wanted:
        raise BadBlock(path, "file size", offset + wanted, offset + count)
    return count


def check(raw: bytes, path: Path, keyring: Keyring | None = None) -> Header:
    """The header of a block file that lies in memory, once every byte of the file is checked.

    path: what errors call it. Raises BadBlock, NoKey among them.
    """
    header = parse_header(path, lambda start, end: raw[start:end], len(raw))
    if isinstance(header, SealedHeader):
        header = open_header(header, keyring)
        raw = plain_bytes(raw, header)
    view, end = memoryview(raw), header.prelude.payload_offset
    told = header.table["xxh3"].tolist()
    for section, offset, wanted in zip(header.layout.sections, header.layout.offsets, told, strict=True):
        found = xxhash.xxh3_64_intdigest(view[offset : offset + section.num_bytes])
        if found != wanted:
            raise BadBlock(path, f"checksum of section {section.name}", f"{wanted:016x}", f"{found:016x}")
        if any(view[end:offset]):
            raise BadBlock(path, "gaps between sections", "zeros", "other bytes")
        end = offset + section.num_bytes
    _ = header.meta  # parsed, or it is a BadBlock
    return header
