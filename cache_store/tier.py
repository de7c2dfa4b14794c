"""The shared tier's files: the same block files as in a folder, at an address that fsspec knows.

    <url>/v1/<2 hex>/<key of a block>/<key>.llkv      the block, and what is attached to it under its own key
    <url>/removed/<key of a block>.<time>             deleted on purpose: other machines delete it too
    <url>/unfinished/<time>.<random>                  being written, where a file system must rename

Owns names and single operations, each of which may hang as long as its file system does or raise TierDown.
It knows no store, no budget and no patience: those are `sharing.py`'s.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cache_store.errors import TierDown
from cache_store.header import FORMAT_VERSION, AnyHeader, parse_header
from cache_store.index import SUFFIX
from cache_store.key import BlockKey

_FILE_NAME = re.compile(r"([0-9a-f]{32})\.llkv")
_REMOVED_NAME = re.compile(r"([0-9a-f]{32})\.(\d{1,12})")
_UNFINISHED_NAME = re.compile(r"(\d{1,12})\.[0-9a-f]{16}")
# Here an object is there whole or not at all: no other name is needed first.
_WHOLE_AT_ONCE = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "memory"}
_HEADER_READ_BYTES = 64 << 10
_DAY_S = 86_400
_REMOVED_KEPT_S = 30 * _DAY_S


class Tier:
    """A place that several stores share.

    url: `file:///mnt/nas/longleaf`, `s3://bucket/folder` or what else fsspec knows. A folder is not made: a
        share that is not mounted must not fill the disk under it.
    answer_s: a block that has not come by then is a miss, and the tier is left alone for `retry_s`.
    request_s: no match waits longer than this for all its blocks.
    retry_s: how long a tier that failed is left alone.
    push: whether what is stored is put there in the background; reading and deleting need not.

    Raises TierDown where fsspec does not know the address or a package for it is missing.
    """

    def __init__(
        self,
        url: str,
        *,
        answer_s: float = 5.0,
        request_s: float = 60.0,
        retry_s: float = 30.0,
        push: bool = True,
    ) -> None:
        import fsspec  # 40 ms that a start without a tier need not pay

        self.url = url
        self.answer_s, self.request_s, self.retry_s, self.push = answer_s, request_s, retry_s, push
        try:
            self._fs, root = fsspec.url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise TierDown(
                f"shared tier {url} is none: {error}; s3:// needs the extra: pip install 'longleaf[s3]'"
            ) from error
        self._root = root.rstrip("/")
        protocol = self._fs.protocol
        self._whole_at_once = not _WHOLE_AT_ONCE.isdisjoint(
            [protocol] if isinstance(protocol, str) else protocol
        )

    def __str__(self) -> str:
        return self.url

    def holds(self, block: BlockKey) -> dict[BlockKey, int]:
        """The files of a block and of what is attached to it, with their sizes; empty where it has none."""
        found = self._names(self._folder(block))
        return {
            BlockKey.from_hex(m[1]): size for name, size in found.items() if (m := _FILE_NAME.fullmatch(name))
        }

    def load(self, block: BlockKey, key: BlockKey) -> bytes:
        """The bytes of a file, unchecked."""
        with self._errors():
            return bytes(self._fs.cat_file(self.path(block, key)))

    def save(self, block: BlockKey, key: BlockKey, raw: bytes) -> None:
        """Put a file in place, whole or not at all."""
        self._write(self.path(block, key), raw)

    def remove(self, block: BlockKey, key: BlockKey | None = None) -> None:
        """Delete a block with all that is attached to it, or one attachment; no error where there is none.

        A block's deletion is noted for the other machines.
        """
        if key is None:
            self._write(f"{self._root}/removed/{block}.{int(time.time())}", b"")
        with self._errors():
            for name in [key] if key else self.holds(block):
                self._delete(self.path(block, name))

    def removed(self) -> set[BlockKey]:
        """The blocks whose deletion is noted."""
        return {BlockKey.from_hex(match[1]) for match in self._removed()}

    def forget_removed(self, block: BlockKey) -> None:
        """It was computed again: take back the notes of its deletion."""
        with self._errors():
            for match in self._removed():
                if match[1] == block.hex:
                    self._delete(f"{self._root}/removed/{match[0]}")

    def tidy(self) -> None:
        """Delete old notes, and what writers left that died."""
        now = time.time()
        with self._errors():
            for match in self._removed():
                if now - int(match[2]) > _REMOVED_KEPT_S:
                    self._delete(f"{self._root}/removed/{match[0]}")
            for name in self._names(f"{self._root}/unfinished"):
                left = _UNFINISHED_NAME.fullmatch(name)
                if left and now - int(left[1]) > _DAY_S:
                    self._delete(f"{self._root}/unfinished/{name}")

    def blocks(self) -> list[BlockKey]:
        """Every block of which there is a file; lists all of the tier."""
        folder = f"{self._root}/v{FORMAT_VERSION}"
        with self._errors():
            try:
                found = self._fs.find(folder)
            except FileNotFoundError:
                return []
        parts = [path.split("/")[-2:] for path in found]
        keys = {
            folder
            for folder, name in parts
            if _FILE_NAME.fullmatch(name) and _FILE_NAME.fullmatch(folder + SUFFIX)
        }
        return sorted(map(BlockKey.from_hex, keys))

    def header(self, block: BlockKey, key: BlockKey, file_bytes: int) -> AnyHeader:
        """The checked header of a file of this size, without its payload. Raises BadBlock too."""
        path = self.path(block, key)

        def read(start: int, end: int) -> bytes:
            with self._errors():
                return bytes(self._fs.cat_file(path, start=start, end=min(end, file_bytes)))

        first = read(0, _HEADER_READ_BYTES)
        return parse_header(
            Path(path),
            lambda start, end: (
                first[start:end] if end <= len(first) or len(first) == file_bytes else read(start, end)
            ),
            file_bytes,
        )

    def path(self, block: BlockKey, key: BlockKey) -> str:
        return f"{self._folder(block)}/{key}{SUFFIX}"

    def _folder(self, block: BlockKey) -> str:
        return f"{self._root}/v{FORMAT_VERSION}/{block.hex[:2]}/{block}"

    def _removed(self) -> list[re.Match[str]]:
        return [m for name in self._names(f"{self._root}/removed") if (m := _REMOVED_NAME.fullmatch(name))]

    def _names(self, folder: str) -> dict[str, int]:
        with self._errors():
            try:
                items: list[dict[str, Any]] = self._fs.ls(folder, detail=True)
            except FileNotFoundError:
                return {}
            files = [item for item in items if item["type"] == "file"]
            return {item["name"].rsplit("/", 1)[-1]: int(item["size"] or 0) for item in files}

    def _write(self, path: str, raw: bytes) -> None:
        with self._errors():
            if self._whole_at_once:
                self._fs.pipe_file(path, raw)
                return
            if not self._fs.isdir(self._root):
                raise FileNotFoundError(f"no folder {self._root}: make it, or mount what it is on")
            temp = f"{self._root}/unfinished/{int(time.time())}.{secrets.token_hex(8)}"
            for parent in (temp, path):
                self._fs.makedirs(parent.rsplit("/", 1)[0], exist_ok=True)
            try:
                self._fs.pipe_file(temp, raw)
                self._fs.mv(temp, path)
            except BaseException:
                self._delete(temp)
                raise

    def _delete(self, path: str) -> None:
        try:
            self._fs.rm_file(path)
        except FileNotFoundError:
            return

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except TierDown:
            raise
        except Exception as error:  # what drivers raise has no common base
            raise TierDown(f"shared tier {self.url}: {type(error).__name__}: {error}") from error
