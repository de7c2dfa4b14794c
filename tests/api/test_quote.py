"""What a job would take, asked before it is submitted."""

from __future__ import annotations

import pytest
from api_rig import ASK_TOKENS, CONTEXT, FRAME_TOKENS, Api, FakeWorker, card

from api.routes.quote import peak_bytes


def ask(api: Api, document: str, **spec: object) -> dict[str, object]:
    body = {"type": "ask", "questions": ["How many words?"], "documents": [document], "max_output_tokens": 8}
    answer = api.http.post("/v1/quote", json=body | spec)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_a_quote_counts_what_the_model_would_read(api: Api) -> None:
    document = api.upload("one two three four")
    found = ask(api, document, questions=["a b", "a b c"])
    assert (found["prompt_tokens"], found["num_outputs"]) == (FRAME_TOKENS + 4 + ASK_TOKENS + 3, 2)
    assert (found["context_tokens"], found["fits_context"]) == (CONTEXT, True)
    assert found["cached_tokens"] is found["peak_bytes"] is found["kv_bytes"] is None
    assert api.http.get("/v1/jobs").json()["data"] == []


def test_a_job_that_does_not_fit_is_quoted_all_the_same(api: Api) -> None:
    document = api.upload("word " * 60)
    found = ask(api, document)
    assert found["prompt_tokens"] == FRAME_TOKENS + 60 + ASK_TOKENS + 3
    assert found["fits_context"] is False


def test_bytes_are_what_a_live_worker_predicts(api: Api) -> None:
    prompt = FRAME_TOKENS + 10 + ASK_TOKENS + 3
    points = [(0, 1000), (prompt + 7, 2000), (prompt + 27, 6000)]
    shown = card().model_copy(update={"peak_points": points, "memory_bytes": 2500, "kv_bytes_per_token": 3.0})
    FakeWorker(api.redis).be_there(card=shown)
    document = api.upload("one two three four five six seven eight nine ten")
    found = ask(api, document)
    assert found["kv_bytes"] == 3 * (prompt + 8)
    assert (found["peak_bytes"], found["memory_bytes"], found["fits_memory"]) == (2200, 2500, True)
    assert ask(api, document, max_output_tokens=17)["fits_memory"] is False


@pytest.mark.parametrize(("tokens", "peak"), [(0, 10), (5, 15), (10, 20), (15, 40), (20, 60), (21, None)])
def test_the_peak_is_straight_between_the_points_and_unknown_outside(tokens: int, peak: int | None) -> None:
    shown = card().model_copy(update={"peak_points": [(10, 20), (0, 10), (20, 60)]})
    assert peak_bytes(shown, tokens) == peak
    assert peak_bytes(card(), tokens) is None


@pytest.mark.parametrize(
    ("change", "status"),
    [({"documents": ["doc_" + "0" * 20]}, 404), ({"model": "none"}, 404), ({"questions": []}, 422)],
)
def test_a_quote_refuses_what_a_job_would_be_refused_for(
    shared_api: Api, change: dict[str, object], status: int
) -> None:
    body = {"type": "ask", "questions": ["?"], "documents": [shared_api.upload()]} | change
    assert shared_api.http.post("/v1/quote", json=body).status_code == status


def test_a_text_and_a_result_are_not_sent_twice(api: Api) -> None:
    document = api.upload("One two.")
    text = api.http.get(f"/v1/documents/{document}/text")
    again = api.http.get(f"/v1/documents/{document}/text", headers={"If-None-Match": text.headers["ETag"]})
    assert (text.status_code, again.status_code, again.content) == (200, 304, b"")
    other = api.http.get(f"/v1/documents/{document}/text", headers={"If-None-Match": '"x"'})
    assert other.text == "One two."
