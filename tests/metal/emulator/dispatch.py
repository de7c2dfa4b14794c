"""Run a program on the emulated grid and collect what it did and what it did wrong."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from tests.metal.emulator.findings import Finding
from tests.metal.emulator.program import Program

OUTPUT, INITIALISED, CONSTANT = 1, 2, 4
THREADGROUP_MEMORY = 32768
"""Bytes a threadgroup may use on every Apple GPU."""
_MAX_FINDINGS = 40
_COUNTED_BUFFERS, _COUNTED_OPS = 64, 40
_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class Options:
    """How to run: `seed` picks the order of threadgroups, simdgroups, lanes and additions (0: natural)."""

    seed: int = 0
    strict: bool = True
    """A simdgroup operation needs all 32 lanes. Off: Metal's rule for reductions, over the active lanes."""
    flush_denormals: bool = True
    races: bool = True
    timeout_s: float = 60.0


@dataclass
class Buffer:
    name: str
    array: np.ndarray
    """Flat; an output's is written in place."""
    flags: int
    offset_bytes: int = 0
    """Where an MLX slice would start."""


@dataclass
class Statistics:
    """What a dispatch did. Bytes are those that all its threads asked for."""

    seconds: float = 0.0
    num_threads: int = 0
    num_accesses: int = 0
    threadgroup_bytes: int = 0
    bytes_read: dict[str, int] = field(default_factory=dict)
    loads: dict[str, int] = field(default_factory=dict)
    """Reads of any width, by all threads."""
    bytes_written: dict[str, int] = field(default_factory=dict)
    threadgroup_bytes_read: int = 0
    threadgroup_bytes_written: int = 0
    threadgroup_accesses: int = 0
    operations: dict[str, int] = field(default_factory=dict)
    """Collective operation → how often a simdgroup (barriers: a threadgroup) did it."""


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("host", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("element", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("offset", ctypes.c_uint32),
        ("padding", ctypes.c_uint32),
    )


class _Options(ctypes.Structure):
    _fields_ = (
        ("seed", ctypes.c_uint64),
        ("strict", ctypes.c_uint32),
        ("flush_denormals", ctypes.c_uint32),
        ("timeout_ms", ctypes.c_uint32),
        ("races", ctypes.c_uint32),
        ("threadgroup_limit", ctypes.c_uint32),
        ("max_findings", ctypes.c_uint32),
    )


class _OpCount(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char * 40), ("count", ctypes.c_uint64))


class _Result(ctypes.Structure):
    _fields_ = (
        ("status", ctypes.c_int),
        ("threadgroup_bytes", ctypes.c_uint32),
        ("threads", ctypes.c_uint64),
        ("switches", ctypes.c_uint64),
        ("accesses", ctypes.c_uint64),
        ("rendezvous", ctypes.c_uint64),
        ("seconds", ctypes.c_double),
        ("read", ctypes.c_uint64 * _COUNTED_BUFFERS),
        ("written", ctypes.c_uint64 * _COUNTED_BUFFERS),
        ("threadgroup_read", ctypes.c_uint64),
        ("threadgroup_written", ctypes.c_uint64),
        ("loads", ctypes.c_uint64 * _COUNTED_BUFFERS),
        ("threadgroup_loads", ctypes.c_uint64),
        ("threadgroup_stores", ctypes.c_uint64),
        ("operations", _OpCount * _COUNTED_OPS),
        ("report", ctypes.c_char * (1 << 16)),
    )


def dispatch(
    program: Program,
    buffers: Mapping[int, Buffer],
    grid: tuple[int, ...],
    threadgroup: tuple[int, ...],
    options: Options,
    library: ctypes.CDLL | None = None,
) -> tuple[list[Finding], Statistics]:
    """Run one dispatch; `library` replaces the program's checked build."""
    library = library or program.library()
    count = max(buffers) + 1
    native, alive = (_Buffer * count)(), []
    for i, b in buffers.items():
        a = b.array if b.array.size else np.zeros(1, np.uint8)
        alive.append(a)
        element = min(a.itemsize, 4)
        native[i] = _Buffer(b.name.encode(), a.ctypes.data, a.nbytes, element, b.flags, b.offset_bytes, 0)
    native_options = _Options(
        options.seed,
        options.strict,
        options.flush_denormals,
        int(options.timeout_s * 1000),
        options.races,
        THREADGROUP_MEMORY,
        _MAX_FINDINGS,
    )
    result = _Result()
    entry = ctypes.cast(library.mtl_entry, ctypes.c_void_p)
    sizes = [(ctypes.c_uint32 * 3)(*x) for x in (grid, threadgroup)]
    with _one_at_a_time:
        library.mtl_run(entry, native, count, *sizes, ctypes.byref(native_options), ctypes.byref(result))
    return _findings(program, result), _statistics(buffers, result)


def _findings(program: Program, result: _Result) -> list[Finding]:
    """The runtime reports lines of kind, address, other address, text."""
    findings = []
    for report in result.report.decode(errors="replace").splitlines():
        kind, address, other, text = report.split("\t", 3)
        where = ""
        if int(address, 16):
            place = program.line_of(int(address, 16))
            where = program.where(*place)
            quoted = program.line_text(*place) if where else ""
            if int(other, 16):
                where += f" (other access: {program.where(*program.line_of(int(other, 16)))})"
            text += f"   | {quoted}" if quoted else ""
        text = re.sub(r" \(kernel:\d+\)", "", text)
        text = re.sub(r"\(line (\d+)\)", lambda m: f"({program.where('kernel', int(m.group(1)))})", text)
        findings.append(Finding(kind, where, text))
    return findings


def _statistics(buffers: Mapping[int, Buffer], result: _Result) -> Statistics:
    return Statistics(
        seconds=result.seconds,
        num_threads=result.threads,
        num_accesses=result.accesses,
        threadgroup_bytes=result.threadgroup_bytes,
        bytes_read={b.name: result.read[i] for i, b in buffers.items() if result.read[i]},
        loads={b.name: result.loads[i] for i, b in buffers.items() if result.loads[i]},
        bytes_written={b.name: result.written[i] for i, b in buffers.items() if result.written[i]},
        threadgroup_bytes_read=result.threadgroup_read,
        threadgroup_bytes_written=result.threadgroup_written,
        threadgroup_accesses=result.threadgroup_loads + result.threadgroup_stores,
        operations={op.name.decode(): op.count for op in result.operations if op.count},
    )
