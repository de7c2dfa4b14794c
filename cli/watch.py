"""Shows a job while it runs: a live bar on a terminal, a line per phase elsewhere."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.progress import Progress as Bars
from rich.text import Text

from cli.client import Client, Job
from jobs import EventType, Progress

_PHASES = {"load": "loading", "restore": "restoring", "prefill": "reading", "decode": "writing"}


def watch(client: Client, job_id: str, console: Console) -> Job:
    """Follow the job to its end and return it."""
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


def _watch_lines(client: Client, job_id: str, console: Console) -> Job:
    latest: Progress | None = None
    for event in client.follow(job_id):
        if event.type is EventType.PROGRESS:
            progress = Progress.model_validate(event.data)
            is_new = latest is None or _describe(latest) != _describe(progress)
            if latest is not None and is_new:
                console.print(_line(latest))
            latest = progress
        elif event.type in _NOTES:
            console.print(_NOTES[event.type])
    if latest is not None:
        console.print(_line(latest))
    return client.job(job_id)


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
