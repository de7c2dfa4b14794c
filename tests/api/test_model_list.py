"""/v1/models, /v1/workers and /health: what is there, and what is missing."""

from __future__ import annotations

from api_rig import CONTEXT, MODEL, Api, FakeWorker, card, write_model_folder

from jobs import WORKER_KEY


def test_models_are_the_default_the_folders_and_what_workers_serve(api: Api, worker: FakeWorker) -> None:
    write_model_folder(api.services.settings.models, "owner/big", context=1000)
    (api.services.settings.models / "half-pulled").mkdir()
    worker.be_there(model="served", card=card().model_copy(update={"id": "served", "context_tokens": 77}))
    listed = {model["id"]: model for model in api.http.get("/v1/models").json()}
    assert list(listed) == [MODEL, "owner/big", "served"]
    shown = {name: (m["default"], m["available"], m["context_tokens"]) for name, m in listed.items()}
    assert shown == {
        MODEL: (True, False, CONTEXT),
        "owner/big": (False, False, 1000),
        "served": (False, True, 77),
    }
    assert listed["served"]["card"]["context_tokens"] == 77
    assert "card" not in listed[MODEL]


def test_a_model_that_only_a_worker_has_can_be_asked_for(api: Api, worker: FakeWorker) -> None:
    worker.be_there(model="served")
    assert api.submit(model="served")["model"] == "served"
    assert worker.take("served").spec.model == "served"


def test_the_context_that_a_worker_states_counts(api: Api, worker: FakeWorker) -> None:
    spec = {"type": "summarize", "documents": [api.upload("word " * 40)], "max_output_tokens": 8}
    assert api.http.post("/v1/jobs", json=spec).status_code == 202
    worker.be_there(card=card(context_tokens=47))
    answer = api.http.post("/v1/jobs", json=spec)
    assert (answer.status_code, answer.json()["params"]["context_tokens"]) == (413, 47)


def test_workers_are_those_whose_presence_lives(api: Api, worker: FakeWorker) -> None:
    assert api.http.get("/v1/workers").json() == []
    worker.be_there("job_x", 2)
    api.redis.set(WORKER_KEY + "garbage", "{")
    [shown] = api.http.get("/v1/workers").json()
    assert (shown["name"], shown["state"], shown["job_id"], shown["attempt"]) == ("w1", "busy", "job_x", 2)
    worker.go()
    assert api.http.get("/v1/workers").json() == []


def test_ready_means_that_a_worker_has_the_default_model_loaded(api: Api, worker: FakeWorker) -> None:
    def worker_check() -> tuple[int, str]:
        answer = api.http.get("/health/ready")
        return answer.status_code, answer.json()["checks"]["worker"]

    status, why = worker_check()
    assert (status, "none serves tiny" in why) == (503, True)
    worker.be_there(model="other")
    assert worker_check()[0] == 503
    worker.be_there(state="loading", card=None)
    status, why = worker_check()
    assert (status, "w1 is loading" in why) == (503, True)
    worker.be_there()
    assert worker_check() == (200, "ok")
    worker.be_there(state="draining")
    assert worker_check()[0] == 503


def test_the_api_describes_itself(api: Api) -> None:
    assert api.http.get("/docs").status_code == 200
    paths = api.http.get("/openapi.json").json()["paths"]
    assert {"/v1/documents", "/v1/jobs/{job_id}/events", "/health/ready"} <= set(paths)
    body = paths["/v1/jobs"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert [kind["title"] for kind in body["oneOf"]] == ["Summarize", "Ask", "Prompt", "Warm"]
    assert "$ref" not in str(body)
