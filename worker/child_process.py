"""One engine child as the parent sees it: started by exec, spoken to over two pipes, killed if need be.

Knows nothing of queues and jobs beyond the messages of `worker.protocol`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from jobs.faults import told
from worker.process_memory import resident_bytes
from worker.protocol import CHILD_FDS, FromChild, ToChild, decode_from_child, encode

log = logging.getLogger("worker.child_process")

_HINTS = {
    signal.SIGKILL: "by hand, or by the system where memory ran out: its log says which",
    signal.SIGABRT: "by its own libraries, whose last words are in the worker's log; "
    "Metal does that where GPU memory ran out",
    signal.SIGSEGV: "by a fault in native code; MLX on a CPU does that too where memory ran out",
}
"""What a signal may have come from, said as no more than that."""


@dataclass(frozen=True)
class Gone:
    """The last message of every child: it has ended, whether it meant to or not."""

    returncode: int
    breach: str | None
    """What it said that was not the protocol, where the parent killed it for that."""

    @property
    def may_be_memory(self) -> bool:
        """Whether it ended as one that lacks memory may; one that fails by itself says so and exits."""
        return self.breach is None and -self.returncode in _HINTS

    def describe(self) -> str:
        """How it ended, as the rest of a sentence that begins with "the engine process"."""
        if self.breach:
            return f"was stopped because it sent something unreadable ({self.breach})"
        if self.returncode >= 0:
            return f"exited with code {self.returncode}"
        number = -self.returncode
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = "an unknown signal"
        hint = _HINTS.get(signal.Signals(number)) if name != "an unknown signal" else None
        return f"was killed by {name} (signal {number}" + (f"; {hint})" if hint else ")")


class ChildProcess:
    """A child from its start to its end; a new one is a new object, so messages never mix.

    It gets its own session: a signal meant for the parent's group does not reach it, and the parent
    decides. It ends by itself when the parent's end of its input pipe closes.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        child_reads, parent_writes = os.pipe()
        parent_reads, child_writes = os.pipe()
        try:
            self._process = subprocess.Popen(
                command,
                env={**env, CHILD_FDS: f"{child_reads},{child_writes}"},
                pass_fds=(child_reads, child_writes),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            os.close(child_reads)
            os.close(child_writes)
        self.messages: queue.Queue[FromChild | Gone] = queue.Queue()
        self.pid = self._process.pid
        # A child that does not read must not block the parent: writes go through a thread.
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        threading.Thread(target=self._write, args=(parent_writes,), daemon=True).start()
        threading.Thread(target=self._read, args=(parent_reads,), daemon=True).start()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def resident_bytes(self) -> int:
        """What it has in memory; 0 once it has ended."""
        return resident_bytes(self.pid) if self.alive else 0

    def send(self, message: ToChild) -> None:
        """Hand over a message; whether the child still lives is told by `messages`, not here."""
        self._outgoing.put(encode(message))

    def receive(self, timeout_s: float) -> FromChild | Gone | None:
        """The next message, or None if none came in time."""
        try:
            return self.messages.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def close(self, grace_s: float = 3.0) -> None:
        """End the child: by the end of its input, else by SIGKILL after `grace_s`."""
        self._outgoing.put(None)
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()

    def _write(self, fd: int) -> None:
        with open(fd, "wb", buffering=0) as pipe, contextlib.suppress(BrokenPipeError):
            while (data := self._outgoing.get()) is not None:
                view = memoryview(data)
                while view:
                    view = view[pipe.write(view) :]

    def _read(self, fd: int) -> None:
        breach = None
        with open(fd, "rb") as pipe:
            for line in pipe:
                try:
                    self.messages.put(decode_from_child(line))
                except ValidationError as error:
                    # Whatever was lost might have been the end of the job: a child that cannot be
                    # understood cannot be waited for.
                    breach = f"{line[:80]!r}: {told(error.errors()[0])}"
                    log.error("the engine process sent something unreadable: %s", breach)
                    self.kill()
                    break
        try:
            returncode = self._process.wait(5)
        except subprocess.TimeoutExpired:
            # It closed its pipe and lives on: nothing can be asked of it any more.
            self.kill()
            returncode = self._process.wait()
        self._outgoing.put(None)
        self.messages.put(Gone(returncode, breach))
