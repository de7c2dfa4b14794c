"""How fast the snapshot store writes, restores and indexes, beside plain reading of the same files.

    python -m bench.snapshots FOLDER [--tokens 8192 131072] [--layers 32] [--kv-heads 8] [--head-dim 128]

A prefix is stored as the engine stores it: 128 tokens a block, one section of int4c tiles per layer, the
sinks in the first block. Restore and plain reading fill the same memory, in turn, and each figure is the
best of its rounds; `warm`: the files lie in the page cache, `cold`: dropped from it before each round.
`cpu`: the same by CPU seconds of all threads, which other programs' load changes less. Prints a table and
one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import xxhash

from bench.machine import commit, cpu_name
from cache_store import BlockKey, Section, SnapshotStore, chain_keys
from kernels import BLOCK_TOKENS, TileLayout

SINK_TOKENS = 64


class Prefix:
    """A prefix in memory: tiles (num_layers, num_blocks, bytes of all heads' tiles) and sinks."""

    def __init__(self, num_tokens: int, layers: int, kv_heads: int, head_dim: int) -> None:
        self.num_blocks = (num_tokens - SINK_TOKENS) // BLOCK_TOKENS
        self.layers = layers
        self.tile_bytes = kv_heads * TileLayout(head_dim, "int4c").tile_bytes
        self.sink_bytes = layers * 2 * kv_heads * SINK_TOKENS * head_dim * 2
        num_bytes = layers * self.num_blocks * self.tile_bytes + self.sink_bytes
        # Plain reading fills this memory too, headers included.
        self.memory = np.empty(num_bytes + self.num_blocks * (64 << 10), np.uint8)
        self.kv_bytes = num_bytes
        self.tiles = self.memory[: layers * self.num_blocks * self.tile_bytes].reshape(
            layers, self.num_blocks, self.tile_bytes
        )
        self.sinks = self.memory[self.tiles.size : num_bytes]
        rng = np.random.default_rng(1)
        ids = [SINK_TOKENS + BLOCK_TOKENS] + [BLOCK_TOKENS] * (self.num_blocks - 1)
        self.token_ids = [rng.integers(0, 1 << 17, n, dtype=np.uint32) for n in ids]
        self.keys = chain_keys("bench", b"", self.token_ids)

    def fill(self) -> None:
        noise = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)
        for start in range(0, self.kv_bytes, noise.size):
            piece = self.memory[start : min(start + noise.size, self.kv_bytes)]
            piece[:] = noise[: piece.size]

    def sections(self, block: int) -> list[Section]:
        sections = [
            Section(f"layer.{n}", "uint8", (self.tile_bytes,), tiles[block].data)
            for n, tiles in enumerate(self.tiles)
        ]
        return sections + (
            [Section("sinks", "uint8", self.sinks.shape, self.sinks.data)] if not block else []
        )

    def buffers(self) -> Iterator[list[memoryview]]:
        return ([section.data for section in self.sections(block)] for block in range(self.num_blocks))


def write(store: SnapshotStore, prefix: Prefix) -> None:
    parent: BlockKey | None = None
    for block, (key, ids) in enumerate(zip(prefix.keys, prefix.token_ids, strict=True)):
        if not store.write(key, parent, ids, prefix.sections(block), True, {}):
            sys.exit(f"block {key} was not stored: is the disk full?")
        parent = key


def restore(store: SnapshotStore, prefix: Prefix) -> None:
    """As the engine does: match, then read every block to its place."""
    num_matched = store.match(prefix.keys, prefix.token_ids)
    if num_matched != prefix.num_blocks or sum(1 for _ in store.read_each(prefix.keys, prefix.buffers())) != (
        prefix.num_blocks
    ):
        sys.exit("the prefix was not restored whole")


def read_plainly(paths: list[Path], memory: memoryview) -> None:
    position = 0
    for path in paths:
        with path.open("rb", buffering=0) as file:
            position += file.readinto(memory[position:])


def best(
    runs: list[Callable[[], None]], rounds: int, before: Callable[[], None] = lambda: None
) -> list[tuple[float, float]]:
    """Least wall and CPU seconds of each, taken in turn so that others' load meets them alike."""
    least = [(float("inf"), float("inf"))] * len(runs)
    for _ in range(rounds):
        for index, run in enumerate(runs):
            before()
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            spent = time.perf_counter() - wall, time.process_time() - cpu
            least[index] = min(least[index][0], spent[0]), min(least[index][1], spent[1])
    return least


def drop(paths: list[Path]) -> None:
    """Ask the kernel to forget the files, where it can be asked."""
    if sys.platform == "linux":
        for path in paths:
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def measure(folder: Path, num_tokens: int, options: argparse.Namespace) -> dict[str, float]:
    """The figures of one prefix."""
    prefix = Prefix(num_tokens, options.layers, options.kv_heads, options.head_dim)
    prefix.fill()
    store = SnapshotStore(folder, 1 << 50)
    mb = prefix.kv_bytes / 1e6
    start = time.perf_counter()
    write(store, prefix)
    write_s = time.perf_counter() - start
    paths = [next(folder.rglob(f"{key}.llkv")) for key in prefix.keys]
    runs: list[Callable[[], None]] = [
        lambda: restore(store, prefix),
        lambda: read_plainly(paths, prefix.memory.data),
    ]
    warm = best(runs, options.rounds)
    cold = best(runs, max(options.rounds // 3, 1), lambda: drop(paths))
    file_bytes = sum(path.stat().st_size for path in paths)
    shutil.rmtree(folder)
    return {
        "prefix_tokens": SINK_TOKENS + BLOCK_TOKENS * prefix.num_blocks,
        "kv_mb": round(mb, 1),
        "file_over_kv": round(file_bytes / prefix.kv_bytes, 4),
        "write_mb_s": round(mb / write_s),
        "restore_warm_s": round(warm[0][0], 4),
        "restore_warm_mb_s": round(mb / warm[0][0]),
        "plain_warm_mb_s": round(mb / warm[1][0]),
        "restore_over_plain_warm": round(warm[1][0] / warm[0][0], 2),
        "restore_over_plain_warm_cpu": round(warm[1][1] / warm[0][1], 2),
        "restore_cold_s": round(cold[0][0], 4),
        "restore_cold_mb_s": round(mb / cold[0][0]),
        "plain_cold_mb_s": round(mb / cold[1][0]),
        "restore_over_plain_cold": round(cold[1][0] / cold[0][0], 2),
    }


def index_s(folder: Path, num_headers: int) -> float:
    """Seconds to open a store of so many blocks."""
    store = SnapshotStore(folder, 1 << 50)
    rng = np.random.default_rng(2)
    ids = [rng.integers(0, 1 << 17, BLOCK_TOKENS, dtype=np.uint32) for _ in range(num_headers)]
    for key, tokens in zip(chain_keys("index", b"", ids), ids, strict=True):
        store.write(key, None, tokens, [], True, {})
    ((least, _),) = best([lambda: void(SnapshotStore(folder, 1 << 50))], 5)
    return round(least, 3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", type=Path, help="an empty or new folder on the disk to measure; emptied afterwards"
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 131072])
    sizes = {"layers": 32, "kv-heads": 8, "head-dim": 128, "headers": 2000, "rounds": 9}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    if options.folder.exists() and any(options.folder.iterdir()):
        parser.error(f"{options.folder} is not empty")
    load = os.getloadavg()[0]
    rows = [measure(options.folder / str(tokens), tokens, options) for tokens in options.tokens]
    for name in rows[0]:
        print(f"{name:30}", *(f"{row[name]:>12}" for row in rows))
    indexed_s = index_s(options.folder / "headers", options.headers)
    print(f"{f'index of {options.headers} blocks, s':30} {indexed_s:>12}")
    shutil.rmtree(options.folder)
    result = {
        "bench": "snapshots",
        "machine": f"{cpu_name()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "load_at_start": round(load, 1),
        "nice": os.nice(0),
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "xxhash": xxhash.VERSION},
        "command": "python -m bench.snapshots FOLDER --tokens "
        + " ".join(map(str, options.tokens))
        + "".join(f" --{name} {getattr(options, name.replace('-', '_'))}" for name in sizes),
        "commit": commit(),
        "index_headers": options.headers,
        "index_s": indexed_s,
        "rows": rows,
    }
    print(json.dumps(result))


def void(_: object) -> None:
    """Drop a result."""


if __name__ == "__main__":
    main()
