"""What each KV format costs in answer quality: a model against itself with exact keys and values.

    python -m bench.quality MODEL_FOLDER --text BOOK --text BOOK [--prefix-tokens 768 2048] [--windows 2]

Windows of each text, at seeded places, pass through the model teacher-forced. Every token of a window's
suffix is scored: KL(exact || quantised) over the whole vocabulary in nats (mean and 99th percentile),
flip_rate (how often the most likely token is another), perplexity and how far it is from the exact one.

setting     deployment  a prefix in the cache and a suffix over it, as a job has document and question:
                        sinks and tail dense
            stress      every token quantised, the suffix's own included, no dense ends
prefill     layer-major the prefix computed exactly and then encoded: the engine's own code
            chunk-major every chunk attends to what is quantised already, itself included
            generate    mlx_lm.generate with quantized_kv_start=0: exact for its first step of 2048 tokens
restored    the blocks went through a snapshot on disk; restored_difference is the largest difference of
            any logit from the cold run's

`by layer` is the model as the engine loads it, some of its layers in k8v4 and the others in int4c.
`mlx-lm 4-bit` is what mlx_lm's QuantizedKVCache keeps (kv_bits=4, groups of 64), from token 0 on. bits:
per element of K and V over prefix and suffix, with scales, means, sinks and tail, dense ones at 16; of the
layers that see everything. Layers that see a window are dense in every run; mlx_lm cannot quantise them.

Prints a table and one JSON line; the line is kept in bench/results/quality.<model>.<longest prefix>.json,
and a plot of that prefix beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.machine import ROOT, command, cpu_name, git
from worker import accelerate

accelerate.prepare_cpu()  # before MLX is loaded

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

from bench import quality_plot, teacher_forced  # noqa: E402
from bench.divergence import Divergence, divergence  # noqa: E402
from bench.teacher_forced import Window, as_float16, as_mlx, as_tiles  # noqa: E402
from cache_store import SnapshotStore  # noqa: E402
from kernels import BLOCK_TOKENS, FORMATS, TileLayout  # noqa: E402
from worker.engine.kv_cache import SINK_TOKENS, KVCache  # noqa: E402
from worker.engine.model import Model, load  # noqa: E402

PEER = "mlx-lm 4-bit"
MIXED = "by layer"
ALL_TEXTS = "all"
METHODS = ("fp16", PEER, *FORMATS, MIXED)
SETTINGS = ("deployment", "stress")
SEED = 0


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to hold the KV."""

    format: str
    prefill: str
    setting: str
    restored: bool = False


@dataclasses.dataclass(frozen=True)
class Run:
    case: Case
    logits: np.ndarray
    """(num_suffix, vocab)."""
    bits: float
    restored_difference: float | None = None


def runs(
    model: Model, window: Window, formats: list[str], settings: list[str], folder: Path
) -> Iterator[Run]:
    """Every case that was asked for, one after the other. `folder`: an empty place for snapshots."""
    num_all = len(window.fed)
    for name in formats:
        if name == "fp16":
            logits = teacher_forced.chunk_major(model, window, as_float16, 0, num_all)
            yield from (Run(Case(name, "chunk-major", setting), logits, 16.0) for setting in settings)
        elif name == PEER:
            bits = 4 + 32 / 64  # a float16 scale and bias for 64 channels
            logits = teacher_forced.chunk_major(model, window, as_mlx(), 0, num_all)
            yield from (Run(Case(name, "chunk-major", setting), logits, bits) for setting in settings)
            if "deployment" in settings:
                logits = teacher_forced.mlx_lm_generate(model, window, as_mlx())
                yield Run(Case(name, "generate", "deployment"), logits, bits)
        elif name == MIXED:
            if "deployment" in settings:
                yield from layer_major_runs(model, window, name, folder / "mixed")
        else:
            yield from tile_runs(model, window, name, settings, folder / name)


def tile_runs(model: Model, window: Window, format: Any, settings: list[str], folder: Path) -> Iterator[Run]:
    layout = TileLayout(full_head_dim(model), format)
    if "deployment" in settings:
        shapes = [dataclasses.replace(shape, format=format) for shape in model.shapes]
        yield from layer_major_runs(dataclasses.replace(model, shapes=shapes), window, format, folder)
        logits = teacher_forced.chunk_major(model, window, as_tiles(format), SINK_TOKENS, window.num_coded)
        bits = bits_per_element(window, layout.bits_per_element)
        yield Run(Case(format, "chunk-major", "deployment"), logits, bits)
    if "stress" in settings:
        logits = teacher_forced.chunk_major(model, window, as_tiles(format), 0, len(window.fed))
        yield Run(Case(format, "chunk-major", "stress"), logits, layout.bits_per_element)


def layer_major_runs(model: Model, window: Window, name: str, folder: Path) -> Iterator[Run]:
    """As the engine would run the model, cold and restored."""
    cold, fresh = model.new_cache(), model.new_cache()
    bits = bits_per_element(window, block_bits(cold))
    logits = teacher_forced.layer_major(model, window, cold)
    yield Run(Case(name, "layer-major", "deployment"), logits, bits)
    teacher_forced.through_disk(window, cold, fresh, SnapshotStore(folder, 1 << 50, 0))
    again = teacher_forced.suffix(model, window, fresh)
    apart = float(np.abs(again - logits).max())
    yield Run(Case(name, "layer-major", "deployment", True), again, bits, apart)


def block_bits(cache: KVCache) -> float:
    """Bits per element of K and V in blocks, of all layers that have any."""
    shapes = [layer.shape for layer in cache.compressed]
    sizes = [2 * shape.num_kv_heads * shape.head_dim for shape in shapes]
    bits = [TileLayout(shape.head_dim, shape.format).bits_per_element for shape in shapes]
    return sum(size * own for size, own in zip(sizes, bits, strict=True)) / sum(sizes)


def full_head_dim(model: Model) -> int:
    """Of the layers that see everything, which are those that a format is for."""
    return next(shape.head_dim for shape in model.shapes if shape.window is None)


def bits_per_element(window: Window, block_bits: float) -> float:
    """Of sinks, blocks and tail once the whole window is held."""
    num_all, num_coded = len(window.fed), window.num_coded - SINK_TOKENS
    return (num_coded * block_bits + (num_all - num_coded) * 16) / num_all


def windows(tokens: np.ndarray, start: list[int], num_prefix: int, num_suffix: int, num: int) -> list[Window]:
    """Pieces of a text at seeded places, behind the tokens that the tokenizer puts before every text.

    Raises:
        ValueError: if the text is too short.
    """
    length = num_prefix + num_suffix + 1 - len(start)
    if len(tokens) < length:
        raise ValueError(f"a text of {len(tokens)} tokens has no window of {length}: give a longer one")
    places = np.random.default_rng(SEED).integers(0, len(tokens) - length + 1, num)
    first = np.array(start, np.uint32)
    return [Window(np.concatenate([first, tokens[at : at + length]]), num_prefix) for at in places]


def measure(
    model: Model, texts: dict[str, np.ndarray], start: list[int], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """All rows; those of the text `all` take every text's tokens together."""
    rows = []
    for num_prefix in options.prefix_tokens:
        found: dict[Case, dict[str, list[Divergence]]] = {}
        bits: dict[Case, float] = {}
        apart: dict[Case, float] = {}
        for name, tokens in texts.items():
            for window in windows(tokens, start, num_prefix, options.suffix_tokens, options.windows):
                truth = teacher_forced.exact(model, window)
                with tempfile.TemporaryDirectory() as folder:
                    for run in runs(model, window, options.formats, options.settings, Path(folder)):
                        part = divergence(truth, run.logits, window.targets)
                        found.setdefault(run.case, {}).setdefault(name, []).append(part)
                        bits[run.case] = run.bits
                        if run.restored_difference is not None:
                            apart[run.case] = max(apart.get(run.case, 0.0), run.restored_difference)
                mx.clear_cache()
                print(f"{name}: a window with a prefix of {num_prefix}", file=sys.stderr, flush=True)
        for case, by_text in found.items():
            together = [part for parts in by_text.values() for part in parts]
            for name, parts in {ALL_TEXTS: together, **by_text}.items():
                rows.append(
                    {
                        **vars(case),
                        "bits": bits[case],
                        **Divergence.join(parts).summary(),
                        "prefix_tokens": num_prefix,
                        "text": name,
                        "restored_difference": apart.get(case),
                    }
                )
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    """The rows over all texts; `of peer`: KL over that of mlx-lm's chunk-major cache in the same setting."""
    rows = [row for row in rows if row["text"] == ALL_TEXTS]
    peers = {
        (row["prefix_tokens"], row["setting"]): row["kl_mean"]
        for row in rows
        if (row["format"], row["prefill"]) == (PEER, "chunk-major")
    }
    print(
        f"{'prefix':>6} {'setting':11}{'format':13}{'prefill':12}{'':9}{'bits':>6}{'kl mean':>10}"
        f"{'kl p99':>9}{'flips':>8}{'ppl':>8}{'delta':>9}{'of peer':>9}{'apart':>7}"
    )
    for row in sorted(rows, key=lambda row: (row["prefix_tokens"], row["setting"])):
        peer = peers.get((row["prefix_tokens"], row["setting"]))
        share = f"{row['kl_mean'] / peer:.3f}" if peer else ""
        apart = "" if row["restored_difference"] is None else f"{row['restored_difference']:g}"
        print(
            f"{row['prefix_tokens']:6} {row['setting']:11}{row['format']:13}{row['prefill']:12}"
            f"{'restored' if row['restored'] else '':9}{row['bits']:6.2f}{row['kl_mean']:10.6f}"
            f"{row['kl_p99']:9.4f}{row['flip_rate']:8.2%}{row['perplexity']:8.2f}"
            f"{row['perplexity_delta']:+9.3f}{share:>9}{apart:>7}"
        )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, help="an MLX model folder")
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--prefix-tokens", type=int, nargs="+", default=[768, 2048])
    parser.add_argument("--suffix-tokens", type=int, default=256)
    parser.add_argument("--windows", type=int, default=2, help="of each text")
    uniform = [name for name in METHODS if name != MIXED]
    parser.add_argument("--formats", nargs="+", choices=METHODS, default=uniform)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    options = parser.parse_args(arguments)
    for num_prefix in options.prefix_tokens:
        num_all = num_prefix + options.suffix_tokens
        if num_prefix < SINK_TOKENS + BLOCK_TOKENS or num_all % BLOCK_TOKENS:
            parser.error(
                f"a prefix of {num_prefix} and a suffix of {options.suffix_tokens} tokens: the prefix needs "
                f"{SINK_TOKENS + BLOCK_TOKENS} at least, both together a multiple of {BLOCK_TOKENS}"
            )
    return options


def main() -> None:
    options = parse()
    model = load(options.model, options.model.name)
    start = model.tokenizer.encode("")
    texts = {}
    for path in options.text:
        ids = model.tokenizer.encode(path.read_text(encoding="utf-8-sig"), add_special_tokens=False)
        texts[path.name] = np.array(ids, np.uint32)
    rows = measure(model, texts, start, options)
    print_table(rows)
    result = {
        "bench": "quality",
        "model": model.card.id,
        "dtype": str(model.dtype),
        "machine": {
            "cpu": cpu_name(),
            "num_cores": len(os.sched_getaffinity(0)),
            "device": model.card.device,
            "load_average": [round(load, 1) for load in os.getloadavg()],
        },
        "kv_format": model.card.kv_format,
        "versions": {name: metadata.version(name) for name in ("mlx", "mlx-lm", "numpy")},
        "python": platform.python_version(),
        "command": command("quality"),
        "commit": git("describe", "--always", "--dirty", "--abbrev=12"),
        "seed": SEED,
        "windows_of_each_text": options.windows,
        "text_tokens": {name: len(tokens) for name, tokens in texts.items()},
        "rows": rows,
    }
    line = json.dumps(result)
    print(f"\n{line}")
    longest = max(options.prefix_tokens)
    kept = ROOT / "bench" / "results" / f"quality.{model.card.id}.{longest}.json"
    kept.write_text(line + "\n", encoding="utf-8")
    drawn = [
        row
        for row in rows
        if row["text"] == ALL_TEXTS and row["prefix_tokens"] == longest and not row["restored"]
    ]
    title = f"{model.card.id}, prefix of {longest} tokens"
    quality_plot.write(kept.with_suffix(".svg"), title, drawn)


if __name__ == "__main__":
    main()
