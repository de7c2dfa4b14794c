"""Somebody lets RQ's own worker, which forks for each job, listen on a queue of Longleaf."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from api_rig import Api, FakeWorker, result, running

from api.reconciler import Reconciler
from api.settings import Settings
from jobs import EventType, queue_name, run_id

ROOT = Path(__file__).parents[2]
MODEL = "tiny"


@pytest.mark.parametrize("serializer", ["rq.serializers.JSONSerializer", "rq.serializers.PickleSerializer"])
def test_it_runs_nothing_and_the_attempt_goes_to_a_worker_of_ours(
    settings: Settings, serializer: str
) -> None:
    now = 0.0
    with running(settings.model_copy(update={"reconcile_s": 3600.0})) as api:
        reconciler = Reconciler(
            api.services.jobs, api.services.queue, lost_after_s=10, gone_after_s=5, clock=lambda: now
        )
        job_id = str(api.submit()["id"])
        done = rq_worker(settings.redis_url, serializer)
        assert done.returncode == 0, done.stderr
        assert api.queued() == []
        reconciler.compare()
        now = 11.0
        reconciler.compare()
        assert api.queued() == [run_id(job_id, 2)]
        job = api.job(job_id)
        assert (job["state"], job["attempt"], job["num_failures"]) == ("queued", 2, 0)
        finish(api, job_id)


def test_its_log_says_what_is_wrong(api: Api, settings: Settings) -> None:
    api.submit()
    done = rq_worker(settings.redis_url, "rq.serializers.JSONSerializer")
    assert "serve the queue with `longleaf worker`" in done.stdout + done.stderr


def rq_worker(redis_url: str, serializer: str) -> subprocess.CompletedProcess[str]:
    """RQ's worker until the queue is empty."""
    command = [sys.executable, "-m", "rq.cli", "worker", "--burst", "--url", redis_url, "-S", serializer]
    return subprocess.run([*command, queue_name(MODEL)], cwd=ROOT, capture_output=True, text=True, timeout=60)


def finish(api: Api, job_id: str) -> None:
    """Let a worker of ours take the second attempt and end it."""
    worker = FakeWorker(api.redis)
    assert worker.take().attempt == 2
    worker.say(job_id, 2, EventType.STARTED)
    worker.say(job_id, 2, EventType.SUCCEEDED, result())
    assert api.wait_state(job_id, "succeeded")["num_failures"] == 0
