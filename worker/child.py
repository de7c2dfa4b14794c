"""The engine child: loads the model once and does one attempt after another in its main thread.

It talks to its parent alone, over two pipes (worker.protocol), and ends when the parent does. MLX is
imported only after its environment and the CPU's BLAS have been put in place.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
import time
from typing import Any, BinaryIO, Literal

from jobs import EventType, Output, Problem, Progress, logs, streams
from jobs.private_files import only_for_user
from worker import accelerate, protocol
from worker.mlx_environment import prepare_mlx
from worker.settings import Settings, load_settings

log = logging.getLogger("worker.child")

DELTA_INTERVAL_S = 0.2
"""New text is held this long, so that a fast model doesn't make an event of every token."""
EXIT_REFUSED = 3


class Channel:
    """The two pipes. One thread reads, the main thread writes."""

    def __init__(self, reader: BinaryIO, writer: BinaryIO) -> None:
        self._reader, self._writer = reader, writer
        self.inbox: queue.Queue[protocol.Run] = queue.Queue()
        self.stop: Literal["cancel", "release"] | None = None

    def listen(self) -> None:
        """Take messages until the parent is gone, then end the process: nothing may outlive its parent."""
        for line in self._reader:
            message = protocol.decode_to_child(line)
            if isinstance(message, protocol.Run):
                self.stop = None
                self.inbox.put(message)
            else:
                self.stop = message.why
        os._exit(0)

    def send(self, message: protocol.FromChild) -> None:
        self._writer.write(protocol.encode(message))
        self._writer.flush()


class JobReport:
    """Turns what the engine reports of a job's outputs into messages."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._outputs: list[OutputReport] = []

    def output(self, index: int, num_outputs: int, question: str | None = None) -> OutputReport:
        report = OutputReport(self._channel, self, index, num_outputs, question)
        self._outputs.append(report)
        return report

    def flush(self, held_since: float = float("inf")) -> None:
        """Send the text that was held back at that time already; all of it where no time is given."""
        for output in self._outputs:
            output.flush(held_since)


class OutputReport:
    """What the engine reports of one output, and a stop from the parent as `Stopped`."""

    def __init__(
        self, channel: Channel, job: JobReport, index: int, num_outputs: int, question: str | None
    ) -> None:
        self._channel, self._job = channel, job
        self._index, self._num_outputs, self._question = index, num_outputs, question
        self._phase: str | None = None
        self._phase_began = self._phase_start = 0.0
        self._num_restored = 0
        self._text, self._text_since = "", 0.0

    def check(self) -> None:
        from worker.engine.errors import Stopped

        if self._channel.stop:
            raise Stopped(self._channel.stop)

    def progress(
        self,
        phase: Literal["load", "restore", "prefill", "decode"],
        num_done: int,
        num_total: int,
        cached_tokens: int,
    ) -> None:
        now = time.monotonic()
        if phase != self._phase:
            # What was known or said before the phase was first heard of is not work of this time.
            known = min(num_done, max(cached_tokens, self._num_restored))
            start = {"prefill": known, "decode": num_done}.get(phase, 0)
            self._phase, self._phase_began, self._phase_start = phase, now, start
        if phase == "restore":
            self._num_restored = num_done  # more than what is cached where a prefill goes on
        elapsed, worked = now - self._phase_began, num_done - self._phase_start
        rate = worked / elapsed if elapsed > 0 else 0.0
        data = Progress(
            phase=phase,
            num_done=num_done,
            num_total=num_total,
            tokens_per_s=round(rate, 1),
            eta_s=round((num_total - num_done) / rate, 1) if rate > 0 else None,
            cached_tokens=cached_tokens,
            output_index=self._index,
            num_outputs=self._num_outputs,
        )
        self._event(EventType.PROGRESS, data.model_dump())

    def delta(self, text: str) -> None:
        now = time.monotonic()
        if not self._text:
            self._text_since = now
        self._text += text
        # Outputs of a batch speak by turns: what an ended one has left goes out with another's text.
        self._job.flush(now - DELTA_INTERVAL_S)

    def done(self, output: Output) -> None:
        self.flush(float("inf"))
        whole = output.model_copy(update={"index": self._index, "question": self._question})
        self._event(EventType.OUTPUT, whole.model_dump(mode="json"))

    def flush(self, held_since: float) -> None:
        if self._text and self._text_since <= held_since:
            self._event(EventType.DELTA, {"output_index": self._index, "text": self._text})
            self._text = ""

    def _event(
        self, kind: Literal[EventType.PROGRESS, EventType.DELTA, EventType.OUTPUT], data: dict[str, Any]
    ) -> None:
        self._channel.send(protocol.ChildEvent(type=kind, data=data))


def do(engine: Any, run: protocol.Run, channel: Channel) -> protocol.End:
    """One attempt, whatever happens in it."""
    from worker import tasks
    from worker.engine.engine import Document, EngineError, Stopped

    report = JobReport(channel)
    documents = [Document(d.name, d.text) for d in run.documents]
    try:
        salt = bytes.fromhex(run.request.prefix_salt)
        result = tasks.run(engine, run.request.spec, documents, report, salt, run.request.owed)
        report.flush()
        return protocol.End(outcome="succeeded", result=result)
    except Stopped:
        return protocol.End(outcome="cancelled" if channel.stop == "cancel" else "released")
    except EngineError as error:
        return protocol.End(outcome="failed", problem=error.problem)
    except Exception as error:
        log.exception("job %s failed", run.request.job_id)
        detail = f"The engine failed with {type(error).__name__}: {error}. The worker's log has the details."
        return protocol.End(outcome="failed", problem=Problem(code="engine_error", detail=detail))


def load_engine(settings: Settings) -> Any:
    """Load the model that the settings name, with the snapshot store of the data folder.

    Raises EngineError where the model or the memory settings can't be served.
    """
    from cache_store import Keyring, SnapshotStore, Tier
    from worker.engine.engine import Engine
    from worker.engine.memory import keep_resident

    keep_resident(settings.wired_bytes)
    tier = Tier(settings.shared_tier) if settings.shared_tier else None
    keyring = Keyring(settings.snapshot_keys) if settings.snapshot_keys else None
    store = SnapshotStore(settings.snapshots, settings.snapshots_bytes, tier=tier, keyring=keyring)
    return Engine.load(
        settings.model_folder,
        settings.model_id,
        store,
        settings.memory_bytes,
        settings.verify,
        settings.unverified_model,
    )


def main() -> int:
    streams.prepare()
    only_for_user()
    settings = load_settings()
    logs.configure(settings.log_format, "%(levelname)s %(name)s %(message)s")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent decides when this process stops
    read_fd, write_fd = map(int, os.environ[protocol.CHILD_FDS].split(","))
    channel = Channel(os.fdopen(read_fd, "rb"), os.fdopen(write_fd, "wb"))
    threading.Thread(target=channel.listen, daemon=True).start()
    prepare_mlx()
    accelerate.prepare_cpu()
    from worker.engine.errors import EngineError

    try:
        engine = load_engine(settings)
    except EngineError as error:
        channel.send(protocol.Refused(problem=error.problem))
        return EXIT_REFUSED
    channel.send(protocol.Ready(card=engine.card))
    while True:
        run = channel.inbox.get()
        channel.send(do(engine, run, channel))


if __name__ == "__main__":
    sys.exit(main())
