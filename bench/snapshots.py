"""How fast the snapshot store writes, restores and indexes, beside plain reading of the same files.

    python -m bench.snapshots FOLDER [--tokens 8192 131072] [--layers 32] [--kv-heads 8] [--head-dim 128]

A prefix is stored as the engine stores it: 128 tokens a block, one section of int4c tiles per layer, the
sinks in the first block. `plain`: one thread reads each file with one call, into memory that is in use
already; `restore` matches the prefix and reads every block to its places in that same memory, checked;
`plain_two`: as plain, with as many threads as restore has. `fresh`: both into memory that is allocated anew,
as it is when a model's cache is made. All in turn, and each figure is the best of its rounds; `warm`: the
files lie in the page cache, `cold`: dropped from it before each round. `cpu`: by CPU seconds of all threads.
Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
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
        self.kv_bytes = layers * self.num_blocks * self.tile_bytes + self.sink_bytes
        self.memory = self.allocated()
        rng = np.random.default_rng(1)
        ids = [SINK_TOKENS + BLOCK_TOKENS] + [BLOCK_TOKENS] * (self.num_blocks - 1)
        self.token_ids = [rng.integers(0, 1 << 17, n, dtype=np.uint32) for n in ids]
        self.keys = chain_keys("bench", b"", self.token_ids)

    def allocated(self) -> memoryview:
        """Memory for all of it, and for the headers that plain reading reads too."""
        return np.empty(self.kv_bytes + self.num_blocks * (64 << 10), np.uint8).data

    def fill(self) -> None:
        noise = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8).data
        for start in range(0, self.kv_bytes, len(noise)):
            piece = self.memory[start : min(start + len(noise), self.kv_bytes)]
            piece[:] = noise[: len(piece)]

    def buffers(self, memory: memoryview) -> Iterator[list[memoryview]]:
        """The places of each block's sections."""
        size, layer_bytes = self.tile_bytes, self.num_blocks * self.tile_bytes
        for block in range(self.num_blocks):
            starts = range(block * size, self.layers * layer_bytes, layer_bytes)
            places = [memory[start : start + size] for start in starts]
            yield places if block else [*places, memory[self.kv_bytes - self.sink_bytes : self.kv_bytes]]


def write(store: SnapshotStore, prefix: Prefix) -> None:
    parent: BlockKey | None = None
    for key, ids, views in zip(prefix.keys, prefix.token_ids, prefix.buffers(prefix.memory), strict=True):
        sections = [Section(f"layer.{n}", "uint8", (len(view),), view) for n, view in enumerate(views)]
        if not store.write(key, parent, ids, sections, True, {}):
            sys.exit(f"block {key} was not stored: is the disk full?")
        parent = key


def restore(store: SnapshotStore, prefix: Prefix, memory: memoryview) -> None:
    """As the engine does: match, then read every block to its place."""
    num_matched = store.match(prefix.keys, prefix.token_ids)
    num_read = sum(1 for _ in store.read_each(prefix.keys, prefix.buffers(memory)))
    if not num_matched == num_read == prefix.num_blocks:
        sys.exit("the prefix was not restored whole")


def read_plainly(paths: list[Path], memory: memoryview) -> None:
    position = 0
    for path in paths:
        with path.open("rb", buffering=0) as file:
            position += file.readinto(memory[position:])


def read_by_two(paths: list[Path], memory: memoryview) -> None:
    middle = len(paths) // 2
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(read_plainly, paths[:middle], memory[: len(memory) // 2])
        read_plainly(paths[middle:], memory[len(memory) // 2 :])
        other.result()


def best(
    runs: Mapping[str, Callable[[], None]], rounds: int, before: Callable[[], None] = lambda: None
) -> dict[str, tuple[float, float]]:
    """Least wall and CPU seconds of each, taken in turn so that others' load meets them alike."""
    least = dict.fromkeys(runs, (float("inf"), float("inf")))
    for _ in range(rounds):
        for name, run in runs.items():
            before()
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            spent = time.perf_counter() - wall, time.process_time() - cpu
            least[name] = min(least[name][0], spent[0]), min(least[name][1], spent[1])
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
    runs: dict[str, Callable[[], None]] = {
        "restore": lambda: restore(store, prefix, prefix.memory),
        "plain": lambda: read_plainly(paths, prefix.memory),
        "plain_two": lambda: read_by_two(paths, prefix.memory),
        "fresh_restore": lambda: restore(store, prefix, prefix.allocated()),
        "fresh_plain": lambda: read_plainly(paths, prefix.allocated()),
    }
    warm = best(runs, options.rounds)
    cold = best(
        {name: runs[name] for name in ("restore", "plain")},
        max(options.rounds // 3, 1),
        lambda: drop(paths),
    )
    file_bytes = sum(path.stat().st_size for path in paths)
    shutil.rmtree(folder)
    row = {
        "prefix_tokens": SINK_TOKENS + BLOCK_TOKENS * prefix.num_blocks,
        "kv_mb": round(mb, 1),
        "file_over_kv": round(file_bytes / prefix.kv_bytes, 4),
        "write_mb_s": round(mb / write_s),
        "restore_warm_s": round(warm["restore"][0], 4),
        "restore_cold_s": round(cold["restore"][0], 4),
    }
    for state, least in (("warm", warm), ("cold", cold)):
        row |= {f"{name}_{state}_mb_s": round(mb / wall) for name, (wall, _) in least.items()}
    wall, cpu = ({name: spent[i] for name, spent in warm.items()} for i in (0, 1))
    return row | {
        "restore_over_plain_warm": round(wall["plain"] / wall["restore"], 2),
        "restore_over_plain_two_warm": round(wall["plain_two"] / wall["restore"], 2),
        "restore_over_plain_fresh_warm": round(wall["fresh_plain"] / wall["fresh_restore"], 2),
        "restore_over_plain_warm_cpu": round(cpu["plain"] / cpu["restore"], 2),
        "restore_over_plain_cold": round(cold["plain"][0] / cold["restore"][0], 2),
    }


def index_s(folder: Path, num_headers: int) -> float:
    """Seconds to open a store of so many blocks."""
    store = SnapshotStore(folder, 1 << 50)
    rng = np.random.default_rng(2)
    ids = [rng.integers(0, 1 << 17, BLOCK_TOKENS, dtype=np.uint32) for _ in range(num_headers)]
    for key, tokens in zip(chain_keys("index", b"", ids), ids, strict=True):
        store.write(key, None, tokens, [], True, {})
    least = best({"open": lambda: void(SnapshotStore(folder, 1 << 50))}, 5)
    return round(least["open"][0], 3)


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
