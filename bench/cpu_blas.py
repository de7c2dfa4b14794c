"""What OpenBLAS and dense weights change for MLX on a Linux CPU: products, prefill, decode, and the rest.

    python -m bench.cpu_blas [--model MODEL] [--tokens 2048] [--limit-s 30]

Each row is a process of its own, since what is loaded before MLX cannot be taken back. A prefill that
passes --limit-s stops at the next chunk and its rate is that of the tokens it had read. Prints tables and
one JSON line; the line is kept in bench/results/cpu_blas.<device>.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

from bench.machine import ROOT, command, cpu_name, git

KERNEL_CHOICE = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")

# name, shim, dense, chunk, environment changes (None unsets)
ROWS: list[tuple[str, bool, bool, int, dict[str, str | None]]] = [
    ("quantised, reference BLAS", False, False, 256, {}),
    ("quantised, OpenBLAS", True, False, 256, {}),
    ("dense, reference BLAS", False, True, 256, {}),
    ("dense, OpenBLAS, chunk 256", True, True, 256, {}),
    ("dense, OpenBLAS, chunk 512", True, True, 512, {}),
    ("dense, OpenBLAS, chunk 1024", True, True, 1024, {}),
    ("dense, OpenBLAS, chunk 2048", True, True, 2048, {}),
    ("  one thread", True, True, 512, {"OPENBLAS_NUM_THREADS": "1"}),
    ("  no mx.compile", True, True, 512, {"MLX_DISABLE_COMPILE": "1"}),
]
UNSET: dict[str, str | None] = dict.fromkeys(KERNEL_CHOICE)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cpu_blas", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--limit-s", type=float, default=30.0)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        print(json.dumps(measure(options, **json.loads(options.row))))
        return

    rows = list(ROWS)
    if any(name in os.environ for name in KERNEL_CHOICE):
        unset = "  as OpenBLAS detects the CPU"
        rows += [
            (unset, True, True, 512, UNSET),
            (f"{unset}, one thread", True, True, 512, UNSET | {"OPENBLAS_NUM_THREADS": "1"}),
        ]
    results = []
    head = ("GFLOP/s", "prefill t/s", "of tokens", "decode t/s", "kernel", "load")
    print(f"{'':44} " + " ".join(f"{name:>11}" for name in head))
    for name, shim, dense, chunk, changes in rows:
        row = json.dumps({"shim": shim, "dense": dense, "chunk": chunk})
        environment = {key: value for key, value in (os.environ | changes).items() if value is not None}
        call = [sys.executable, "-m", "bench.cpu_blas", "--row", row, "--model", options.model]
        call += ["--tokens", str(options.tokens), "--limit-s", str(options.limit_s)]
        load = os.getloadavg()[0]
        done = subprocess.run(call, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        result = {"name": name.strip(), "environment": changes} | json.loads(done.stdout.splitlines()[-1])
        result["load"] = load  # of the machine before the row: above 0.3 or so the others disturb it
        results.append(result)
        print(
            f"{name:44} {result['matmul_gflops']:11.0f} {result['prefill_tokens_per_s']:11.1f} "
            f"{result['num_tokens']:11} {result['decode_tokens_per_s']:11.1f} "
            f"{result['kernel']:>11} {load:11.1f}",
            flush=True,
        )
    parts = {row["chunk"]: row["parts_s"] for row in results if row["name"].startswith("dense, OpenBLAS")}
    names = list(next(iter(parts.values())))
    print(
        f"\nseconds of {options.tokens} tokens by part\n{'chunk':>8} "
        + " ".join(f"{name:>12}" for name in names)
    )
    for chunk, seconds in parts.items():
        print(f"{chunk:8} " + " ".join(f"{seconds[name]:12.2f}" for name in names))
    line = json.dumps(
        {
            "bench": "cpu_blas",
            "machine": {"cpu": cpu_name(), "num_cores": len(os.sched_getaffinity(0))},
            "versions": {
                name: metadata.version(name) for name in ("mlx", "mlx-lm", "scipy-openblas32", "numpy")
            },
            "python": platform.python_version(),
            "environment": {name: os.environ.get(name) for name in (*KERNEL_CHOICE, "OPENBLAS_NUM_THREADS")},
            "command": command("cpu_blas"),
            "commit": git("describe", "--always", "--dirty", "--abbrev=12"),
            "model": options.model,
            "rows": results,
        }
    )
    print(f"\n{line}")
    folder = ROOT / "bench" / "results"
    folder.mkdir(exist_ok=True)
    device = re.sub(r"[^a-z0-9]+", "-", f"{cpu_name()}-{len(os.sched_getaffinity(0))}c".lower()).strip("-")
    (folder / f"cpu_blas.{device}.json").write_text(line + "\n", encoding="utf-8")


def measure(options: argparse.Namespace, shim: bool, dense: bool, chunk: int) -> dict[str, Any]:
    """One row, in a process that has not loaded MLX yet."""
    from worker import accelerate

    in_force = shim and accelerate.prepare_cpu()
    import mlx.core as mx
    from mlx_lm import load
    from mlx_lm.models.cache import make_prompt_cache

    from worker.dense import dequantize_weights
    from worker.models import default_models_dir, ensure

    gflops = matmul_gflops()
    model = load(str(ensure(options.model, default_models_dir())))[0]
    if dense:
        dequantize_weights(model)
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    mx.random.seed(0)
    ids = mx.random.randint(0, 40_000, (1, options.tokens))
    mx.eval(model.model(ids[:, :16]))  # whatever is compiled at first use

    best, cpu_s, num_tokens, spent, cache = 0.0, 0.0, 0, 0.0, []
    while spent < options.limit_s / 3:  # the best of as many whole prefills as fit
        cache = make_prompt_cache(model)
        start, cpu_start = time.perf_counter(), time.process_time()
        for first in range(0, options.tokens, chunk):
            model.model(ids[:, first : first + chunk], cache=cache)
            mx.eval([layer.state for layer in cache])
            taken = time.perf_counter() - start
            num_tokens = min(first + chunk, options.tokens)
            if taken > options.limit_s:
                break
        spent += taken
        if num_tokens / taken > best:
            best, cpu_s = num_tokens / taken, time.process_time() - cpu_start

    steps = []
    for step in range(24):
        start = time.perf_counter()
        mx.eval(mx.argmax(model(ids[:, step : step + 1], cache=cache)[:, -1]))
        steps.append(time.perf_counter() - start)
    num_products = accelerate.num_products()
    return {
        "shim": in_force,
        "dense": dense,
        "chunk": chunk,
        "matmul_gflops": gflops,
        "prefill_tokens_per_s": best,
        "prefill_cpu_s": cpu_s,
        "num_tokens": num_tokens,
        "decode_tokens_per_s": 1 / sorted(steps)[len(steps) // 2],
        "num_products": num_products,
        "kernel": kernel() if in_force else "reference",
        "parts_s": parts(model.args, options.tokens, chunk) if in_force and dense else None,
    }


def matmul_gflops(size: int = 1024) -> float:
    import mlx.core as mx

    a, b = mx.random.normal((size, size)), mx.random.normal((size, size))
    mx.eval(a, b)
    return 2 * size**3 / best_of(lambda: a @ b) / 1e9


def parts(args: Any, num_tokens: int, chunk: int) -> dict[str, float]:
    """Seconds of each part of all layers over a whole prefill, measured one layer and one part at a time."""
    import mlx.core as mx
    from mlx_lm.models.activations import swiglu

    hidden, inner = args.hidden_size, args.intermediate_size
    heads, kv_heads = args.num_attention_heads, args.num_key_value_heads
    dim = args.head_dim or hidden // heads
    rows = min(chunk, num_tokens)
    x, gate, wide = (
        mx.random.normal((rows, hidden)),
        mx.random.normal((rows, inner)),
        mx.random.normal((inner, hidden)),
    )
    qkv = mx.random.normal(((heads + 2 * kv_heads) * dim, hidden))
    q = mx.random.normal((1, heads, rows, dim))
    grouped = q.reshape(1, kv_heads, heads // kv_heads, rows, dim)
    mx.eval(x, gate, wide, qkv, q, grouped)
    num_chunks = -(-num_tokens // rows)
    per_chunk = {
        "projections": best_of(
            lambda: (x @ qkv.T, x @ qkv[: heads * dim].T, x @ wide.T, x @ wide.T, gate @ wide)
        ),
        "rms_norm": 2 * best_of(lambda: mx.fast.rms_norm(x, x[0], 1e-5)),
        "rope": best_of(
            lambda: (rope(mx, q, args), rope(mx, q[:, :kv_heads], args)),
        ),
        "swiglu": best_of(lambda: swiglu(gate, gate)),
        "residual": 2 * best_of(lambda: x + x),
    }
    seconds = {name: value * num_chunks * args.num_hidden_layers for name, value in per_chunk.items()}
    seconds |= {"qk_pv": 0.0, "softmax": 0.0, "sdpa_rest": 0.0}
    for length in range(rows, num_tokens + 1, rows):
        k = mx.random.normal((1, kv_heads, length, dim))
        scores = mx.random.normal((1, kv_heads, heads // kv_heads, rows, length))
        mx.eval(k, scores)
        shared = k[:, :, None]
        products = best_of(lambda s=shared, p=scores: (grouped @ s.swapaxes(-1, -2), p @ s))
        softmax = best_of(lambda p=scores: mx.softmax(p, axis=-1))
        whole = best_of(lambda k=k: mx.fast.scaled_dot_product_attention(q, k, k, scale=1.0, mask="causal"))
        seconds["qk_pv"] += products * args.num_hidden_layers
        seconds["softmax"] += softmax * args.num_hidden_layers
        seconds["sdpa_rest"] += (whole - products - softmax) * args.num_hidden_layers
    return seconds


def rope(mx: Any, x: Any, args: Any) -> Any:
    return mx.fast.rope(
        x, x.shape[-1], traditional=args.rope_traditional, base=args.rope_theta, scale=1.0, offset=0
    )


def best_of(make: Callable[[], Any], num: int = 2) -> float:
    import mlx.core as mx

    best = float("inf")
    for _ in range(num):
        start = time.perf_counter()
        mx.eval(make())
        best = min(best, time.perf_counter() - start)
    return best


def kernel() -> str:
    """The kernel set that OpenBLAS chose for this CPU."""
    import ctypes

    from worker.accelerate import _openblas

    name = ctypes.CDLL(str(_openblas())).scipy_openblas_get_corename
    name.restype = ctypes.c_char_p
    return name().decode()


if __name__ == "__main__":
    main()
