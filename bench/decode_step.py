"""Where the time of one decode step goes, ours beside mlx_lm's, over caches of random numbers.

    python -m bench.decode_step [--shape llama-3.1-8b] [--tokens 8192 131072] [--steps 100]

Weights are random 4-bit ones of a real shape. A step asks for the next token before it reads the last one, as
generation does. step_ms: mean of a step; of its parts, means too, build_ms is Python that builds the graph,
eval_ms MLX's encoding of it, wait_ms what is left to wait for the GPU: a step that waits is bound by the GPU.
kernels: on CUDA with PyTorch beside, microseconds and launches of each kernel in a step, by CUPTI; kernels
that run at once count each for itself. Prints tables and one JSON line; the line is kept in
bench/results/decode_step.<device>.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from bench.decode_attention import device_name, random_tiles
from bench.engine import DTYPE, ON_GPU, Peer, take_apart
from bench.kernel_times import kernel_times, profiler
from bench.machine import ROOT, command, commit, result_path
from bench.random_models import SHAPES, make_module
from worker.engine import attention
from worker.engine.decode import forward
from worker.engine.kv_cache import SINK_TOKENS, KVCache, whole_blocks
from worker.engine.products import join_products
from worker.engine.shapes import layer_shapes
from worker.engine.walk import walk

TAIL_TOKENS = 200
WARM_UP = 12
PROFILED = 8


Step = Callable[[mx.array], mx.array]
"""The token (1,) → the next one."""


def run(step: Step, num_steps: int) -> list[tuple[float, float, float]]:
    """Seconds of build, evaluation and wait of each step."""
    token, times = mx.array([1]), []
    for _ in range(num_steps):
        start = time.perf_counter()
        following = step(token)
        built = time.perf_counter()
        mx.async_eval(following)
        asked = time.perf_counter()
        int(np.array(token)[0])
        times.append((built - start, asked - built, time.perf_counter() - asked))
        token = following
    mx.eval(token)
    return times


def ours(module: nn.Module, config: dict[str, Any], num_tokens: int) -> Step:
    """A step over the engine's cache: sinks, blocks and a short tail."""
    model: Any = walk(module, config["model_type"])
    if ON_GPU:
        join_products(model.modules)
    cache = KVCache(layer_shapes(config), DTYPE)
    num_blocks = whole_blocks(num_tokens - TAIL_TOKENS)
    for layer in cache.compressed:
        heads, dim = layer.shape.num_kv_heads, layer.shape.head_dim
        sinks = mx.random.normal((heads, SINK_TOKENS, dim)).astype(DTYPE)
        layer.set_prefix(sinks, sinks, random_tiles(heads, dim, num_blocks, layer.shape.format), num_blocks)
        tail = mx.random.normal((1, heads, TAIL_TOKENS, dim)).astype(DTYPE)
        layer.update_and_fetch(tail, tail)
        mx.eval(layer.arrays())
    return lambda token: mx.argmax(forward(model, cache, token[:, None])[:, -1], axis=-1)


def theirs(module: nn.Module, config: dict[str, Any], num_tokens: int) -> Step:
    """A step over mlx_lm's cache of 16-bit keys and values."""
    take_apart(module)
    cache = Peer(module, None).random_cache(num_tokens, config)
    return lambda token: mx.argmax(module(token[:, None], cache=cache)[:, -1], axis=-1)


def kernels_of(step: Step) -> dict[str, dict[str, float]] | None:
    """Microseconds and launches in a step of each kernel; None where nothing can tell."""
    if profiler() is None:
        return None
    times = kernel_times(lambda: run(step, PROFILED))
    largest = sorted(times.items(), key=lambda item: -sum(item[1]))
    return {name: {"us": sum(t) / PROFILED, "launches": len(t) / PROFILED} for name, t in largest}


def measure(step: Step, num_steps: int) -> dict[str, Any]:
    run(step, WARM_UP)
    times = run(step, num_steps)
    build, evaluation, wait = (statistics.mean(part) * 1e3 for part in zip(*times, strict=True))
    return {
        "step_ms": build + evaluation + wait,
        "median_step_ms": statistics.median(sum(t) for t in times) * 1e3,
        "build_ms": build,
        "eval_ms": evaluation,
        "wait_ms": wait,
        "kernels": kernels_of(step),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 131072])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--commit", default=commit())
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    args = parser.parse_args()
    attention.install()
    config, device = SHAPES[args.shape], device_name()
    module = make_module(config, DTYPE)
    rows = []
    print(
        f"{device}\n  tokens mode   "
        + "".join(f"{name:>10}" for name in ("step ms", "build", "eval", "wait"))
    )
    for num_tokens in args.tokens:
        for mode, make in (("ours", ours), ("mlx_lm", theirs)):
            step = make(module, config, num_tokens)
            mx.clear_cache()
            row = {"num_tokens": num_tokens, "mode": mode, **measure(step, args.steps)}
            rows.append(row)
            parts = "".join(f"{row[name]:10.3f}" for name in ("step_ms", "build_ms", "eval_ms", "wait_ms"))
            print(f"{num_tokens:>8} {mode:7}{parts}", flush=True)
            for name, kernel in list((row["kernels"] or {}).items())[:12]:
                print(f"{'':16}{kernel['us']:10.1f} us {kernel['launches']:6.1f}  {name}", flush=True)
            del step
            mx.clear_cache()
    result = {
        "bench": "decode_step",
        "shape": args.shape,
        "machine": {"device": device, "system": platform.platform()},
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("mlx", "mlx-lm")},
        },
        "command": command("decode_step"),
        "commit": args.commit,
        "rows": rows,
    }
    path = result_path(args.out, "decode_step", device)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
