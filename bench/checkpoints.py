"""What the checkpoints of a long prefill cost, what they write, and how much of it a kill repeats.

    nice python -m bench.checkpoints TEXT [--model smollm2-135m-instruct] [--tokens 6000] [--rounds 3]

The first --tokens tokens of TEXT pass through stage one with the worker's own policy and without checkpoints,
in turn, over stores in a temporary folder. `share`: seconds of writing by those of stage one; `cpu_s`: of all
threads. `repeated_at_most`: the most steps between two checkpoints, the start or the end, by all steps.
`saved_over_kv`: bytes given to the checkpoints by those of the KV; `disk_over_kv`: what the kernel wrote of
them, less what was deleted before it had to (Linux). `kills`: the process gets SIGKILL at a share of its
steps, another goes on; the share of steps that were run twice, and whether the KV is the uninterrupted one's,
bit for bit. `large`: saves of --large-tokens tokens of an 8B model's shape (hidden states of 4,096 x 16 bits,
32 layers of int4c tiles). Prints one JSON line; it is kept in bench/results/checkpoints.<device>.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from bench.machine import commit, cpu_name
from cache_store import Section, SnapshotStore, chain_keys
from worker import accelerate

SHARES = (0.2, 0.5, 0.9)
LARGE_LAYERS, LARGE_HIDDEN_BYTES, LARGE_TILE_BYTES = 32, 8192, 1104
"""Of Llama-3.1-8B: bytes per token, of the hidden states and of one layer's tiles of 8 KV heads."""


def disk_bytes() -> int:
    """Bytes that this process had the kernel write, less those that it never had to; 0 where none is told."""
    path = Path("/proc/self/io")
    if not path.exists():
        return 0
    told = dict(line.split(": ") for line in path.read_text().splitlines())
    return int(told["write_bytes"]) - int(told["cancelled_write_bytes"])


class Runs:
    """Stage one of one text, again and again."""

    def __init__(self, options: argparse.Namespace) -> None:
        accelerate.prepare_cpu()  # before MLX is loaded
        from worker.engine.model import load as load_model
        from worker.engine.snapshots import Prefix
        from worker.models import default_models_dir, ensure

        self.model = load_model(ensure(options.model, default_models_dir()), options.model)
        text = options.text.read_text()[: 5 * options.tokens]
        tokens = np.array(self.model.tokenizer.encode(text)[: options.tokens], np.uint32)
        self.prefix = Prefix("bench", tokens)
        self.num_layers = len(self.model.layers)

    def run(self, store: SnapshotStore | None = None, kill_at: float = 2.0) -> dict[str, Any]:
        """One stage one; store: where its checkpoints go. What it took, its steps and its KV's digest."""
        import hashlib

        from worker.engine.checkpoints import DEFAULT_POLICY, Checkpoint, Pace
        from worker.engine.prefill import prefill_prefix
        from worker.engine.report import Silent

        class Noted(Pace):
            """Keeps when each checkpoint was written, and after how many steps."""

            def wrote(self, num_bytes: int, began_s: float) -> None:
                super().wrote(num_bytes, began_s)
                saved.append(steps[0])

        class Steps(Silent):
            def progress(self, phase: str, num_done: int, num_total: int, cached_tokens: int) -> None:
                steps[0] += phase == "prefill"
                if phase == "prefill" and num_done / num_total >= kill_at:
                    print(steps[0], flush=True)
                    os.kill(os.getpid(), signal.SIGKILL)

        steps, saved = [0], list[int]()
        cache, pace = self.model.new_cache(), Noted(DEFAULT_POLICY)
        checkpoint = Checkpoint(store, self.prefix, 0, {}, pace) if store else None
        cpu, disk = time.process_time(), disk_bytes()
        prefill_prefix(self.model, cache, self.prefix.tokens, 0, Steps(), checkpoint)
        whole_s, cpu_s = pace.elapsed_s, time.process_time() - cpu
        kv = [
            np.array(a, copy=False)
            for layer in cache.compressed
            for a in (layer.tiles, layer.sinks_k, layer.sinks_v)
        ]
        if store:
            store.checkpoints.remove(self.prefix.keys[-1])
        return {
            "prefill_s": round(whole_s, 2),
            "cpu_s": round(cpu_s, 2),
            "num_checkpoints": len(saved),
            "written_s": round(pace.written_s, 3),
            "share": round(pace.written_s / whole_s, 4),
            "repeated_at_most": round(float(np.diff([0, *saved, steps[0]]).max()) / steps[0], 3),
            "saved_mb": round(pace.written_bytes / 1e6, 1),
            "kv_mb": round(sum(a.nbytes for a in kv) / 1e6, 1),
            "disk_mb": round((disk_bytes() - disk) / 1e6, 1),
            "steps": steps[0],
            "digest": hashlib.sha256(b"".join(a.tobytes() for a in kv)).hexdigest(),
        }


def killed(runs: Runs, share: float, whole: dict[str, Any], arguments: list[str]) -> dict[str, Any]:
    """A run that dies at a share of its steps, and one that goes on."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bench.checkpoints", *arguments]
        child = subprocess.run(
            [*command, "--kill-at", str(share), "--folder", folder], stdout=subprocess.PIPE, check=False
        )
        assert child.returncode == -signal.SIGKILL, f"it ended with {child.returncode}"
        again = runs.run(SnapshotStore(Path(folder), 1 << 40))
    repeated = int(child.stdout) + again["steps"] - whole["steps"]
    return {
        "killed_at": round(int(child.stdout) / whole["steps"], 3),
        "repeated": round(repeated / whole["steps"], 3),
        "equal": again["digest"] == whole["digest"],
    }


def large(num_tokens: int) -> dict[str, Any]:
    """The saves of one prefill of an 8B model's shape, half a second apart, without the model."""
    rng = np.random.default_rng(0)
    hidden = [rng.integers(0, 1 << 16, (2048, LARGE_HIDDEN_BYTES // 2), np.uint16)] * (num_tokens // 2048)
    tiles = rng.integers(0, 256, num_tokens * LARGE_TILE_BYTES, np.uint8)
    key = chain_keys("bench", b"", [np.arange(9, dtype=np.uint32)])[0]
    chunks = [Section(f"chunk.{n}", "uint16", h.shape, h.data) for n, h in enumerate(hidden)]
    spent: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        store, disk = SnapshotStore(Path(folder), 1 << 40), disk_bytes()
        for layer in range(LARGE_LAYERS - 1):
            began = time.perf_counter()
            store.checkpoints.save_layer(key, layer, [Section("tiles", "uint8", tiles.shape, tiles.data)], {})
            if not store.checkpoints.save_hidden(key, layer + 1, chunks, {}):
                sys.exit("a checkpoint was not stored: is the disk full?")
            spent.append(time.perf_counter() - began)
            time.sleep(0.5)
        store.checkpoints.remove(key)
    kv_bytes = LARGE_LAYERS * tiles.nbytes
    saved_bytes = len(spent) * (tiles.nbytes + sum(h.nbytes for h in hidden))
    return {
        "tokens": num_tokens,
        "kv_mb": round(kv_bytes / 1e6, 1),
        "save_s_median": round(float(np.median(spent)), 4),
        "save_s_most": round(max(spent), 4),
        "save_mb_s": round(saved_bytes / sum(spent) / 1e6),
        "saved_over_kv": round(saved_bytes / kv_bytes, 2),
        "disk_over_kv": round((disk_bytes() - disk) / kv_bytes, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.checkpoints",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--large-tokens", type=int, default=32768)
    parser.add_argument("--kill-at", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    load = os.getloadavg()
    runs = Runs(options)
    if options.kill_at:
        runs.run(SnapshotStore(options.folder, 1 << 40), options.kill_at)
        return
    rows: list[dict[str, Any]] = []
    without: list[dict[str, Any]] = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(runs.run(SnapshotStore(Path(folder), 1 << 40)))
        print(rows[-1], file=sys.stderr)
        without.append(runs.run())
    kills = [killed(runs, share, without[0], sys.argv[1:]) for share in SHARES]
    print(kills, file=sys.stderr)
    result = {
        "bench": "checkpoints",
        "machine": f"{cpu_name()}, {os.cpu_count()} cores",
        "load_average_at_start": [round(x, 1) for x in load],
        "load_average_at_end": [round(x, 1) for x in os.getloadavg()],
        "nice": os.nice(0),
        "model": options.model,
        "prefix_tokens": len(runs.prefix.tokens),
        "num_layers": runs.num_layers,
        "rounds": [
            {k: v for k, v in row.items() if k not in ("digest", "steps")}
            | {
                "saved_over_kv": round(row["saved_mb"] / row["kv_mb"], 2),
                "disk_over_kv": round(row["disk_mb"] / row["kv_mb"], 2),
            }
            for row in rows
        ],
        "without": [{k: row[k] for k in ("prefill_s", "cpu_s")} for row in without],
        "kills": kills,
        "large": large(options.large_tokens),
        "versions": {"python": platform.python_version(), "mlx": metadata.version("mlx")},
        "commit": commit(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
