"""Generated requests against a real API process, all routes, stateful: no fault, and what the schema says.

    python -m bench.api_fuzz [--requests 10000] [--max-s 3600] [--examples 40]
                            [--json bench/results/api_fuzz.json]

A Redis-compatible server and `python -m api` are started on a data folder of their own; schemathesis makes
requests from /openapi.json, lawful and unlawful ones, and sequences of them, until the number is reached.
Ids are mostly of what is there (`bench.api_fuzz_hooks`). Requests are counted in the API's own log. A fault
is a 5xx (a worker's presence is in Redis, so that /health/ready is 200), a status or content type that the
schema does not have, or a body that is not as it says. Jobs end at once: a stand-in for a worker takes them
off their queue, and fails every third. Exit status 1 where there was a fault. Prints a table and one JSON
line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from redis import Redis

from bench.api_fuzz_hooks import KEY, PREFIXES, URL, WORKER
from bench.api_process import MODEL, make_key, result, running, say
from jobs import EventType, Problem, queue_name
from jobs.prefixes import HeldPrefix, Holdings, holdings_key

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def requests(log: Path) -> list[dict[str, Any]]:
    lines = (
        json.loads(line) for line in log.read_text(errors="replace").splitlines() if line.startswith("{")
    )
    return [line for line in lines if line["logger"] == "api.access"]


def route(path: str) -> str:
    """A path with its ids taken out; what is none of ours is `other`."""
    shown = re.sub(r"^/v1/(documents|jobs|prefixes)/[^/]+", r"/v1/\1/{id}", path)
    return shown if re.fullmatch(r"/[a-z0-9/{}._-]{0,60}", shown) else "other"


@contextmanager
def worker(path: Path, ended: list[str]) -> Iterator[list[str]]:
    """A stand-in that ends every job as soon as it is queued; the ids of the prefixes that it holds."""
    done = threading.Event()
    thread = threading.Thread(target=work, args=(path, done, ended))
    prefixes = [
        HeldPrefix(
            id=f"{n:032x}",
            model=MODEL,
            owner="",
            num_tokens=320,
            disk_bytes=16384,
            own_bytes=8192,
            prefill_s=1.5,
            used_at=float(n),
            pinned=n % 2 == 0,
        )
        for n in range(4)
    ]
    with Redis(unix_socket_path=str(path)) as client:
        client.set(holdings_key("w"), Holdings(worker="w", prefixes=prefixes).model_dump_json())
    thread.start()
    try:
        yield [prefix.id for prefix in prefixes]
    finally:
        done.set()
        thread.join()


def work(path: Path, done: threading.Event, ended: list[str]) -> None:
    """End what is queued, until told to stop; `ended` grows by the job of each attempt."""
    fault = Problem(code="engine_error", detail="every third one fails").model_dump(mode="json")
    with Redis(unix_socket_path=str(path)) as client:
        for n in itertools.count():
            while (taken := client.blpop([f"rq:queue:{queue_name(MODEL)}"], timeout=1)) is None:
                if done.is_set():
                    return
            job_id, _, attempt = taken[1].decode().rpartition("-")
            end = (EventType.FAILED, fault) if n % 3 == 0 else (EventType.SUCCEEDED, result())
            say(client, job_id, *end, int(attempt))
            ended.append(job_id)


def fuzz(given: dict[str, str], seed: int, examples: int, report: Path) -> tuple[int, str]:
    """One run of schemathesis with the variables of its hooks; its exit status and what it printed."""
    words = [
        sys.executable, "-m", "schemathesis.cli", "run", f"{given[URL]}/openapi.json", "--checks", CHECKS,
        "--phases", "examples,coverage,fuzzing,stateful", "--max-examples", str(examples),
        "--seed", str(seed),
        "--continue-on-failure", "--no-shrink", "--suppress-health-check", "all", "--warnings", "off",
        "--request-timeout", "60",
    ]  # fmt: skip
    ours = {"SCHEMATHESIS_HOOKS": "bench.api_fuzz_hooks", "PYTHONPATH": str(Path(__file__).parents[1])}
    env = {**os.environ, **given, **ours}
    done = subprocess.run(words, cwd=report, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--max-s", type=float, default=3600.0, help="no run begins later")
    parser.add_argument("--examples", type=int, default=40, help="of a route in each run")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="ll-fuzz-", dir="/tmp") as name:
        folder = Path(name)
        ended: list[str] = []
        with running(folder, ends_jobs=False) as service, worker(service.redis, ended) as prefixes:
            log = service.log
            for_hooks = {
                URL: service.url,
                KEY: make_key(folder),
                WORKER: (folder / "data" / "worker.token").read_text().strip(),
                PREFIXES: ",".join(prefixes),
            }
            began = time.monotonic()
            failures, seed = [], 0
            while (found := requests(log)) is not None and len(found) < given.requests:
                if time.monotonic() - began > given.max_s:
                    break
                seed += 1
                status, printed = fuzz(for_hooks, seed, given.examples, folder)
                if status != 0:
                    failures.append(printed)
                    if len(failures) == 3:
                        break
            found = requests(log)
    faults = [line for line in found if line["status"] >= 500]
    by_route: dict[str, Counter[int]] = {}
    for line in found:
        by_route.setdefault(f"{line['method']} {route(line['path'])}", Counter())[line["status"]] += 1
    # Without the methods that a route has not.
    known = {
        name: count for name, count in by_route.items() if sum(count.values()) >= 5 and set(count) != {405}
    }
    report = {
        "bench": "api_fuzz",
        "num_requests": len(found),
        "num_5xx": len(faults),
        "num_jobs": len(set(ended)),
        "num_attempts": len(ended),
        "num_runs": seed,
        "num_failed_runs": len(failures),
        "by_status": dict(sorted(Counter(line["status"] for line in found).items())),
        "by_route": {name: dict(sorted(count.items())) for name, count in sorted(known.items())},
        "checks": CHECKS.split(","),
        "seconds": round(time.monotonic() - began, 1),
        "load_average": [round(load_before[0], 2), round(os.getloadavg()[0], 2)],
        "schemathesis": version("schemathesis"),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }
    for name, count in sorted(known.items()):
        print(f"{name:<45}", ", ".join(f"{status}: {n}" for status, n in sorted(count.items())))
    for line in faults[:5]:
        print(json.dumps(line))
    for printed in failures:
        print(printed)
    print(json.dumps(report))
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if faults or failures else 0


if __name__ == "__main__":
    sys.exit(main())
