"""Which launch plan is fastest on this device for a model's shape: timed once, then read from a file.

Owns the choice and the file. What a plan is the backend knows; any plan gives right results, so whatever
goes wrong here leaves the default in use. Of the backends only Metal has plans to choose from: the C++
library takes every core, and CUDA's plans are a table.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx

from kernels import metal
from kernels.cache_view import CacheView
from kernels.dispatch import backend
from kernels.formats import BLOCK_TOKENS, Format
from kernels.metal import Launcher, Plan

log = logging.getLogger("kernels.tuning")

_NUM_BLOCKS = (256, 16)
"""A long and a short context: 32K and 2K tokens."""
_BATCHES = (1, 8)
_NUM_ENDS = 64
"""Tokens of the sinks and of a tail."""
_CALLS, _CHAINS = 8, 3

P = TypeVar("P")


@dataclass(frozen=True)
class Shape:
    """What a model asks of decode attention."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    format: Format = "int4c"


def tune(shape: Shape, folder: Path, budget_s: float = 5.0) -> None:
    """Let this device's kernels use the plan that is fastest for a model's shape.

    The first call for a device, an MLX version, the kernels' source and a shape times every plan; later ones,
    in any process, read what it found. Without a result (the budget ran out, nothing runs) the default stays
    and the next call tries again; a result that the folder doesn't take serves this process. Raises nothing.

    Args:
        folder: where results are kept, one small JSON file each.
        budget_s: no plan is begun later than this, compilation included.
    """
    if backend(shape.format) is not metal:
        return
    began = time.perf_counter()
    launcher = metal.launcher()
    default = launcher.plan
    identity = _identity(shape)
    path = folder / f"metal-{hashlib.sha256(repr(identity).encode()).hexdigest()[:16]}.json"
    best = read(path, identity)
    if best is None:
        try:
            cases = make_cases(launcher, shape, _NUM_BLOCKS, _BATCHES)
            left_s = budget_s - (time.perf_counter() - began)
            best = fastest(Plan.candidates(), lambda plan: time_plan(launcher, cases, plan), left_s)
        except Exception:  # a start must not fail for a plan that is only slower
            log.exception("no launch plan could be timed")
        if best is not None:
            write(path, identity, best)
            log.info("fastest launch plan for %s: %s", shape, best)
    launcher.plan = best or default


def fastest(
    candidates: Sequence[P],
    time_of: Callable[[P], float],
    budget_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> P | None:
    """The candidate with the smallest time; one that raises is left out.

    None if the budget ran out before all were timed, or none could be.
    """
    began = clock()
    times: list[tuple[float, int]] = []
    for i, candidate in enumerate(candidates):
        if clock() - began > budget_s:
            log.warning("%d of %d launch plans were timed within %.1f s", i, len(candidates), budget_s)
            return None
        try:
            times.append((time_of(candidate), i))
        except Exception:  # whatever a kernel raises: the other candidates may run
            log.exception("launch plan %s could not be timed", candidate)
    return candidates[min(times)[1]] if times else None


Case = tuple[mx.array, CacheView]


def make_cases(
    launcher: Launcher, shape: Shape, num_blocks: Sequence[int], batches: Sequence[int]
) -> list[Case]:
    """Random queries and caches, one for every length and number of rows, evaluated."""
    heads, dim = shape.num_kv_heads, shape.head_dim

    def dense(*leading: int) -> mx.array:
        return mx.random.normal((*leading, dim)).astype(mx.float16)

    few = dense(heads, BLOCK_TOKENS), dense(heads, BLOCK_TOKENS)
    block = launcher.encode(*few, shape.format)
    cases = []
    for n in num_blocks:
        tiles = mx.contiguous(mx.broadcast_to(block, (n, *block.shape[1:])))
        sinks = dense(heads, _NUM_ENDS)
        for batch in batches:
            tail = dense(batch, heads, _NUM_ENDS)
            view = CacheView(sinks, sinks, tiles, n, tail, tail, format=shape.format)
            q = dense(batch, shape.num_q_heads, 1)
            mx.eval(q, tiles, sinks, tail)
            cases.append((q, view))
    return cases


def time_plan(launcher: Launcher, cases: Sequence[Case], plan: Plan) -> float:
    """The geometric mean of seconds per call over the cases: in each, the best of a few chains of calls."""
    launcher.plan = plan
    logs = []
    for q, view in cases:
        scale = view.sinks_k.shape[-1] ** -0.5

        def chain(calls: int, q: mx.array = q, view: CacheView = view, scale: float = scale) -> float:
            began = time.perf_counter()
            for _ in range(calls):
                q = launcher.decode_attention(q, view, scale)
            mx.eval(q)
            return (time.perf_counter() - began) / calls

        chain(1)  # compiles
        logs.append(math.log(min(chain(_CALLS) for _ in range(_CHAINS))))
    return math.exp(sum(logs) / len(logs))


def read(path: Path, identity: dict[str, Any]) -> Plan | None:
    """The plan that was found for this identity; None if there is none or the file isn't what was written."""
    try:
        record = json.loads(path.read_bytes())
        if {name: record[name] for name in identity} != identity:
            return None
        return next((plan for plan in Plan.candidates() if asdict(plan) == record["plan"]), None)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s is damaged, plans are timed again: %s", path, error)
        return None


def write(path: Path, identity: dict[str, Any], plan: Plan) -> None:
    """Keep a plan, whole or not at all."""
    text = json.dumps(identity | {"plan": asdict(plan)}, indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as part:
            part.write(text)
        os.replace(part.name, path)
    except OSError as error:
        log.warning("the fastest launch plan can't be kept in %s: %s", path.parent, error)


def _identity(shape: Shape) -> dict[str, Any]:
    """What a result holds for."""
    info = mx.device_info()
    return {
        "device": f"{info.get('device_name')} {info.get('architecture')}",
        "mlx": metadata.version("mlx"),
        "kernels": metal.source_digest(),
        "shape": asdict(shape),
    }
