"""What encryption costs a snapshot store: writing, restoring and indexing, with a key and without, in turn.

    python -m bench.encryption FOLDER [--tokens 8192 32768] [--layers 32] [--kv-heads 8] [--head-dim 128]

The same prefix of int4c tiles lies there twice. Each figure is the best of its rounds; `warm`: the files lie
in the page cache, `cold`: dropped from it before each round; `cpu`: seconds of all threads. Prints a table
and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import cryptography
import numpy as np

from bench.machine import commit, cpu_name
from bench.snapshots import BLOCK_TOKENS, SINK_TOKENS, Prefix, best, drop, restore, void, write
from cache_store import Keyring, SnapshotStore, chain_keys


def open_store(folder: Path, name: str) -> SnapshotStore:
    keyring = None
    if name == "encrypted":
        (folder / "keys").mkdir(exist_ok=True, parents=True)
        keyring = Keyring(folder / "keys")
        keyring.make("")
    return SnapshotStore(folder / name, 1 << 50, keyring=keyring)


NAMES = ("plain", "encrypted")


def measure(folder: Path, num_tokens: int, options: argparse.Namespace) -> dict[str, float]:
    """The figures of one prefix."""
    prefix = Prefix(num_tokens, options.layers, options.kv_heads, options.head_dim)
    prefix.fill()
    stores = {name: open_store(folder, name) for name in NAMES}
    mb = prefix.kv_bytes / 1e6
    row: dict[str, float] = {
        "prefix_tokens": SINK_TOKENS + BLOCK_TOKENS * prefix.num_blocks,
        "kv_mb": round(mb, 1),
    }
    for name, store in stores.items():
        began = time.perf_counter()
        write(store, prefix)
        row[f"{name}_write_mb_s"] = round(mb / (time.perf_counter() - began))
    paths = [path for store in stores.values() for path in store.folder.rglob("*.llkv")]
    runs: dict[str, Callable[[], None]] = {
        name: partial(restore, store, prefix, prefix.memory) for name, store in stores.items()
    }
    for state, rounds, before in (
        ("warm", options.rounds, lambda: None),
        ("cold", max(options.rounds // 3, 1), lambda: drop(paths)),
    ):
        least = best(runs, rounds, before)
        for name, (wall, cpu) in least.items():
            row[f"{name}_restore_{state}_s"] = round(wall, 4)
            row[f"{name}_restore_{state}_mb_s"] = round(mb / wall)
            row[f"{name}_restore_{state}_cpu_s"] = round(cpu, 4)
        row[f"encrypted_over_plain_{state}"] = round(least["plain"][0] / least["encrypted"][0], 2)
    shutil.rmtree(folder)
    return row


def index_s(folder: Path, num_headers: int) -> dict[str, float]:
    """Seconds to open a store of so many blocks."""
    rng = np.random.default_rng(2)
    ids = [rng.integers(0, 1 << 17, BLOCK_TOKENS, dtype=np.uint32) for _ in range(num_headers)]
    for name in NAMES:
        store = open_store(folder, name)
        for key, tokens in zip(chain_keys("index", b"", ids), ids, strict=True):
            store.write(key, None, tokens, [], True, {})
    runs: dict[str, Callable[[], None]] = {
        name: lambda name=name: void(open_store(folder, name)) for name in NAMES
    }
    return {name: round(wall, 3) for name, (wall, _) in best(runs, 5).items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="a new folder on the disk to measure; removed afterwards")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    sizes = {"layers": 32, "kv-heads": 8, "head-dim": 128, "headers": 2000, "rounds": 9}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    if options.folder.exists():
        parser.error(f"{options.folder} is there already")
    load = os.getloadavg()[0]
    rows = [measure(options.folder / str(tokens), tokens, options) for tokens in options.tokens]
    for name in rows[0]:
        print(f"{name:30}", *(f"{row[name]:>12}" for row in rows))
    indexed = index_s(options.folder / "headers", options.headers)
    print(f"{f'index of {options.headers} blocks, s':30} {indexed}")
    shutil.rmtree(options.folder)
    result = {
        "bench": "snapshots_encryption",
        "machine": f"{cpu_name()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "load_at_start": round(load, 1),
        "nice": os.nice(0),
        "versions": {"python": platform.python_version(), "cryptography": cryptography.__version__},
        "command": "python -m bench.encryption FOLDER --tokens "
        + " ".join(map(str, options.tokens))
        + "".join(f" --{name} {getattr(options, name.replace('-', '_'))}" for name in sizes),
        "commit": commit(),
        "index_headers": options.headers,
        "index_s": indexed,
        "rows": rows,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
