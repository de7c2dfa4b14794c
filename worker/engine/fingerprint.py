"""The identity of everything that decides a token's KV. Two models that share it share snapshots."""

from __future__ import annotations

import hashlib
from pathlib import Path

import xxhash

_SMALL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""Shapes and rope; token ids; the template that stands before a document."""


def fingerprint(folder: Path, kv_format: str) -> str:
    """Hash the content of a model folder and the KV format, as 32 hex digits.

    Content, not names: requantised weights under an old name are another model.
    """
    digest = hashlib.blake2b(kv_format.encode(), digest_size=16)
    for name in _SMALL_FILES:
        path = folder / name
        content = path.read_bytes() if path.exists() else b""
        digest.update(f"{name} {len(content)}\n".encode() + content)
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {_hash_file(path)}\n".encode())
    return digest.hexdigest()


def _hash_file(path: Path) -> str:
    """XXH3 reads weights at disk speed; they are compared, not defended against forgery."""
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            state.update(chunk)
    return state.hexdigest()
