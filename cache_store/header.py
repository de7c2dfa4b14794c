"""The header of a block file: what stands before the payload (FORMAT.md has the offsets).

Owns the checks that make a header trustworthy: nothing is allocated or believed before its size and
checksum agree with the file. It knows no folder and no policy.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from cache_store.errors import BadBlock, UnknownVersion
from cache_store.key import BlockKey, TokenIds

MAGIC = b"LLKV\r\n\x1a\n"  # the line ends show a file that was sent through a text conversion
FORMAT_VERSION, SEALED_VERSION = 1, 2
PRELUDE = struct.Struct("<8sIIQQQIIQ16s16s24sQQ")
PRELUDE_BYTES = PRELUDE.size
SEAL = struct.Struct("<16s16s16s")  # id of the key, salt of the file, tag of the header
EXACT, HAS_PARENT = 1, 2
HEADER_ALIGN = 4096
SECTION_ALIGN = 64
MAX_HEADER_BYTES = 16 << 20
MAX_DIMS = 8

DTYPE_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "float16": 2, "bfloat16": 2,
    "uint32": 4, "int32": 4, "float32": 4, "uint64": 8, "int64": 8, "float64": 8,
}  # fmt: skip
ROW = np.dtype(
    [
        ("name", "S48"),
        ("dtype", "S16"),
        ("num_dims", "<u4"),
        ("reserved", "<u4"),
        ("shape", "<u4", (MAX_DIMS,)),
        ("offset", "<u8"),
        ("size", "<u8"),
        ("xxh3", "<u8"),
    ]
)
FIELDS = ROW.names or ()
_ITEM_BYTES = {name.encode(): size for name, size in DTYPE_BYTES.items()}
# Most headers are read in one piece of this size.
_PREFETCH_BYTES = 16 << 10


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


@dataclass(frozen=True)
class SectionInfo:
    """A stored array, without its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, eq=False)
class Layout:
    """A block's sections and where each begins in the file. One object for all blocks laid out alike."""

    sections: tuple[SectionInfo, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class Prelude:
    """The first 128 bytes."""

    version: int
    key: BlockKey
    parent: BlockKey | None
    exact: bool
    num_tokens: int
    num_sections: int
    meta_bytes: int
    header_bytes: int
    payload_offset: int
    payload_bytes: int
    rest_xxh3: int


@dataclass(frozen=True, eq=False)
class BlockInfo:
    """What a block's header says."""

    key: BlockKey
    parent: BlockKey | None
    exact: bool
    """True: computed by an exact prefill. False: continued from decoded older blocks."""
    token_ids: TokenIds
    meta: Mapping[str, Any]
    sections: tuple[SectionInfo, ...]
    file_bytes: int
    is_sealed: bool = False
    """Whether it is encrypted on disk."""

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.size)


@dataclass(frozen=True)
class PayloadSeal:
    """What it takes to decrypt the payload of an encrypted file."""

    file_key: bytes
    bound_to: bytes
    """What is authenticated with it: the header's tag."""
    offset: int
    """Where it begins in the file."""


@dataclass(frozen=True, eq=False)
class Header:
    """A header whose checksums hold. The table and the metadata are parsed when asked for."""

    path: Path
    prelude: Prelude
    raw: bytes
    file_bytes: int
    seal: PayloadSeal | None = None
    """None where the file is plain."""

    @cached_property
    def token_ids(self) -> TokenIds:
        return np.frombuffer(self.raw, "<u4", self.prelude.num_tokens, PRELUDE_BYTES)

    @cached_property
    def table(self) -> npt.NDArray[Any]:
        """The section rows (ROW); what `layout` says of them is checked, their checksums are only told."""
        prelude = self.prelude
        return np.frombuffer(self.raw, ROW, prelude.num_sections, PRELUDE_BYTES + 4 * prelude.num_tokens)

    @cached_property
    def layout(self) -> Layout:
        """Where the sections lie, checked against the file: in order, aligned, inside, shapes agreeing."""
        rows = self.table.copy()
        rows["xxh3"] = 0
        try:
            return _layout(rows.tobytes(), self.prelude.payload_offset, self.prelude.payload_bytes)
        except _BadTable as error:
            raise BadBlock(self.path, *error.args) from error

    @cached_property
    def meta(self) -> dict[str, Any]:
        prelude = self.prelude
        return _object(self.path, self.raw[prelude.header_bytes - prelude.meta_bytes : prelude.header_bytes])

    @cached_property
    def info(self) -> BlockInfo:
        prelude = self.prelude
        return BlockInfo(
            prelude.key,
            prelude.parent,
            prelude.exact,
            self.token_ids,
            self.meta,
            self.layout.sections,
            self.file_bytes,
            self.seal is not None,
        )


@dataclass(frozen=True, eq=False)
class SealedHeader:
    """What of an encrypted block's header is readable without its key; the checksums hold."""

    path: Path
    prelude: Prelude
    raw: bytes

    @cached_property
    def key_id(self) -> bytes:
        key_id: bytes = SEAL.unpack_from(self.raw, PRELUDE_BYTES)[0]
        return key_id

    @cached_property
    def meta(self) -> dict[str, Any]:
        """The label: what of the metadata stands outside."""
        start = PRELUDE_BYTES + SEAL.size
        return _object(self.path, self.raw[start : start + self.prelude.meta_bytes])


AnyHeader = Header | SealedHeader


def _object(path: Path, text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # JSON and UTF-8 errors are ValueErrors
        raise BadBlock(path, "metadata", "UTF-8 and JSON", error) from error
    if not isinstance(value, dict):
        raise BadBlock(path, "metadata", "a JSON object", type(value).__name__)
    return value


class _BadTable(ValueError):
    """What of a section table is wrong, what was expected, what was found."""


# The blocks of a model differ in checksums alone: checking each table anew would be a fifth of a restore.
@lru_cache(maxsize=8)
def _layout(table: bytes, payload_offset: int, payload_bytes: int) -> Layout:
    rows = np.frombuffer(table, ROW)
    end = payload_offset + payload_bytes
    if not (np.all(rows["size"] <= payload_bytes) and np.all(rows["offset"] <= end)):
        raise _BadTable("section offsets and sizes", f"inside {end} bytes", "beyond")
    ends = rows["offset"] + rows["size"]  # cannot wrap: both are below the file's size
    starts = np.concatenate([[np.uint64(payload_offset)], ends])
    aligned = (
        (starts[:-1] + np.uint64(SECTION_ALIGN - 1)) // np.uint64(SECTION_ALIGN) * np.uint64(SECTION_ALIGN)
    )
    if not np.array_equal(rows["offset"], aligned):
        raise _BadTable("section offsets", aligned.tolist()[:8], rows["offset"].tolist()[:8])
    if int(starts[-1]) != end:
        raise _BadTable("end of the last section", end, int(starts[-1]))
    item_bytes = np.array([_ITEM_BYTES.get(name, 0) for name in rows["dtype"].tolist()], float)
    in_use = np.arange(MAX_DIMS) < rows["num_dims"][:, None]
    # float64 holds every product below 2**53 exactly; a larger one exceeds any size that got here.
    sizes = item_bytes * np.prod(np.where(in_use, rows["shape"], 1).astype(float), axis=1)
    if not (
        np.array_equal(sizes, rows["size"].astype(float))
        and np.all(item_bytes)
        and not np.any(rows["reserved"])
    ):
        raise _BadTable("section sizes", "dtype and shape to agree with size", "they do not")
    if np.any(rows["num_dims"] > MAX_DIMS) or np.any(rows["shape"][~in_use]):
        raise _BadTable("section shape", f"at most {MAX_DIMS} dimensions, the rest zero", "more")
    # By columns: rows of a structured array cost ten times as much.
    names, dtypes, num_dims, _, shapes, offsets, sizes, _ = (rows[field].tolist() for field in FIELDS)
    try:
        sections = tuple(
            SectionInfo(name.decode(), dtype.decode(), tuple(shape[:dims]), size)
            for name, dtype, dims, shape, size in zip(names, dtypes, num_dims, shapes, sizes, strict=True)
        )
    except UnicodeDecodeError as error:
        raise _BadTable("section names", "UTF-8", error) from error
    return Layout(sections, tuple(offsets))


def parse_prelude(path: Path, raw: bytes, file_bytes: int) -> Prelude:
    """Check the first bytes of a file (up to 128 of them) against themselves and the file's size.

    Raises UnknownVersion for a later format and BadBlock for anything else that is not a whole block.
    """
    if raw[: len(MAGIC)] != MAGIC:
        raise BadBlock(path, "magic", MAGIC, raw[: len(MAGIC)])
    version = int.from_bytes(raw[8:12], "little")
    if len(raw) >= 12 and version > SEALED_VERSION:
        raise UnknownVersion(path, "format version", f"at most {SEALED_VERSION}", version)
    if len(raw) < PRELUDE_BYTES:
        raise BadBlock(path, "file size", f"at least {PRELUDE_BYTES} bytes", len(raw))
    (
        _,
        _,
        flags,
        header_bytes,
        payload_offset,
        payload_bytes,
        num_tokens,
        num_sections,
        meta_bytes,
        key,
        parent,
        reserved,
        rest_xxh3,
        prelude_xxh3,
    ) = PRELUDE.unpack(raw[:PRELUDE_BYTES])
    checksum = xxhash.xxh3_64_intdigest(raw[: PRELUDE_BYTES - 8])
    if checksum != prelude_xxh3:
        raise BadBlock(path, "checksum of the prelude", f"{prelude_xxh3:016x}", f"{checksum:016x}")
    if version not in (FORMAT_VERSION, SEALED_VERSION):
        raise BadBlock(path, "format version", f"{FORMAT_VERSION} or {SEALED_VERSION}", version)
    if flags & ~(EXACT | HAS_PARENT) or any(reserved) or (not flags & HAS_PARENT and any(parent)):
        raise BadBlock(path, "flags and reserved bytes", "only defined ones", f"flags {flags:#x}")
    if version == SEALED_VERSION:
        told = PRELUDE_BYTES + SEAL.size + meta_bytes + PRELUDE_BYTES
        if header_bytes < told:
            raise BadBlock(path, "header size", f"at least {told}", header_bytes)
    else:
        told = PRELUDE_BYTES + 4 * num_tokens + ROW.itemsize * num_sections + meta_bytes
        if header_bytes != told:
            raise BadBlock(path, "header size", told, header_bytes)
    if payload_offset != round_up(header_bytes, HEADER_ALIGN) or payload_offset > MAX_HEADER_BYTES:
        raise BadBlock(
            path, "payload offset", f"the next {HEADER_ALIGN}, below {MAX_HEADER_BYTES}", payload_offset
        )
    if payload_offset + payload_bytes != file_bytes:
        raise BadBlock(path, "file size", payload_offset + payload_bytes, file_bytes)
    return Prelude(
        version,
        BlockKey(key),
        BlockKey(parent) if flags & HAS_PARENT else None,
        bool(flags & EXACT),
        num_tokens,
        num_sections,
        meta_bytes,
        header_bytes,
        payload_offset,
        payload_bytes,
        rest_xxh3,
    )


def read_header(fd: int, path: Path) -> AnyHeader:
    """Read and check a whole header; nothing is allocated that the file is too small for."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise BadBlock(path, "kind of file", "a regular file", stat.filemode(status.st_mode))
    return parse_header(path, lambda start, end: os.pread(fd, end - start, start), status.st_size)


def parse_header(path: Path, read: Callable[[int, int], bytes], file_bytes: int) -> AnyHeader:
    """Check the header of a file of this size; read: gives the bytes from a start up to an end."""
    raw = read(0, _PREFETCH_BYTES)
    prelude = parse_prelude(path, raw, file_bytes)
    if len(raw) < prelude.payload_offset:
        raw += read(len(raw), prelude.payload_offset)
    if len(raw) < prelude.payload_offset:
        raise BadBlock(path, "header size", prelude.payload_offset, len(raw))
    raw = raw[: prelude.payload_offset]
    checksum = xxhash.xxh3_64_intdigest(memoryview(raw)[PRELUDE_BYTES:])
    if checksum != prelude.rest_xxh3:
        raise BadBlock(path, "checksum of the header", f"{prelude.rest_xxh3:016x}", f"{checksum:016x}")
    if prelude.version == SEALED_VERSION:
        return SealedHeader(path, prelude, raw)
    return Header(path, prelude, raw, file_bytes)
