"""`python -m worker`: a worker for one model, until it is told to stop."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import uuid
from collections.abc import Sequence
from functools import partial

from redis import Redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from cache_store import Keyring, KeyringError, SnapshotStore, Tier, TierDown
from jobs import logs, queue_name, streams
from jobs.private_files import make_private, only_for_user
from worker.documents import DocumentSource
from worker.holdings import NO_BUDGET, HoldingsReport
from worker.join import join
from worker.outbox import Outbox
from worker.parent import PatientBackoff, RunWorker
from worker.prediction import with_peaks
from worker.presence import Presence
from worker.redis_server import CannotStart, wait_for_redis
from worker.resident import EngineUnavailable, Resident
from worker.run import FLUSH_GRACE_S, RunContext
from worker.settings import Settings, SettingsError, load_settings
from worker.stop import StopRequest
from worker.store_name import store_name

log = logging.getLogger("worker")

CHILD_COMMAND = (sys.executable, "-m", "worker.child")


def main(words: Sequence[str] | None = None) -> int:
    streams.prepare()
    for chatty in ("httpx", "rq.worker", "rq.job"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    parser = argparse.ArgumentParser(prog="python -m worker", description=__doc__)
    parser.add_argument("--join", action="store_true", help="sign on at LONGLEAF_API first; fetch the model")
    given = parser.parse_args(words)
    try:
        settings = load_settings()
        logs.configure(settings.log_format, "%(levelname)s %(name)s: %(message)s")
        return serve(join(settings) if given.join else settings, CHILD_COMMAND)
    except (SettingsError, CannotStart, EngineUnavailable) as error:
        print(f"worker: {error}", file=sys.stderr)
        return 1


def serve(settings: Settings, child_command: Sequence[str]) -> int:
    """Work until a signal; the exit status.

    Raises:
        CannotStart: no usable Redis, no such shared tier or folder of keys, or the API does not take this
            machine for a worker.
        EngineUnavailable: the model cannot be loaded.
    """
    only_for_user()
    make_private(settings.data)
    try:
        # Asked here too, so that a wrong one stops the start; what is deleted is deleted there as well.
        tier = Tier(settings.shared_tier, push=False) if settings.shared_tier else None
        keyring = Keyring(settings.snapshot_keys) if settings.snapshot_keys else None
    except TierDown as error:
        raise CannotStart(f"{error}; check LONGLEAF_SHARED_TIER") from error
    except KeyringError as error:
        raise CannotStart(f"{error}; check LONGLEAF_SNAPSHOT_KEYS") from error
    stop = StopRequest()
    stop.listen()
    # One connection for what must answer soon, one for RQ's loop, which waits.
    soon = Redis.from_url(
        settings.redis_url, socket_timeout=5, socket_connect_timeout=5, retry=Retry(NoBackoff(), 0)
    )
    wait_for_redis(soon, settings.redis_url, stop)
    if stop.requested:
        return 0
    name = f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
    worker: RunWorker | None = None
    store, model = store_name(settings.data), settings.model_id
    presence = Presence(soon, name, model, store, lambda: worker.renew_lease() if worker else None)
    outbox = Outbox(soon, name)

    def open_store() -> SnapshotStore:
        return SnapshotStore(settings.snapshots, NO_BUDGET, tier=tier, keyring=keyring)

    holdings = HoldingsReport(soon, name, open_store)
    settings.token()  # a file that was named and is not there stops the start
    documents = DocumentSource(settings.api, settings.token)
    complete = partial(with_peaks, folder=settings.model_folder)
    resident = Resident(child_command, _child_env(settings), model, complete, settings.engine_limit_bytes)
    try:

        def keep_waiting() -> bool:
            presence.beat()
            return not stop.requested

        # RQ hears of this worker only when the model is loaded.
        if not resident.wait_ready(keep_waiting):
            return 0
        patient = Redis.from_url(settings.redis_url, retry=Retry(PatientBackoff(stop), -1))
        context = RunContext(name, soon, outbox, presence, documents, resident, stop)
        worker = RunWorker(context, model, patient, settings.steal_after_s)
        log.info("%s serves %s from queue %s", name, model, queue_name(model))
        worker.work(logging_level="WARNING")
        if worker.fatal is not None:
            raise worker.fatal
        if stop.trouble is not None:
            raise CannotStart(stop.trouble)
        return 0 if stop.requested else 1
    finally:
        outbox.close(FLUSH_GRACE_S)
        holdings.close()
        presence.close()
        resident.close()
        documents.close()


def _child_env(settings: Settings) -> dict[str, str]:
    """The parent's environment with its resolved settings, so that both mean the same folders and model."""
    return {
        **{name: value for name, value in os.environ.items() if name != "LONGLEAF_WORKER_TOKEN"},
        "LONGLEAF_DATA": str(settings.data),
        "LONGLEAF_MODELS": str(settings.models),
        "LONGLEAF_MODEL": settings.model,
        "LONGLEAF_SNAPSHOTS_BYTES": str(settings.snapshots_bytes),
        **({"LONGLEAF_SHARED_TIER": settings.shared_tier} if settings.shared_tier else {}),
        **({"LONGLEAF_SNAPSHOT_KEYS": str(settings.snapshot_keys)} if settings.snapshot_keys else {}),
    }


if __name__ == "__main__":
    sys.exit(main())
