"""/v1/documents."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

import anyio.to_thread
from fastapi import APIRouter, Header, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from api.documents.pdf import Limits
from api.documents.store import InUse, Kept
from api.documents.text import Extracted, extract, from_text, normalise
from api.documents.upload import JsonDocument, Upload, clean_name, read_document, too_large
from api.documents.warning import warning
from api.gate import CallerDep
from api.keys import Caller
from api.limits import OverLimit, too_many_bytes
from api.models import Document
from api.problems import ApiError, shown
from api.routes.job_view import NOT_MODIFIED, matches
from api.routes.paging import After, Limit, iso, page
from api.services import Services, ServicesDep
from prompts import PromptError

router = APIRouter(prefix="/v1/documents", tags=["documents"])

SAME: dict[int | str, dict[str, Any]] = {200: {"description": "The document that has this content already."}}

EAGER_COUNT_CHARS = 4_000_000
"""Longer texts are counted when a job first needs it, not while the upload waits."""

_UPLOAD_SCHEMA = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "name": {"type": "string"},
                    },
                }
            },
            "application/json": {"schema": JsonDocument.model_json_schema()},
        },
    }
}


@router.post("", status_code=201, responses=SAME, openapi_extra=_UPLOAD_SCHEMA)
async def add_document(request: Request, services: ServicesDep, caller: CallerDep) -> JSONResponse:
    """Keep a document: 201, or 200 with the document that has the same content already."""
    upload = await read_document(request, services.settings.max_upload_bytes)
    kept = await anyio.to_thread.run_sync(_add, services, caller, upload, limiter=services.readers)
    body = (await anyio.to_thread.run_sync(_views, services, [kept.document]))[0]
    if kept.former_name is not None:
        body["warnings"] = [*(body["warnings"] or []), _renamed(kept)]
    headers = {"Location": f"/v1/documents/{kept.document.id}"}
    return JSONResponse(body, 201 if kept.is_new else 200, headers=headers)


def _renamed(kept: Kept) -> dict[str, Any]:
    name, former = kept.document.name, kept.former_name
    return dict(
        warning(
            "renamed",
            f"the same bytes were here as {former!r}: {kept.document.id} is named {name!r} from now on, "
            "but not in jobs that were submitted before",
            former_name=former,
        )
    )


@router.get("")
def list_documents(
    services: ServicesDep, caller: CallerDep, limit: Limit = 50, after: After = None
) -> dict[str, Any]:
    rows = services.documents.page(caller.tenant, limit + 1, after)
    views = {view["id"]: view for view in _views(services, rows)}
    return page(rows, limit, lambda row: views[row.id])


@router.get("/{document_id}")
def get_document(document_id: str, services: ServicesDep, caller: CallerDep) -> dict[str, Any]:
    document = services.documents.get(caller.tenant, document_id)
    if document is None:
        raise not_found(document_id)
    return _views(services, [document])[0]


@router.get("/{document_id}/text", response_class=PlainTextResponse, responses=NOT_MODIFIED)
def get_text(
    document_id: str,
    services: ServicesDep,
    caller: CallerDep,
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    """The normalised text, exactly what the model reads. It never changes: the ETag is its SHA-256."""
    document = services.documents.get(caller.tenant, document_id)
    headers = {"ETag": f'"{document.text_sha256}"'} if document else {}
    if document is not None and matches(if_none_match, headers["ETag"]):
        return Response(status_code=304, headers=headers)
    text = services.documents.text(caller.tenant, document_id)
    if text is None:
        raise not_found(document_id)
    return Response(text.encode(), media_type="text/plain; charset=utf-8", headers=headers)


@router.get("/{document_id}/pages")
def get_pages(document_id: str, services: ServicesDep, caller: CallerDep) -> list[dict[str, Any]]:
    """Character ranges of the pages; an empty list where the text has no page marks."""
    pages = services.documents.pages(caller.tenant, document_id)
    if pages is None:
        raise not_found(document_id)
    return [dict(item) for item in pages]


@router.delete("/{document_id}", status_code=204)
def delete_document(document_id: str, services: ServicesDep, caller: CallerDep) -> Response:
    try:
        services.documents.delete(caller.tenant, document_id, caller.key_id)
    except LookupError:
        raise not_found(document_id) from None
    except InUse as error:
        raise ApiError(
            409,
            "document_in_use",
            f"{error} reads {document_id} and is not finished; wait for it or cancel it",
            params={"job": str(error)},
        ) from None
    return Response(status_code=204)


def not_found(document_id: str, param: str | None = None) -> ApiError:
    return ApiError(404, "document_not_found", f"there is no document {shown(document_id)}", param=param)


def _add(services: Services, caller: Caller, upload: Upload | JsonDocument) -> Kept:
    try:
        kept = _keep(services, caller, upload)
    except OverLimit as error:
        raise too_many_bytes(error) from None
    folder = services.folders.get(services.settings.model)
    if folder is not None and kept.document.num_chars <= EAGER_COUNT_CHARS:
        # A model that no prompt can be made for is told of when it is asked for.
        with suppress(PromptError):
            services.num_tokens(kept.document, folder)
    return kept


def _keep(services: Services, caller: Caller, upload: Upload | JsonDocument) -> Kept:
    tenant, max_bytes = caller.tenant, caller.limits.max_document_bytes
    limit = services.settings.max_upload_bytes
    if isinstance(upload, JsonDocument):
        data = upload.text.encode()
        if len(data) > limit:
            raise too_large(limit, len(data))
        found = from_text(normalise(upload.text))
        return services.documents.add(
            tenant, clean_name(upload.name), hashlib.sha256(data).hexdigest(), len(data), found, max_bytes
        )
    try:
        same = services.documents.uploaded_again(tenant, upload.sha256, upload.name)
        if same is not None:
            return same
        return services.documents.add(
            tenant, upload.name, upload.sha256, upload.num_bytes, _extract(services, upload), max_bytes
        )
    finally:
        upload.path.unlink(missing_ok=True)


def _extract(services: Services, upload: Upload) -> Extracted:
    settings = services.settings
    return extract(
        upload.path,
        Limits(settings.extract_wall_s, settings.extract_memory_bytes, settings.max_upload_bytes),
    )


def _views(services: Services, rows: Sequence[Document]) -> list[dict[str, Any]]:
    counts = services.documents.token_counts([row.id for row in rows])
    folders = services.folders.all()
    return [
        {
            "id": row.id,
            "name": row.name,
            "media_type": row.media_type,
            "num_bytes": row.num_bytes,
            "num_chars": row.num_chars,
            "num_pages": row.num_pages,
            "sha256": row.sha256,
            "text_sha256": row.text_sha256,
            "num_tokens": {
                folder.id: counts[row.id, folder.tokenizer_sha256]
                for folder in folders
                if (row.id, folder.tokenizer_sha256) in counts
            },
            "warnings": row.warnings,
            "created_at": iso(row.created_at),
        }
        for row in rows
    ]
