"""A model folder on disk: whether it is complete, and whether it is still what was made.

Owns `longleaf.json`, which holds a checksum of every file of the folder. It knows no model names.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import xxhash

MANIFEST = "longleaf.json"


class ModelError(Exception):
    """A model folder cannot be had. `code` is stable; the message names the value and the next step."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def require_complete(folder: Path) -> None:
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        missing += sorted(name for name in shards if not (folder / name).is_file())
    elif not any(folder.glob("model*.safetensors")):
        missing.append("model.safetensors")
    if missing:
        raise ModelError("model_incomplete", f"{folder} is no MLX model folder: {', '.join(missing)} missing")


def write_manifest(folder: Path, model_id: str, source: dict[str, Any], sha256: str | None) -> None:
    """Checksum every file, force all to disk, then write the manifest: with it the folder is whole."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    manifest = {
        "model": model_id,
        "source": source,
        "sha256": sha256,
        "files": {path.relative_to(folder).as_posix(): _xxh3(path) for path in files},
    }
    path = folder / MANIFEST
    path.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    for file in [*files, path]:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())


def fault_of(folder: Path, source: dict[str, Any]) -> str | None:
    """What keeps `folder` from being used as it is; None when nothing does."""
    if not folder.is_dir():
        return "is missing"
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files, made_from = manifest["files"], manifest["source"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"has no readable {MANIFEST} ({type(error).__name__})"
    if made_from != source:
        return "was made from another source or by another converter"
    for name, checksum in files.items():
        try:
            if _xxh3(folder / name) != checksum:
                return f"has a damaged {name}"
        except OSError:
            return f"lacks {name}"
    return None


def _xxh3(path: Path) -> str:
    # Against damage, not against forgery: at memory speed, since every start of a worker checks all weights.
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()
