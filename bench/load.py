"""What the API takes when a thousand jobs wait and two hundred clients follow them.

    python -m bench.load [--jobs 1000] [--clients 200] [--json bench/results/load.json]

A real API process with SQLite and a Redis-compatible server; a stand-in writes a worker's events. Everything
runs on this machine, the measuring too, so its load average is part of the report. `chrt -r 1 python -m
bench.load` keeps what else runs there out of the way. In turn:

- submit: one client posts all jobs, each over the same document, one after another
- status: one client reads jobs of all of them, while the streams are open
- events: progress for each followed job in turn, 100 in a second; the delay from XADD to the client's line
- end: the results of all jobs at once; until the last one is in the database
- stop: SIGTERM with all streams open; until the process has ended

Times in milliseconds. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import tempfile
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
from redis import Redis

from bench.api_process import Service, result, running, say
from bench.machine import commit
from jobs import EventType


class Followers:
    """Event streams, each a bare connection in one loop of one thread; notes when a number came."""

    def __init__(self, url: str) -> None:
        self._url = httpx.URL(url)
        self.seen: dict[tuple[str, int], float] = {}
        self.num_open = 0
        self._tasks: list[Future[None]] = []
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def follow(self, job_id: str) -> None:
        # A loop holds its tasks weakly.
        self._tasks.append(asyncio.run_coroutine_threadsafe(self._follow(job_id), self._loop))

    async def _follow(self, job_id: str) -> None:
        reader, writer = await asyncio.open_connection(self._url.host, self._url.port)
        writer.write(f"GET /v1/jobs/{job_id}/events HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        self.num_open += 1
        try:
            while line := await reader.readline():
                if line.startswith(b"data: ") and b'"num_done"' in line:
                    self.seen[job_id, json.loads(line[6:])["num_done"]] = time.perf_counter()
        except OSError:
            pass
        finally:
            self.num_open -= 1
            writer.close()


def quantiles(seconds: list[float]) -> dict[str, float]:
    """p50, p99 and the longest, in milliseconds."""
    ordered = sorted(seconds)
    return {
        "num": len(ordered),
        "p50_ms": round(ordered[len(ordered) // 2] * 1e3, 2),
        "p99_ms": round(ordered[int(len(ordered) * 0.99)] * 1e3, 2),
        "max_ms": round(ordered[-1] * 1e3, 2),
    }


def timed(client: httpx.Client, method: str, path: str, **options: Any) -> tuple[float, httpx.Response]:
    began = time.perf_counter()
    answer = client.request(method, path, **options)
    took = time.perf_counter() - began
    answer.raise_for_status()
    return took, answer


def rss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise SystemExit("no VmRSS: this bench needs /proc")


def wait(what: str, check: Any, limit_s: float = 60.0) -> None:
    give_up_at = time.monotonic() + limit_s
    while not check():
        if time.monotonic() > give_up_at:
            raise SystemExit(f"{what} did not come about within {limit_s:g} s")
        time.sleep(0.01)


def measure(service: Service, num_jobs: int, num_clients: int) -> dict[str, Any]:
    found: dict[str, Any] = {"rss_idle_bytes": rss_bytes(service.api.pid)}
    followers = Followers(service.url)
    redis = Redis(unix_socket_path=str(service.redis))
    with httpx.Client(base_url=service.url, timeout=60) as http:
        document = http.post("/v1/documents", json={"name": "a", "text": "A short document."}).json()["id"]
        body = {"type": "ask", "documents": [document], "questions": ["Yes?"]}
        submits, jobs = [], []
        for _ in range(num_jobs):
            took, answer = timed(http, "POST", "/v1/jobs", json=body)
            submits.append(took)
            jobs.append(str(answer.json()["id"]))
        found["submit"] = quantiles(submits)
        followed = jobs[:num_clients]
        for job_id in followed:
            followers.follow(job_id)
        wait("the streams", lambda: followers.num_open == num_clients)
        found["rss_with_streams_bytes"] = rss_bytes(service.api.pid)
        found["status"] = quantiles([timed(http, "GET", f"/v1/jobs/{job_id}")[0] for job_id in jobs * 2])
        found["event_delay"] = quantiles(delays(redis, followers, followed))
        more = [timed(http, "POST", "/v1/jobs", json=body) for _ in range(200)]
        found["submit_with_streams"] = quantiles([took for took, _ in more])
        unfollowed = jobs[num_clients:]
        began = time.perf_counter()
        for job_id in unfollowed:
            say(redis, job_id, EventType.SUCCEEDED, result())
        last = f"/v1/jobs/{unfollowed[-1]}"
        wait("the last end", lambda: http.get(last).json()["state"] == "succeeded")
        found["end"] = {"num": len(unfollowed), "seconds": round(time.perf_counter() - began, 2)}
        found["rss_at_the_end_bytes"] = rss_bytes(service.api.pid)
    began = time.perf_counter()
    service.api.send_signal(signal.SIGTERM)
    service.api.wait(60)
    found["stop_with_streams_s"] = round(time.perf_counter() - began, 2)
    return found


def delays(redis: Redis, followers: Followers, jobs: list[str]) -> list[float]:
    """Seconds from a worker's event to its line at the client, for ten rounds over all jobs."""
    sent: dict[tuple[str, int], float] = {}
    for job_id in jobs:
        say(redis, job_id, EventType.STARTED, {})
    due = time.perf_counter()
    for number in range(1, 11):
        for job_id in jobs:
            time.sleep(max(0.0, due - time.perf_counter()))
            due += 0.01
            data = {
                "phase": "decode",
                "num_done": number,
                "num_total": 10,
                "tokens_per_s": 1.0,
                "eta_s": None,
                "cached_tokens": 0,
            }
            sent[job_id, number] = time.perf_counter()
            say(redis, job_id, EventType.PROGRESS, data)
    wait("the last line", lambda: len(followers.seen) == len(sent))
    return [followers.seen[key] - at for key, at in sent.items()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    load_before = os.getloadavg()
    with (
        tempfile.TemporaryDirectory(prefix="ll-load-", dir="/tmp") as name,
        running(Path(name), ends_jobs=False) as service,
    ):
        found = measure(service, given.jobs, given.clients)
    report = {
        "bench": "load",
        "commit": commit(),
        "num_jobs": given.jobs,
        "num_clients": given.clients,
        **found,
        "real_time": os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR),
        "load_average": [round(load_before[0], 2), round(os.getloadavg()[0], 2)],
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }
    print(json.dumps(report))
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
