"""Shows a job while it runs: a live bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.progress import Progress as Bars
from rich.text import Text

from cli.client import Client, Job
from jobs import EventType, Progress

EVERY_S = 5.0
UNCHANGED_EVERY_S = 60.0
_PHASES = {"load": "loading", "restore": "restoring", "prefill": "reading", "decode": "writing"}


def watch(client: Client, job_id: str, console: Console) -> Job:
    """Follow the job to its end and return it."""
    if console.quiet:
        return client.wait(job_id)
    if console.is_terminal:
        return _watch_live(client, job_id, console)
    return _watch_lines(client, job_id, console)


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        rate = task.fields.get("rate", 0.0)
        return Text(f"{rate:,.0f} tokens/s" if rate else "")


class _Eta(ProgressColumn):
    def render(self, task: Task) -> Text:
        eta_s = task.fields.get("eta_s")
        return Text("" if eta_s is None else f"ETA {_clock(eta_s)}")


def _watch_live(client: Client, job_id: str, console: Console) -> Job:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TextColumn("{task.fields[count]}"),
        _Rate(),
        _Eta(),
    )
    with Bars(*columns, console=console, transient=True) as bars:
        task = bars.add_task("waiting in the queue", total=None, count="")
        for event in client.follow(job_id):
            if event.type is EventType.PROGRESS:
                progress = Progress.model_validate(event.data)
                bars.update(
                    task,
                    description=_describe(progress),
                    total=progress.num_total or None,
                    completed=progress.num_done,
                    count=f"{progress.num_done:,}/{progress.num_total:,} tokens"
                    if progress.num_total
                    else "",
                    rate=progress.tokens_per_s,
                    eta_s=progress.eta_s,
                )
            elif event.type in _NOTES:
                bars.update(task, description=_NOTES[event.type], total=None, count="", rate=0.0, eta_s=None)
    return client.job(job_id)


class Lines:
    """Where a job stands, in a line now and then: at once, as it changes, and each minute that it doesn't."""

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write, self._clock = write, clock
        self._lock = threading.Lock()
        self._line, self._since = "", 0.0
        self._written, self._written_at = "", float("-inf")

    def now(self, line: str) -> None:
        """Where the job stands from now on."""
        with self._lock:
            if line != self._line:
                self._line, self._since = line, self._clock()
        self.tick()

    def tick(self) -> None:
        """Write the line if it is time."""
        with self._lock:
            now = self._clock()
            silent_s = now - self._written_at
            if self._line and self._line != self._written and silent_s >= EVERY_S:
                self._write(self._line)
            elif self._line and silent_s >= UNCHANGED_EVERY_S:
                self._write(f"{self._line}, for {_clock(now - self._since)} so far")
            else:
                return
            self._written, self._written_at = self._line, now


def _watch_lines(client: Client, job_id: str, console: Console) -> Job:
    lines = Lines(lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True))
    with _ticking(lines):
        for event in client.follow(job_id):
            if event.type is EventType.PROGRESS:
                lines.now(_line(Progress.model_validate(event.data)))
            elif event.type in _NOTES:
                lines.now(_NOTES[event.type])
    return client.job(job_id)


@contextmanager
def _ticking(lines: Lines) -> Iterator[None]:
    """A job that waits has no events, so the time is told by a thread; nothing is written after the end."""
    ended = threading.Event()

    def tick() -> None:
        while not ended.wait(1.0):
            lines.tick()

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        yield
    finally:
        ended.set()
        ticker.join()


_NOTES = {
    EventType.QUEUED: "waiting in the queue",
    EventType.STARTED: "started",
    EventType.CANCELLING: "cancelling",
}


def _describe(progress: Progress) -> str:
    phase = _PHASES[progress.phase]
    return (
        f"{phase} {progress.output_index + 1}/{progress.num_outputs}" if progress.num_outputs > 1 else phase
    )


def _line(progress: Progress) -> str:
    line = _describe(progress)
    if progress.num_total:
        line += f": {progress.num_done:,}/{progress.num_total:,} tokens"
    if progress.tokens_per_s:
        line += f", {progress.tokens_per_s:,.0f} tokens/s"
    return line + (f", {progress.cached_tokens:,} cached" if progress.cached_tokens else "")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
