"""Injected faults: a call that fails or at which the process dies, damaged files, a moved clock."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from stored_blocks import reseal

CALLS = (
    "mkdir", "open", "close", "stat", "fstat", "statvfs", "scandir", "listdir", "ftruncate", "pwritev",
    "preadv", "pread", "fsync", "rename", "unlink", "utime",
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """What becomes of one call: `kill`, `kill half` (a write does half its work first) or an errno's name."""

    kind: str
    step: int = -1

    def __str__(self) -> str:
        return f"{self.kind} at step {self.step}"


@contextmanager
def injected(fault: Fault) -> Iterator[list[str]]:
    """Let the call with this number meet its fault; gives the list of calls made."""
    made: list[str] = []

    def meet(name: str, call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if name == "pwritev" and fault.kind != "kill":  # a full or failing disk takes a part first
            fd, views, offset = arguments
            call(fd, [view[: view.nbytes // 2] for view in views[:3]], offset)
        if fault.kind.startswith("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "close":  # the descriptor is gone nevertheless
            call(*arguments)
        code = getattr(errno, fault.kind)
        raise OSError(code, os.strerror(code))

    def wrap(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            made.append(name)
            if len(made) - 1 == fault.step:
                meet(name, call, arguments)
            return call(*arguments, **options)

        return run

    originals = [(os, name) for name in CALLS] + [(fcntl, "flock")]
    patches = [
        mock.patch.object(module, name, wrap(name, getattr(module, name))) for module, name in originals
    ]
    for patch in patches:
        patch.start()
    try:
        yield made
    finally:
        for patch in patches:
            patch.stop()


@contextmanager
def clock_moved(seconds: float) -> Iterator[None]:
    """Let the clock be ahead by so much (behind, where negative)."""
    real_ns = time.time_ns

    def moved_ns() -> int:
        return real_ns() + int(seconds * 1e9)

    def moved() -> float:
        return moved_ns() / 1e9

    with mock.patch.object(time, "time_ns", moved_ns), mock.patch.object(time, "time", moved):
        yield


def cut(raw: bytes, rng: np.random.Generator) -> bytes:
    """A file cut at a length of every class: nothing, in magic, prelude, header, at edges, in the payload."""
    payload = int.from_bytes(raw[24:32], "little")
    edges = [0, 1, 7, 8, 11, 12, 127, 128, 129, payload - 1, payload, payload + 1, len(raw) - 1]
    inside = [int(rng.integers(a, b)) for a, b in ((12, 128), (128, payload), (payload, len(raw)))]
    return raw[: min(int(rng.choice([*edges, *inside])), len(raw) - 1)]


def flipped(raw: bytes, rng: np.random.Generator) -> bytes:
    """One bit changed in prelude, header or payload."""
    payload = int.from_bytes(raw[24:32], "little")
    first, end = [(0, 128), (128, payload), (payload, len(raw))][rng.integers(3 if len(raw) > payload else 2)]
    changed = bytearray(raw)
    changed[int(rng.integers(first, end))] ^= 1 << int(rng.integers(8))
    return bytes(changed)


def foreign(raw: bytes, rng: np.random.Generator) -> bytes:
    """What is no block at all, or more than one."""
    noise = rng.integers(0, 256, int(rng.integers(1, 9000)), np.uint8).tobytes()
    choices = [b"\0" * len(raw), noise, b"GGUF" + raw[4:], raw[:8] + noise, raw + noise, b"{}", raw[::-1]]
    return choices[rng.integers(len(choices))]


def of_a_later_version(raw: bytes, rng: np.random.Generator) -> bytes:
    changed = bytearray(raw)
    changed[8:12] = int(rng.integers(3, 1 << 31)).to_bytes(4, "little")
    return reseal(changed) if rng.integers(2) else bytes(changed)


def of_an_earlier_version(raw: bytes, rng: np.random.Generator) -> bytes:
    changed = bytearray(raw)
    changed[8:12] = bytes(4)
    return reseal(changed) if rng.integers(2) else bytes(changed)


DAMAGES: dict[str, Callable[[bytes, np.random.Generator], bytes]] = {
    "cut": cut,
    "bit flipped": flipped,
    "foreign": foreign,
    "later version": of_a_later_version,
    "earlier version": of_an_earlier_version,
}


def damage(path: Path, kind: str, rng: np.random.Generator) -> None:
    path.write_bytes(DAMAGES[kind](path.read_bytes(), rng))
