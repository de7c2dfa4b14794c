"""What is said of an API that gives a worker no documents: where to look for it, or that its log says why."""

from __future__ import annotations

import pytest

from jobs import DocumentRef
from tests.cli.fake_api import fake_api
from worker.documents import ApiUnreachable, DocumentSource

REF = DocumentRef(id="doc_1", name="a.txt", text_sha256="0", num_chars=1)


def said_of(url: str) -> str:
    source = DocumentSource(url, lambda: None, patience_s=0.0)
    try:
        with pytest.raises(ApiUnreachable) as caught:
            source.fetch([REF], lambda: False)
    finally:
        source.close()
    return caught.value.problem.detail


def test_an_api_that_fails_is_not_looked_for_elsewhere() -> None:
    with fake_api(lambda request: request.reply(500, {"detail": "it broke"})) as url:
        said = said_of(url)
    assert "it answered 500" in said
    assert "its log says why" in said
    assert "LONGLEAF_API" not in said
    assert "check LONGLEAF_API on the worker's host" in said_of("http://127.0.0.1:1")
