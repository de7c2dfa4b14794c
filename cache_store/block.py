"""A whole block as bytes: laying it out for a file and reading its payload back into place.

Owns the order of sections and the checks of their bytes. It knows no folder, no budget, and not what
a section means.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    parse_header,
    round_up,
)
from cache_store.key import KEY_BYTES, BlockKey, TokenIds

# Read, then hash, in pieces that stay in a core's cache.
_PIECE_BYTES = 512 << 10


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
    wanted, found = [view.nbytes for view in into], [section.num_bytes for section in layout.sections]
    if wanted != found:
        raise BadBlock(path, "section sizes", wanted, found)
    told = header.table["xxh3"].tolist()
    batch: list[memoryview] = []
    gaps: list[memoryview] = []
    whole: list[int] = []
    position = read_from = header.prelude.payload_offset

    def check(index: int, checksum: int) -> None:
        if checksum != told[index]:
            what = f"checksum of section {layout.sections[index].name}"
            raise BadBlock(path, what, f"{told[index]:016x}", f"{checksum:016x}")

    def flush() -> None:
        """Read the batch, and check the sections that it completes."""
        nonlocal read_from
        count = read_at(fd, batch, read_from)
        if count != position - read_from:
            raise BadBlock(path, "file size", position, read_from + count)
        for index in whole:
            check(index, xxhash.xxh3_64_intdigest(into[index]))
        if any(map(any, gaps)):
            raise BadBlock(path, "gaps between sections", "zeros", "other bytes")
        read_from = position
        for done in (batch, gaps, whole):
            done.clear()

    for index, (view, offset) in enumerate(zip(into, layout.offsets, strict=True)):
        if offset > position:
            gaps.append(memoryview(bytearray(offset - position)))
            batch.append(gaps[-1])
            position = offset
        if view.nbytes <= _PIECE_BYTES:
            batch.append(view)
            whole.append(index)
            position += view.nbytes
            if position - read_from >= _PIECE_BYTES:
                flush()
            continue
        digest = xxhash.xxh3_64()
        for start in range(0, view.nbytes, _PIECE_BYTES):
            piece = view[start : start + _PIECE_BYTES]
            batch.append(piece)
            position += piece.nbytes
            flush()
            digest.update(piece)
        check(index, digest.intdigest())
    flush()


def check(raw: bytes, path: Path) -> Header:
    """The header of a block file that lies in memory, once every byte of the file is checked.

    path: what errors call it. Raises BadBlock.
    """
    header = parse_header(path, lambda start, end: raw[start:end], len(raw))
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
