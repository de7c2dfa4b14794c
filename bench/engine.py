"""Whole models of real shapes: prefill, decode, memory and snapshots, beside mlx_lm's two caches.

    python -m bench.engine [--shape llama-3.1-8b] [--tokens 8192 32768 131072] [--limit-s 120]

Weights are random 4-bit ones (bench/random_models.py) and so are the tokens: speed and memory don't depend
on them. Modes: `ours`; `mlx_lm_fp16`, mlx_lm's generation as it is; `mlx_lm_kv4`, the same with kv_bits=4
from the first token. prefill_tokens_s: prompt tokens by the seconds to the first token. decode_tokens_s:
the tokens that follow by the seconds they took together; median_pace_tokens_s: by the median of each one's
seconds. peak_bytes: of prefill and decode together, weights included, where planned_bytes is what the
planner predicts. A prefill that would pass --limit-s if time grew with the square of the length before it is
left out, and decode runs over a cache of random numbers. So is every one of a mode in which MLX had no
product for one (refused): it may work for minutes before it comes to that. On CUDA, MLX has products for a
quantised cache only where its buffers are full, so the token that fills them is decoded again and again
(decode_repeated). Ours also saves the prefix, restores it and compares the next token's logits with those of
the cache that was saved; encode_share is what encoding all layers takes of the seconds to the first token.
Prints a table and one JSON line; the line is kept in bench/results/engine.<device>.json. Rows may be measured
one by one: those of one `run` (when it began) stood side by side, and others stay until measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib import metadata
from math import inf
from pathlib import Path
from re import fullmatch
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from bench.decode_attention import device_name
from bench.machine import ROOT, command, commit, result_path
from bench.random_models import SHAPES, make_module
from cache_store import SnapshotStore
from jobs import ModelCard
from kernels import BLOCK_TOKENS, encode
from worker.engine import attention, snapshots
from worker.engine.decode import forward
from worker.engine.kv_cache import KVCache, blocks_end, whole_blocks
from worker.engine.model import Model
from worker.engine.planner import plan
from worker.engine.prefill import prefill_prefix, prefill_suffix
from worker.engine.products import join_products
from worker.engine.report import Silent
from worker.engine.shapes import layer_shapes
from worker.engine.walk import walk

SUFFIX_TOKENS = 128
ON_GPU = mx.default_device() == mx.Device(mx.gpu)
DTYPE = mx.bfloat16 if ON_GPU else mx.float32
MODES = ("ours", "mlx_lm_fp16", "mlx_lm_kv4")
Row = dict[str, Any]


class Peer:
    """mlx_lm's own generation."""

    def __init__(self, module: nn.Module, kv_bits: int | None) -> None:
        self._module, self._kv_bits = module, kv_bits

    def run(self, tokens: mx.array, num_output: int) -> tuple[float, list[float], int]:
        """Seconds to the first token, seconds of each further one, bytes of KV."""
        cache = self._make_cache()
        return *self._timed(tokens, num_output, cache), kv_bytes(cache)

    def decode_alone(
        self, num_tokens: int, config: dict[str, Any], num_output: int
    ) -> tuple[list[float], int]:
        """As `run`, over a cache of random numbers."""
        cache = self.random_cache(num_tokens, config)
        _, paces = self._timed(mx.array([1]), num_output, cache)
        return paces, kv_bytes(cache)

    def decode_repeated(
        self, num_tokens: int, config: dict[str, Any], num_output: int
    ) -> tuple[list[float], int]:
        """As `decode_alone`, the same token each time, so that the cache keeps its length."""
        cache = self.random_cache(num_tokens, config)
        ahead: mx.array | None = None
        at = []
        for _ in range(num_output + 2):
            following = mx.argmax(self._module(mx.array([[1]]), cache=cache)[:, -1], axis=-1)
            mx.async_eval(following)
            if ahead is not None:
                mx.eval(ahead)
                at.append(time.perf_counter())
            ahead = following
            for layer in cache:
                layer.trim(1)
        return np.diff(at).tolist(), kv_bytes(cache)

    def random_cache(self, num_tokens: int, config: dict[str, Any]) -> list[Any]:
        """One token short of `num_tokens`."""
        cache = self._make_cache()
        shapes = [shape for shape in layer_shapes(config) if shape.source is None]
        for i, (layer, shape) in enumerate(zip(cache, shapes, strict=True)):
            size = (1, shape.num_kv_heads, num_tokens - 1, shape.head_dim)
            k, v = (mx.random.normal(size).astype(DTYPE) for _ in "kv")
            layer.update_and_fetch(k, v)
            if self._kv_bits:
                cache[i] = layer.to_quantized(group_size=64, bits=self._kv_bits)
            mx.eval(cache[i].state)
        mx.clear_cache()
        return cache

    def _make_cache(self) -> list[Any]:
        from mlx_lm.models.cache import make_prompt_cache

        made: list[Any] = make_prompt_cache(self._module)
        return made

    def _timed(self, tokens: mx.array, num_output: int, cache: list[Any]) -> tuple[float, list[float]]:
        from mlx_lm.generate import generate_step

        start = time.perf_counter()
        steps = generate_step(
            tokens,
            self._module,
            max_tokens=num_output + 1,
            prompt_cache=cache,
            kv_bits=self._kv_bits,
            quantized_kv_start=0,
        )
        at = list(arrivals(int(token) for token, _ in steps))
        return at[0] - start, np.diff(at).tolist()


class Ours:
    """The engine's phases as engine.py has them, without a tokenizer."""

    def __init__(self, module: nn.Module, config: dict[str, Any]) -> None:
        parts = walk(module, config["model_type"])
        if ON_GPU:
            join_products(parts.modules)
        card = ModelCard.model_construct(id="bench")
        self._model = Model(
            **vars(parts),
            shapes=layer_shapes(config),
            tokenizer=None,
            eos_token_ids=frozenset(),
            card=card,
            config=config,
            folder=Path(),
            prompts=None,  # type: ignore[arg-type]
        )

    def run(self, tokens: mx.array, num_output: int) -> tuple[float, list[float], KVCache]:
        start = time.perf_counter()
        ids = np.array(tokens, dtype=np.uint32)
        end = blocks_end(whole_blocks(len(ids) - SUFFIX_TOKENS))
        cache = self._model.new_cache()
        prefill_prefix(self._model, cache, ids[:end], 1, Silent())
        logits = prefill_suffix(self._model, cache, ids[end:], 0, Silent())
        token = mx.argmax(logits, axis=-1)
        at = list(arrivals(self._greedy(cache, token, num_output + 1)))
        return at[0] - start, np.diff(at).tolist(), cache

    def _greedy(self, cache: KVCache, token: mx.array, num_output: int) -> Iterator[int]:
        for _ in range(num_output):
            following = mx.argmax(forward(self._model, cache, token[:, None])[:, -1], axis=-1)
            mx.async_eval(following)
            yield int(np.array(token)[0])
            token = following
        mx.eval(token)

    def snapshot(self, tokens: mx.array, cache: KVCache, folder: Path) -> Row:
        """Save the prefix, restore it, and compare."""
        ids = np.array(tokens, dtype=np.uint32)
        prefix = snapshots.Prefix("bench", ids[: blocks_end(whole_blocks(len(ids) - SUFFIX_TOKENS))])
        store = SnapshotStore(folder, 1 << 50, 0)
        cache.rewind(prefix.num_blocks)
        before = self._next(cache)
        cache.rewind(prefix.num_blocks)
        save_s = timed(lambda: snapshots.save(store, prefix, cache, 0, True, "bench"))
        restored = self._model.new_cache()
        restore_s = timed(lambda: snapshots.restore(store, prefix, prefix.num_blocks, restored, 1, Silent()))
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        return {
            "snapshot_bytes": size,
            "save_s": save_s,
            "restore_s": restore_s,
            "restored_equal": bool(mx.array_equal(before, self._next(restored))),
        }

    def _next(self, cache: KVCache) -> mx.array:
        logits = forward(self._model, cache, mx.array([[1]]))
        mx.eval(logits)
        return logits


def take_apart(module: nn.Module) -> None:
    """Let every product be mlx_lm's own again."""
    for _, part in module.named_modules():
        if isinstance(part, nn.QuantizedLinear):
            part.__class__ = nn.QuantizedLinear
            vars(part).pop("group", None)  # or the next group would hold on to this one's weights


def arrivals(tokens: Iterator[int]) -> Iterator[float]:
    for _ in tokens:
        yield time.perf_counter()


def kv_bytes(cache: list[Any]) -> int:
    return int(sum(layer.nbytes for layer in cache))


def encode_s(config: dict[str, Any], num_tokens: int) -> float:
    """Seconds to encode so many tokens in every layer that has blocks."""
    shapes = [s for s in layer_shapes(config) if s.source is None and s.window is None]
    num_tokens -= num_tokens % BLOCK_TOKENS
    seconds = 0.0
    for shape in set(shapes):
        k = mx.random.normal((shape.num_kv_heads, num_tokens, shape.head_dim)).astype(DTYPE)
        mx.eval(k, encode(k[:, :BLOCK_TOKENS], k[:, :BLOCK_TOKENS], shape.format))
        once = timed(lambda k=k, shape=shape: mx.eval(encode(k, k, shape.format)))
        seconds += shapes.count(shape) * once
    return seconds


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(
    module: nn.Module, config: dict[str, Any], num_tokens: int, mode: str, num_output: int, prefill: bool
) -> Row:
    tokens = mx.random.randint(0, config["vocab_size"], (num_tokens,), key=mx.random.key(num_tokens))
    mx.eval(tokens)
    mx.clear_cache()
    mx.reset_peak_memory()
    first_s: float | None = None
    more: Row = {}
    if mode == "ours":
        ours = Ours(module, config)
        first_s, paces, cache = ours.run(tokens, num_output)
        size = sum(array.nbytes for array in cache.arrays())
        more["planned_bytes"] = plan(
            config, num_tokens, SUFFIX_TOKENS, num_output, on_cuda=mx.cuda.is_available()
        ).total_bytes
        more["peak_bytes"] = mx.get_peak_memory()
        more["encode_share"] = encode_s(config, num_tokens) / first_s
        with tempfile.TemporaryDirectory() as folder:
            more |= ours.snapshot(tokens, cache, Path(folder))
    else:
        take_apart(module)
        peer = Peer(module, 4 if mode == "mlx_lm_kv4" else None)
        ways: dict[str, Callable[[], tuple[float | None, list[float], int]]] = {
            "prefill": lambda: peer.run(tokens, num_output),
            "alone": lambda: (None, *peer.decode_alone(num_tokens, config, num_output)),
            "repeated": lambda: (None, *peer.decode_repeated(num_tokens, config, num_output)),
        }
        if not prefill:
            del ways["prefill"]
        paces, size = [], None
        more["refused"], more["decode_repeated"] = None, False
        for way, run in ways.items():
            try:
                first_s, paces, size = run()
                more["decode_repeated"] = way == "repeated"
                break
            except RuntimeError as error:
                more["refused"] = str(error)
                mx.clear_cache()
        more["peak_bytes"] = mx.get_peak_memory() if first_s else None
    return {
        "num_tokens": num_tokens,
        "mode": mode,
        "prefill_s": first_s,
        "prefill_tokens_s": num_tokens / first_s if first_s else None,
        "decode_tokens_s": len(paces) / sum(paces) if paces else None,
        "median_pace_tokens_s": 1 / statistics.median(paces) if paces else None,
        "kv_bytes": size,
        **more,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=["llama-3.1-8b"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--limit-s", type=float, default=120.0, help="the longest prefill to wait for")
    parser.add_argument("--commit", default=commit())
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    args = parser.parse_args()
    attention.install()
    device, began = device_name(), datetime.now(UTC).isoformat(timespec="seconds")
    result: dict[str, Any] = {
        "bench": "engine",
        "machine": {"device": device, "system": platform.platform()},
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("mlx", "mlx-lm")},
        },
        "environment": {
            name: value for name, value in os.environ.items() if fullmatch("MLX_.*(?<!_DIR)", name)
        },
        "rows": [],
    }
    path = result_path(args.out, "engine", device)
    if path.exists():
        kept = json.loads(path.read_text())
        result = kept | result | {"rows": kept["rows"]}  # notes too
    label = {"run": began, "commit": args.commit, "command": command("engine")}
    print(device)
    print(
        f"{'shape':14}{'tokens':>8} {'mode':12}{'prefill t/s':>12}{'decode t/s':>11}"
        f"{'KV GB':>8}{'peak GB':>9}"
    )
    for name in args.shape:
        config = SHAPES[name]
        start = time.perf_counter()
        module = make_module(config, DTYPE)
        print(f"{name}: made in {time.perf_counter() - start:.0f} s", flush=True)
        for mode in args.modes:
            measure(module, config, 1024, mode, 4, True)  # whatever is compiled at first use
        growth = dict.fromkeys(MODES, 0.0)  # seconds per squared token, of the last prefill; inf if refused
        for num_tokens in args.tokens:
            for mode in args.modes:
                short = growth[mode] * num_tokens**2 < args.limit_s
                row = measure(module, config, num_tokens, mode, args.output_tokens, short)
                if row["prefill_s"]:
                    growth[mode] = row["prefill_s"] / num_tokens**2
                elif short:
                    growth[mode] = inf
                result["rows"] = merged(result["rows"], {**label, "shape": name, **row})
                path.write_text(json.dumps(result, indent=1) + "\n")
                print(cells(name, row), flush=True)
        del module
        mx.clear_cache()
    print(json.dumps(result))


def merged(rows: list[Row], new: Row) -> list[Row]:
    """The rows, sorted, with a new one in the place of the one that it repeats."""

    def key(row: Row) -> tuple[str, int, int]:
        return row["shape"], row["num_tokens"], MODES.index(row["mode"])

    return sorted([*(row for row in rows if key(row) != key(new)), new], key=key)


def cells(name: str, row: Row) -> str:
    def cell(name: str, unit: float, digits: int) -> str:
        return "-" if row[name] is None else f"{row[name] / unit:.{digits}f}"

    extra = ""
    if "save_s" in row:
        extra = (
            f"  planned {row['planned_bytes'] / 1e9:.2f} GB, encode {row['encode_share']:.1%}, "
            f"save {row['save_s']:.1f} s, restore {row['restore_s']:.2f} s, equal {row['restored_equal']}"
        )
    return (
        f"{name:14}{row['num_tokens']:>8} {row['mode']:12}{cell('prefill_tokens_s', 1, 0):>12}"
        f"{cell('decode_tokens_s', 1, 1):>11}{cell('kv_bytes', 1e9, 2):>8}"
        f"{cell('peak_bytes', 1e9, 2):>9}{extra}"
    )


if __name__ == "__main__":
    main()
