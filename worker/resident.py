"""Keeps one engine child loaded: starts it, waits until it is ready, starts another when it dies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from jobs import ModelCard
from worker.child_process import ChildProcess, Gone
from worker.protocol import Ready, Refused

log = logging.getLogger("worker.resident")

MAX_DEATHS = 3
"""Deaths in a row before `ready` after which the model is taken to be unloadable."""


class EngineUnavailable(RuntimeError):
    """No child can be had; the message says why and what to do."""


class Resident:
    """The child in hand, and how often its kind has died before it was ready."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        model: str,
        complete: Callable[[ModelCard], ModelCard],
        limit_bytes: int | None = None,
    ) -> None:
        """
        Args:
            complete: adds to the child's card what the parent knows of the model.
            limit_bytes: what a child may have in memory; None for no limit.
        """
        self._command = command
        self._env = env
        self._model = model
        self._complete = complete
        self.limit_bytes = limit_bytes
        self._deaths = 0
        self._ready = False
        self._given_up: EngineUnavailable | None = None
        self.card: ModelCard | None = None
        self.child: ChildProcess = self._spawn()

    @property
    def ready(self) -> bool:
        """Whether the child has loaded its model, lives, and has nothing left to say.

        A message outside a job would be taken for one about the next job.
        """
        return self._ready and self.child.alive and self.child.messages.empty()

    def excess(self) -> int | None:
        """What the child has in memory where that is over the limit, in bytes."""
        if self.limit_bytes is None:
            return None
        held = self.child.resident_bytes
        return held if held > self.limit_bytes else None

    def replace_grown(self) -> None:
        """Replace a child that has nothing to do and is over the limit."""
        held = self.excess()
        if held is not None:
            log.warning(
                "the engine process %d has %.2f GB in memory, over its limit; starting another",
                self.child.pid,
                held / 1e9,
            )
            self.respawn()

    def respawn(self) -> None:
        """Replace the child, dead or alive, without waiting for the new one."""
        self.child.kill()
        self.child.close()
        self.child = self._spawn()

    def wait_ready(self, keep_waiting: Callable[[], bool]) -> bool:
        """Wait for the child's model, starting new children as they die.

        Args:
            keep_waiting: called several times a second; False gives up.

        Returns:
            Whether the child is ready.

        Raises:
            EngineUnavailable: the model is refused or takes more than the limit, or children die
                `MAX_DEATHS` times in a row.
        """
        if self._ready and not self.ready:
            log.warning("the engine process %d died or spoke while idle; starting another", self.child.pid)
            self.respawn()
        while not self._ready:
            if self._given_up is not None:
                raise self._given_up
            if not keep_waiting():
                return False
            message = self.child.receive(0.1)
            if isinstance(message, Ready):
                self._deaths, self.card = 0, self._complete(message.card)
                held = self.excess()
                if held is not None:
                    self._given_up = EngineUnavailable(
                        f"the engine process has {held / 1e9:.2f} GB in memory with {self._model} loaded, "
                        f"over its limit of {(self.limit_bytes or 0) / 1e9:.2f} GB: raise "
                        "LONGLEAF_ENGINE_MEMORY_BYTES or choose a smaller model (LONGLEAF_MODEL)"
                    )
                    continue
                self._ready = True
                log.info(
                    "%s is loaded on %s (engine process %d)", self._model, message.card.device, self.child.pid
                )
            elif isinstance(message, Refused):
                self._given_up = EngineUnavailable(
                    f"{self._model} cannot be loaded: {message.problem.detail}"
                )
            elif isinstance(message, Gone):
                self._deaths += 1
                if self._deaths >= MAX_DEATHS:
                    hint = "; if it was memory, a smaller model (LONGLEAF_MODEL) needs less"
                    self._given_up = EngineUnavailable(
                        f"the engine process for {self._model} died {self._deaths} times in a row before the "
                        f"model was loaded; the last one {message.describe()}. Its own messages are above"
                        f"{hint if message.may_be_memory else ' and say why'}."
                    )
                    continue
                log.warning("the engine process %s before it was ready; starting another", message.describe())
                self.respawn()
        return True

    def close(self) -> None:
        self.child.close()

    def _spawn(self) -> ChildProcess:
        self._ready = False
        child = ChildProcess(self._command, self._env)
        log.info("engine process %d started; loading %s", child.pid, self._model)
        return child
