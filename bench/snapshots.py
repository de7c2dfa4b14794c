"""How fast the snapshot store writes, restores and indexes, beside plain reading of the same files.

    python -m bench.snapshots FOLDER [--blocks 64] [--layers 36] [--kv-heads 8] [--head-dim 128]

A block holds 128 tokens of int4 K/V in the canonical shapes: per layer the codes and scales of K and V
and the block mean of K. Each figure is the best of five rounds; the machine's page cache is warm
(`cold`: dropped for the files before reading). Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash

from cache_store import BlockKey, Section, SnapshotStore, chain_keys

TOKENS = 128


def block_arrays(layers: int, kv_heads: int, head_dim: int) -> list[tuple[str, np.ndarray]]:
    """Random arrays of one block, by section name."""
    rng = np.random.default_rng(0)
    arrays = []
    for layer in range(layers):
        for side in "kv":
            codes = rng.integers(0, 256, (kv_heads, TOKENS, head_dim // 2), dtype=np.uint8)
            scales = rng.random((kv_heads, TOKENS, max(head_dim // 64, 1))).astype(np.float16)
            arrays += [(f"layers.{layer}.{side}.codes", codes), (f"layers.{layer}.{side}.scales", scales)]
        arrays.append((f"layers.{layer}.k.mean", rng.random((kv_heads, head_dim)).astype(np.float16)))
    return arrays


def write_blocks(
    store: SnapshotStore, num_blocks: int, arrays: list[tuple[str, np.ndarray]]
) -> list[BlockKey]:
    rng = np.random.default_rng(1)
    ids = [rng.integers(0, 1 << 17, TOKENS, dtype=np.uint32) for _ in range(num_blocks)]
    keys = chain_keys("bench", b"", ids)
    sections = [Section(name, str(array.dtype), array.shape, array.data) for name, array in arrays]
    parent = None
    for key, tokens in zip(keys, ids, strict=True):
        if not store.write(key, parent, tokens, sections, True, {}):
            sys.exit(f"block {key} was not stored: is the disk full?")
        parent = key
    return keys


def restore(store: SnapshotStore, keys: list[BlockKey], buffers: list[list[memoryview]]) -> None:
    for key, into in zip(keys, buffers, strict=True):
        store.read(key, into)


def read_plainly(paths: list[Path], buffers: list[bytearray]) -> None:
    for path, buffer in zip(paths, buffers, strict=True):
        with path.open("rb", buffering=0) as file:
            if file.readinto(buffer) != len(buffer):
                sys.exit(f"{path} was read short")


def best_s(run: Callable[[], None], before: Callable[[], None] = lambda: None) -> float:
    times = []
    for _ in range(5):
        before()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def drop(paths: list[Path]) -> None:
    """Ask the kernel to forget the files, where it can be asked."""
    if sys.platform == "linux":
        for path in paths:
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def machine() -> str:
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = names[0].split(":", 1)[1].strip() if names else name
    return f"{name}, {os.cpu_count()} cores, {platform.system()} {platform.release()}"


def commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", type=Path, help="an empty or new folder on the disk to measure; emptied afterwards"
    )
    for name, default in (
        ("blocks", 64),
        ("layers", 36),
        ("kv-heads", 8),
        ("head-dim", 128),
        ("headers", 2000),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    if options.folder.exists() and any(options.folder.iterdir()):
        parser.error(f"{options.folder} is not empty")
    arrays = block_arrays(options.layers, options.kv_heads, options.head_dim)
    kv_bytes = sum(array.nbytes for _, array in arrays)
    mb = kv_bytes * options.blocks / 1e6

    store = SnapshotStore(options.folder / "blocks", 1 << 50, 0)
    start = time.perf_counter()
    keys = write_blocks(store, options.blocks, arrays)
    write_s = time.perf_counter() - start
    paths = [next(store.folder.rglob(f"{key}.llkv")) for key in keys]
    file_bytes = paths[0].stat().st_size
    into = [[memoryview(bytearray(array.nbytes)) for _, array in arrays] for _ in keys]
    plain = [bytearray(file_bytes) for _ in keys]

    small = SnapshotStore(options.folder / "headers", 1 << 50, 0)
    write_blocks(small, options.headers, [("one", np.zeros(64, np.uint8))])
    figures = {
        "block_bytes": file_bytes,
        "file_over_kv": round(file_bytes / kv_bytes, 4),
        "write_mb_s": round(mb / write_s),
        "restore_mb_s": round(mb / best_s(lambda: restore(store, keys, into))),
        "plain_read_mb_s": round(mb / best_s(lambda: read_plainly(paths, plain))),
        "restore_cold_mb_s": round(mb / best_s(lambda: restore(store, keys, into), lambda: drop(paths))),
        "plain_read_cold_mb_s": round(mb / best_s(lambda: read_plainly(paths, plain), lambda: drop(paths))),
        "xxh3_mb_s": round(file_bytes / 1e6 / best_s(lambda: void(xxhash.xxh3_64_intdigest(plain[0])))),
        "index_headers": options.headers,
        "index_s": round(best_s(lambda: void(SnapshotStore(small.folder, 1 << 50, 0))), 3),
    }
    figures["restore_over_plain"] = round(figures["restore_mb_s"] / figures["plain_read_mb_s"], 2)
    figures["restore_over_plain_cold"] = round(
        figures["restore_cold_mb_s"] / figures["plain_read_cold_mb_s"], 2
    )
    shutil.rmtree(options.folder)
    for name, value in figures.items():
        print(f"{name:24} {value:>12}")
    arguments = [
        f"--{name} {getattr(options, name.replace('-', '_'))}" for name in ("blocks", "layers", "kv-heads")
    ]
    print(
        json.dumps(
            {
                "bench": "snapshots",
                "machine": machine(),
                "versions": {
                    "python": platform.python_version(),
                    "numpy": np.__version__,
                    "xxhash": xxhash.VERSION,
                },
                "command": " ".join(
                    ["python -m bench.snapshots FOLDER", *arguments, f"--head-dim {options.head_dim}"]
                ),
                "commit": commit(),
                **figures,
            }
        )
    )


def void(_: object) -> None:
    """Drop a result."""


if __name__ == "__main__":
    main()
