"""Prefill attention on a CPU: MLX's own against the C++ kernel, alone and in a whole prefill.

    python -m bench.prefill_attention [--model MODEL] [--tokens 2048] [--repeats 3]

The two take turns, so that whatever else the machine does falls on both; times are medians. Prints
tables and one JSON line; the line is kept in bench/results/prefill_attention.cpu.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

from bench.machine import ROOT, command, cpu_name, git
from worker import accelerate

SHAPES = {"SmolLM2-135M": (9, 3, 64), "32/8 heads": (32, 8, 128)}
NUM_QUERIES = (256, 512)
NUM_TOKENS = (512, 1024, 2048, 4096, 8192)
CHUNKS = (256, 512, 1024, 2048)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.prefill_attention", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=2048, help="rounded down to whole blocks")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    in_force = accelerate.prepare_cpu()  # before MLX is loaded

    from kernels import cpu

    library = cpu.library()
    if library is None:
        sys.exit("the C++ kernels could not be built: there is nothing to compare")
    load = os.getloadavg()[0]
    attention = measure_attention(options.repeats)
    prefill = measure_prefill(options.model, options.tokens, options.repeats)
    line = json.dumps(
        {
            "bench": "prefill_attention",
            "machine": {"cpu": cpu_name(), "num_cores": len(os.sched_getaffinity(0))},
            "versions": {
                name: metadata.version(name) for name in ("mlx", "mlx-lm", "scipy-openblas32", "numpy")
            },
            "python": platform.python_version(),
            "openblas": in_force,
            "openblas_threads": os.environ.get("OPENBLAS_NUM_THREADS"),
            "kernel": {"instruction_set": library.isa, "threads": library.threads},
            "load": load,  # of the machine before the run
            "command": command("prefill_attention"),
            "commit": git("describe", "--always", "--dirty", "--abbrev=12"),
            "attention": attention,
            "prefill": prefill,
        }
    )
    print(f"\n{line}")
    (ROOT / "bench" / "results" / "prefill_attention.cpu.json").write_text(line + "\n", encoding="utf-8")


def measure_attention(repeats: int) -> list[dict[str, Any]]:
    import mlx.core as mx

    from kernels import prefill_attention

    rows = []
    print(f"{'':14}{'Sq':>6}{'T':>7}{'MLX ms':>10}{'ours ms':>10}{'times':>8}{'GFLOP/s':>9}{'apart':>10}")
    for name, (num_q_heads, num_kv_heads, head_dim) in SHAPES.items():
        for num_queries in NUM_QUERIES:
            for num_tokens in NUM_TOKENS:
                mx.random.seed(0)
                q = mx.random.normal((1, num_q_heads, num_queries, head_dim))
                k, v = (mx.random.normal((1, num_kv_heads, num_tokens, head_dim)) for _ in "kv")
                mx.eval(q, k, v)
                scale = head_dim**-0.5

                def theirs(q: Any = q, k: Any = k, v: Any = v, scale: float = scale) -> Any:
                    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask="causal")

                def ours(q: Any = q, k: Any = k, v: Any = v, scale: float = scale) -> Any:
                    return prefill_attention(q, k, v, scale)

                apart = float(mx.abs(theirs() - ours()).max())
                mlx_s, ours_s = alternate([lambda f=f: mx.eval(f()) for f in (theirs, ours)], repeats)
                flop = 4 * num_q_heads * head_dim * num_queries * (num_tokens - (num_queries - 1) / 2)
                rows.append(
                    {
                        "shape": [num_q_heads, num_kv_heads, head_dim],
                        "num_queries": num_queries,
                        "num_tokens": num_tokens,
                        "mlx_s": mlx_s,
                        "ours_s": ours_s,
                        "ours_gflops": flop / ours_s / 1e9,
                        "largest_difference": apart,
                    }
                )
                print(
                    f"{name:14}{num_queries:6}{num_tokens:7}{mlx_s * 1e3:10.1f}{ours_s * 1e3:10.2f}"
                    f"{mlx_s / ours_s:8.1f}{flop / ours_s / 1e9:9.0f}{apart:10.1e}",
                    flush=True,
                )
    return rows


def measure_prefill(model_id: str, num_tokens: int, repeats: int) -> list[dict[str, Any]]:
    """The first stage of the engine, as it is and with MLX's attention in its place."""
    import mlx.core as mx
    import numpy as np

    from kernels import prefill_attention
    from worker.engine import kv_cache, prefill
    from worker.engine.model import load
    from worker.engine.report import Silent
    from worker.models import default_models_dir, ensure

    model = load(ensure(model_id, default_models_dir()), model_id)
    num_tokens = kv_cache.blocks_end(kv_cache.whole_blocks(num_tokens))
    tokens = np.random.default_rng(0).integers(0, 40_000, num_tokens).astype(np.uint32)

    def theirs(q: mx.array, k: mx.array, v: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask="causal", sinks=sinks)

    def once(attend: Callable[..., mx.array], chunk: int, upto: int = num_tokens) -> None:
        kv_cache.prefill_attention = attend  # type: ignore[attr-defined]
        prefill.CPU_CHUNK_TOKENS = chunk
        cache = model.new_cache()
        prefill.prefill_prefix(model, cache, tokens[:upto], 1, Silent())

    once(prefill_attention, 256, kv_cache.blocks_end(1))  # whatever is made at first use
    runs = [("MLX", theirs, 256), *(("ours", prefill_attention, chunk) for chunk in CHUNKS)]
    times = alternate([lambda a=attend, c=chunk: once(a, c) for _, attend, chunk in runs], repeats)
    rows = []
    print(f"\nprefill of {num_tokens} tokens, {model_id}\n{'attention':12}{'chunk':>6}{'s':>8}{'t/s':>8}")
    for (name, _, chunk), seconds in zip(runs, times, strict=True):
        rows.append({"attention": name.lower(), "chunk": chunk, "num_tokens": num_tokens, "seconds": seconds})
        print(f"{name:12}{chunk:6}{seconds:8.2f}{num_tokens / seconds:8.0f}")
    return rows


def alternate(calls: list[Callable[[], Any]], repeats: int) -> list[float]:
    """The median seconds of each call; they take turns."""
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, seconds in zip(calls, taken, strict=True):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds) for seconds in taken]


if __name__ == "__main__":
    main()
