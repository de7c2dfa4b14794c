"""An encrypted block file: a plain one in an envelope that says whose it is and nothing of what is in it.

Owns the cipher: AES-256-GCM, a key for each file derived from its tenant's and a random salt, one message
for the header and one for the payload. FORMAT.md has the bytes. It knows no folder.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from cache_store.errors import BadBlock, NoKey
from cache_store.files import Contents, read_at
from cache_store.header import (
    HEADER_ALIGN,
    MAX_HEADER_BYTES,
    PRELUDE,
    PRELUDE_BYTES,
    SEAL,
    SEALED_VERSION,
    Header,
    PayloadSeal,
    SealedHeader,
    parse_header,
    round_up,
)
from cache_store.keyring import DataKey, Keyring

if TYPE_CHECKING:  # 40 ms that a store without keys need not pay
    from cryptography.hazmat.primitives.ciphers import AEADDecryptionContext, Cipher, modes

TAG_BYTES = 16
MAX_PAYLOAD_BYTES = 1 << 35
"""Below what GCM allows one message."""
LABEL = ("attached", "model", "prefill_s", "tenant")
"""What of the metadata stays readable: the index lists, counts and evicts without a key."""
_SALT_BYTES = 16
# A file's key encrypts these two messages and no other.
_HEADER, _PAYLOAD = bytes(12), bytes(11) + b"\1"
_BOUND_BYTES = PRELUDE_BYTES - 16  # of the prelude: all but its checksums
_PIECE_BYTES = 512 << 10


def encrypted(plain: Sequence[memoryview], meta: Mapping[str, Any], key: DataKey) -> Contents:
    """The encrypted file of a plain one; the payload is encrypted as it is written.

    plain: as `block.layout` gives it, prelude first. meta: the block's; what the index needs of it is copied
    outside. Raises ValueError for what does not fit the format.
    """
    prelude, rest, *payload = plain
    fields = list(PRELUDE.unpack(prelude))
    plain_header_bytes, payload_bytes = fields[3], fields[5]
    label = json.dumps(
        {word: meta[word] for word in LABEL if word in meta},
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=False,
    ).encode()
    header_bytes = PRELUDE_BYTES + SEAL.size + len(label) + plain_header_bytes
    offset = round_up(header_bytes, HEADER_ALIGN)
    if offset > MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise ValueError(
            f"header of {offset} bytes or payload of {payload_bytes} is over {MAX_HEADER_BYTES} or "
            f"{MAX_PAYLOAD_BYTES}: fewer sections or less metadata"
        )
    fields[1], fields[3:6] = SEALED_VERSION, [header_bytes, offset, payload_bytes + TAG_BYTES]
    fields[7:9] = [0, len(label)]
    front = PRELUDE.pack(*fields)[:_BOUND_BYTES]
    salt = secrets.token_bytes(_SALT_BYTES)
    file_key = key.file_key(salt)
    cipher = _gcm(file_key, _HEADER).encryptor()
    cipher.authenticate_additional_data(front + key.id + salt + label)
    text = cipher.update(bytes(prelude) + bytes(rest[: plain_header_bytes - PRELUDE_BYTES]))
    cipher.finalize()
    tag = cipher.tag
    outer = (SEAL.pack(key.id, salt, tag) + label + text).ljust(offset - PRELUDE_BYTES, b"\0")
    front += xxhash.xxh3_64_intdigest(outer).to_bytes(8, "little")
    front += xxhash.xxh3_64_intdigest(front).to_bytes(8, "little")
    return Contents(offset + payload_bytes + TAG_BYTES, _batches(front + outer, payload, file_key, tag))


def open_header(sealed: SealedHeader, keyring: Keyring | None) -> Header:
    """The plain header of an encrypted file.

    Raises NoKey where its tenant's key is not here or another one, BadBlock where it is not as it was
    encrypted.
    """
    path, outer, raw = sealed.path, sealed.prelude, sealed.raw
    key_id, salt, tag = SEAL.unpack_from(raw, PRELUDE_BYTES)
    tenant = sealed.meta.get("tenant", "")
    key = keyring.get(tenant) if keyring and isinstance(tenant, str) else None
    if key is None or key.id != key_id:
        owner = f"tenant {tenant}" if tenant else "the default tenant"
        raise NoKey(path, f"key of {owner}", key_id.hex(), key.id.hex() if key else "none")
    label_at = PRELUDE_BYTES + SEAL.size
    text_at = label_at + outer.meta_bytes
    bound = raw[:_BOUND_BYTES] + key_id + salt + raw[label_at:text_at]
    file_key = key.file_key(salt)
    inner = _decrypted(path, file_key, _HEADER, raw[text_at : outer.header_bytes], tag, bound)
    inner = inner.ljust(round_up(len(inner), HEADER_ALIGN), b"\0")
    header = parse_header(
        path, lambda start, end: inner[start:end], len(inner) + outer.payload_bytes - TAG_BYTES
    )
    if isinstance(header, SealedHeader):
        raise BadBlock(path, "encrypted header", "a plain one inside", "an encrypted one")
    file_bytes = outer.payload_offset + outer.payload_bytes
    return replace(header, file_bytes=file_bytes, seal=PayloadSeal(file_key, tag, outer.payload_offset))


def plain_bytes(raw: bytes, header: Header) -> bytes:
    """The plain file of an encrypted one that lies in memory. Raises BadBlock."""
    seal = header.seal
    if seal is None:
        return raw
    text, tag = raw[seal.offset : -TAG_BYTES], raw[-TAG_BYTES:]
    return header.raw + _decrypted(header.path, seal.file_key, _PAYLOAD, text, tag, seal.bound_to)


class SealedReader:
    """Reads an encrypted payload from its first byte to its last as if it were plain."""

    def __init__(self, fd: int, header: Header, seal: PayloadSeal) -> None:
        self._fd, self._header = fd, header
        self._shift = seal.offset - header.prelude.payload_offset
        self._cipher = _gcm(seal.file_key, _PAYLOAD).decryptor()
        self._cipher.authenticate_additional_data(seal.bound_to)
        self._scratch = memoryview(bytearray(_PIECE_BYTES))

    def read_at(self, buffers: Sequence[memoryview], offset: int) -> int:
        """As `files.read_at`; offset: in the plain file, where the call before ended."""
        total = 0
        for pieces in _cut(buffers):
            # Read apart, and decrypted into place while it is in the core's cache.
            text = self._scratch[: sum(map(len, pieces))]
            count = read_at(self._fd, [text], offset + self._shift + total)
            total += count
            if count != len(text):
                break
            start = 0
            for piece in pieces:
                start += self._cipher.update_into(text[start : start + len(piece)], piece)
        return total

    def finish(self) -> None:
        """Raises BadBlock where what was read is not what was encrypted."""
        tag = bytearray(TAG_BYTES)
        read_at(self._fd, [memoryview(tag)], self._header.file_bytes - TAG_BYTES)
        _finish(self._cipher, bytes(tag), self._header.path)


def _batches(
    header: bytes, payload: Sequence[memoryview], file_key: bytes, header_tag: bytes
) -> Iterator[Sequence[memoryview]]:
    """The file in pieces, each good until the next is asked for."""
    yield [memoryview(header)]
    cipher = _gcm(file_key, _PAYLOAD).encryptor()
    cipher.authenticate_additional_data(header_tag)
    scratch = memoryview(bytearray(_PIECE_BYTES))
    for pieces in _cut(payload):
        used = 0
        for piece in pieces:
            used += cipher.update_into(piece, scratch[used:])
        yield [scratch[:used]]
    cipher.finalize()
    yield [memoryview(cipher.tag)]


def _cut(buffers: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """The same bytes in the same order, as many buffers together as fill a piece."""
    pieces: list[memoryview] = []
    num_bytes = 0
    for buffer in buffers:
        for start in range(0, len(buffer), _PIECE_BYTES):
            piece = buffer[start : start + _PIECE_BYTES]
            if num_bytes + len(piece) > _PIECE_BYTES:
                yield pieces
                pieces, num_bytes = [], 0
            pieces.append(piece)
            num_bytes += len(piece)
    if pieces:
        yield pieces


def _gcm(file_key: bytes, nonce: bytes) -> Cipher[modes.GCM]:
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    return Cipher(algorithms.AES(file_key), modes.GCM(nonce))


def _decrypted(path: Path, file_key: bytes, nonce: bytes, text: bytes, tag: bytes, bound: bytes) -> bytes:
    cipher = _gcm(file_key, nonce).decryptor()
    cipher.authenticate_additional_data(bound)
    plain = cipher.update(text)
    _finish(cipher, tag, path)
    return plain


def _finish(cipher: AEADDecryptionContext, tag: bytes, path: Path) -> None:
    from cryptography.exceptions import InvalidTag

    try:
        cipher.finalize_with_tag(tag)
    except InvalidTag:
        raise BadBlock(path, "authentication tag", "that of what was encrypted", "another") from None
