"""Runs processes side by side with prefixed logs and stops them in order: all others first, then `last`.

honcho does the work. Added here: the order (a worker gives its job back through Redis, so Redis
stops last), a second signal that is passed on, an end of everything when this process is killed, which
process ended first, and times that a wrong clock does not change.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from types import FrameType
from typing import Any

import honcho.manager
from honcho.process import Process

from cli.output import KeepingPrinter

KILL_WAIT_S = 20
"""A worker may take 15 s to give its job back."""


class Supervisor(honcho.manager.Manager):
    """`loop()` returns when every process has ended; `asked` says whether a signal was the reason.

    `first` names the process that ended first, and `printer` has what each said last.
    """

    def __init__(self, last: str, last_is_up: Callable[[], bool]) -> None:
        """`last_is_up` tells when the process `last` can be used; the others start after that."""
        honcho.manager.KILL_WAIT = KILL_WAIT_S
        self.printer = KeepingPrinter()
        super().__init__(self.printer)
        self._process_ctor = LinkedProcess
        self._clock = SteadyClock()
        self.first: str | None = None
        self._last = last
        self._last_is_up = last_is_up
        self._terminating = False
        self._num_signals = 0
        self._last_is_stopping = False

    @property
    def asked(self) -> bool:
        return self._num_signals > 0

    def ended(self) -> dict[str, int]:
        """The processes that have ended, with their exit codes."""
        return {name: p["returncode"] for name, p in self._processes.items() if "returncode" in p}

    def terminate(self) -> None:
        if not self._terminating:
            self._terminating = True
            self._signal(signal.SIGTERM, self._running() - {self._last})

    def _start(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as nohup leaves it
                signal.signal(number, self._on_signal)
        for name in sorted(self._processes, key=lambda name: name != self._last):
            entry = self._processes[name]
            run = entry["obj"].run
            process = multiprocessing.Process(name=name, target=run, args=(self.events, True))
            entry["process"] = process
            process.start()
            if name == self._last:
                give_up_at = time.monotonic() + 10
                while process.is_alive() and not self._last_is_up() and time.monotonic() < give_up_at:
                    time.sleep(0.02)
                if not process.is_alive():  # the others would only hide why
                    for other in self._running() - {name}:
                        del self._processes[other]
                    return

    def _any_stopped(self) -> bool:
        # Called after every message, so at most one end is new.
        if self.first is None:
            self.first = next(iter(self.ended()), None)
        return bool(super()._any_stopped())

    def _all_stopped(self) -> bool:
        # Called in every round of honcho's loop: the place to see that only `last` is left.
        if self._terminating and not self._last_is_stopping and self._running() == {self._last}:
            self._last_is_stopping = True
            self._signal(signal.SIGTERM, {self._last})
        return bool(super()._all_stopped())

    def _running(self) -> set[str]:
        return {name for name, entry in self._processes.items() if "returncode" not in entry}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._num_signals += 1
        if self._num_signals == 1:
            self.terminate()
            self._system_print("stopping; once more to stop at once\n")
        elif self._num_signals == 2:
            self._signal(signal.SIGTERM, self._running() - {self._last})
        else:
            self.kill()

    def _signal(self, number: signal.Signals, names: set[str]) -> None:
        for name in sorted(names):
            pid = self._processes[name].get("pid")
            if pid is not None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, number)


class LinkedProcess(Process):
    """A honcho process whose command is stopped when the supervisor dies without stopping it."""

    def run(self, events: Any = None, ignore_signals: bool = False) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as honcho does with the others
        threading.Thread(target=self._stop_with_parent, daemon=True).start()
        super().run(events, ignore_signals)

    def _stop_with_parent(self) -> None:
        # The helper of each process holds the pipes of those started before it, so they stop in the
        # reverse order of their start: `last` is the last one here too.
        parent = multiprocessing.parent_process()
        assert parent is not None
        multiprocessing.connection.wait([parent.sentinel])
        command = self._child
        if command is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(command.pid, signal.SIGTERM)
            with suppress(Exception):
                command.wait(KILL_WAIT_S)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(command.pid, signal.SIGKILL)
        os._exit(1)


class SteadyClock:
    """The time of day at the start, and what has passed since: a clock that is set ends no patience."""

    def __init__(self) -> None:
        self._start, self._began = datetime.now(), time.monotonic()

    def now(self) -> datetime:
        return self._start + timedelta(seconds=time.monotonic() - self._began)
