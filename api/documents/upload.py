"""An upload on its way in: bounded while it streams, kept in a temporary file, never whole in memory."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import tempfile
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import anyio.to_thread
from fastapi import Request
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException

from api.documents.filename import NamedParts
from api.problems import ApiError, from_validation

ENVELOPE_BYTES = 64 * 1024
"""Multipart boundaries, part headers and the other fields, over the file itself."""


STALL_S = 60.0
"""A body of which nothing comes for so long is given up: it holds a connection and a file."""

_SURROGATE = re.compile("[\ud800-\udfff]")


def _encodable(value: str) -> str:
    # JSON can spell half of a surrogate pair, which is no character and has no UTF-8.
    if _SURROGATE.search(value):
        raise ValueError("a surrogate without its other half is not text")
    return value


Unicode = Annotated[str, AfterValidator(_encodable)]


class JsonDocument(BaseModel):
    """A document as JSON, instead of a file."""

    model_config = ConfigDict(extra="forbid")

    name: Unicode
    text: Unicode


@dataclass(frozen=True, slots=True)
class Upload:
    """Bytes in a temporary file that the receiver deletes."""

    name: str | None
    """None where none was given, or none that can be one."""
    path: Path
    sha256: str
    num_bytes: int


async def bounded(request: Request, limit_bytes: int) -> AsyncGenerator[bytes, None]:
    """The body, until it grows over the limit (ApiError 413, whatever its length said) or stalls (408)."""
    received = 0
    chunks = request.stream()
    while True:
        try:
            async with asyncio.timeout(STALL_S):
                chunk = await anext(chunks)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise stalled(received) from None
        received += len(chunk)
        if received > limit_bytes:
            raise too_large(limit_bytes, received, at_least=True)
        yield chunk


def check_length(request: Request, limit_bytes: int, shown_limit: int | None = None) -> None:
    """Refuse by Content-Length alone, before a byte of the body is read."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit_bytes:
        raise too_large(shown_limit or limit_bytes, int(declared))


def too_large(limit_bytes: int, received: int, *, at_least: bool = False) -> ApiError:
    return ApiError(
        413,
        "too_large",
        f"the body has {'at least ' if at_least else ''}{received} bytes and the limit is {limit_bytes}: "
        "send less; a document may be split, or LONGLEAF_MAX_UPLOAD_BYTES raised for it",
        params={"limit_bytes": limit_bytes, "received_bytes": received},
    )


def stalled(received: int) -> ApiError:
    return ApiError(
        408,
        "stalled",
        f"nothing came for {STALL_S:g} s after {received} bytes of the body; send it again",
        headers={"Connection": "close"},
        params={"received_bytes": received, "limit_s": STALL_S},
    )


async def read_json(request: Request, limit_bytes: int) -> Any:
    """The body as JSON. Raises ApiError 400, 413 or 415."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415,
            "unsupported_media_type",
            f"Content-Type is {kind or 'absent'!r}; application/json is expected here",
            param="Content-Type",
        )
    check_length(request, limit_bytes)
    body = b"".join([chunk async for chunk in bounded(request, limit_bytes)])
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "invalid_json", f"the body is not JSON: {error}") from None


async def read_document(request: Request, limit_bytes: int) -> Upload | JsonDocument:
    """The uploaded file, or the JSON document.

    Raises:
        ApiError: 400, 413, 415 or 422.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        try:
            document = JsonDocument.model_validate(await read_json(request, limit_bytes + ENVELOPE_BYTES))
        except ValidationError as error:
            raise from_validation(error) from None
        return document
    if kind != "multipart/form-data":
        raise ApiError(
            415,
            "unsupported_media_type",
            f"Content-Type is {kind or 'absent'!r}; send multipart/form-data with a part named file, "
            "or application/json with name and text",
            param="Content-Type",
        )
    check_length(request, limit_bytes + ENVELOPE_BYTES, limit_bytes)
    return await _read_multipart(request, limit_bytes)


async def _read_multipart(request: Request, limit_bytes: int) -> Upload:
    stream = bounded(request, limit_bytes + ENVELOPE_BYTES)
    parser = NamedParts(request.headers, stream, max_files=1, max_fields=8)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise ApiError(
            400, "invalid_multipart", f"the multipart body cannot be read: {error.message}"
        ) from None
    try:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise ApiError(
                422, "invalid_request", "file: a part named file with a filename is required", param="file"
            )
        if file.size is not None and file.size > limit_bytes:
            raise too_large(limit_bytes, file.size)
        given = form.get("name")
        name = clean_name(given if isinstance(given, str) else None) or clean_name(file.filename)
        return await anyio.to_thread.run_sync(_keep, file, name)
    finally:
        await form.close()
        # A body that ends inside a part leaves a file that the form does not name.
        for unnamed in parser._files_to_close_on_error:
            unnamed.close()


def _keep(file: UploadFile, name: str | None) -> Upload:
    digest, num_bytes = hashlib.sha256(), 0
    with tempfile.NamedTemporaryFile(prefix="longleaf-", delete=False) as copy:
        try:
            while chunk := file.file.read(1 << 20):
                digest.update(chunk)
                num_bytes += len(chunk)
                copy.write(chunk)
        except BaseException:
            with suppress(OSError):
                Path(copy.name).unlink()
            raise
    return Upload(name, Path(copy.name), digest.hexdigest(), num_bytes)


def clean_name(name: str | None) -> str | None:
    """The last part of a path, printable, at most 255 characters; None where nothing is left."""
    last = PurePosixPath((name or "").replace("\\", "/")).name
    kept = "".join(c for c in last if c.isprintable())[:255]
    return kept if kept.strip(". ") else None
