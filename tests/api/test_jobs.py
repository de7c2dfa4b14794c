from jobs import EventType
from tests.api.conftest import Api, FakeWorker, progress, result


def test_a_job_goes_from_accepted_to_succeeded(api: Api, worker: FakeWorker) -> None:
    job = api.submit()
    assert job["state"] == "queued"
    request = worker.take()
    worker.be_there(job["id"], 1)
    worker.say(job["id"], 1, EventType.STARTED)
    worker.say(job["id"], 1, EventType.PROGRESS, progress(3))
    assert api.wait_state(job["id"], "running")["attempt"] == 1
    worker.say(job["id"], 1, EventType.SUCCEEDED, result())
    done = api.wait_state(job["id"], "succeeded")
    assert request.spec.model == done["model"]
    assert api.http.get(done["links"]["result"]).json()["outputs"][0]["text"] == "An answer."
