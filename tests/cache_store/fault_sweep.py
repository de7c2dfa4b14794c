"""Thousands of seeded faults, each on a folder of its own, each followed by the same questions.

    PYTHONPATH=. python tests/cache_store/fault_sweep.py [--seeds 5] [--encrypted] [--report FILE.json]

A case is a folder full of blocks, an action, and a fault: the process dies (SIGKILL) at one file-system
call of the action, or that call fails; a file was damaged before; the clock jumped; a second process does
the same at the same time. Afterwards: no call raised what it doesn't promise, no wrong byte was read, the
budget holds, nothing is lost but what the fault itself hit or eviction may take, nothing that is pinned,
no temporary file stays, and the next save and restore are right. `--seeds N` goes N times through all
actions and all their calls; `--sample P` tries a share P of the calls; `--encrypted` gives tenants keys.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from faults import DAMAGES, Fault, clock_moved, damage, injected
from stored_blocks import disk_usage, files_in, get, make_chain, path_of, put, sections_of, which

from cache_store import BadBlock, BlockKey, Keyring, SnapshotStore, attach, attached

ROOM = 8192
BASE, FORK, OTHER, NEW = make_chain(4), make_chain(4, 1), make_chain(2, 2), make_chain(2, 3)
FORK.keys[:2], FORK.blocks[:2] = BASE.keys[:2], BASE.blocks[:2]
STORED = {*BASE.keys, *FORK.keys, *OTHER.keys}
PINNED = {*OTHER.keys}
CHECKPOINT = make_chain(1, 4).keys[0]
REACHED = 3
ERRORS = ("ENOSPC", "EIO", "EDQUOT", "EMFILE", "EACCES")


class Wrong(Exception):
    """A promise that was not kept."""


def keys_of(folder: Path) -> Path:
    return folder.with_name(folder.name + ".keys")


@cache
def keyring_of(folder: Path) -> Keyring | None:
    """Of the keys that lie beside a folder; asked for before a fault, it is no call of an action."""
    return Keyring(keys_of(folder)) if keys_of(folder).is_dir() else None


def open_store(folder: Path, budget: int) -> SnapshotStore:
    return SnapshotStore(folder, budget, 0, keyring=keyring_of(folder))


def prepare(folder: Path, encrypted: bool = False) -> int:
    """Fill a folder; returns a budget that it leaves a little of."""
    if encrypted:
        keys_of(folder).mkdir()
        for tenant in ("", "anna", "ben"):
            Keyring(keys_of(folder)).make(tenant)
    store = open_store(folder, 1 << 20)
    for index in range(4):
        put(store, BASE, index, exact=index < 3, tenant="anna")
    for index in (2, 3):
        put(store, FORK, index, tenant="anna")
    for index in range(2):
        put(store, OTHER, index, tenant="ben")
    attach(store, OTHER.keys[1], "logits", sections_of([]), {})
    store.pin(OTHER.keys[1])
    for layer in range(3):
        advance(store, layer)
    bad = make_chain(1, 5)
    put(store, bad, 0)
    damage(path_of(folder, bad.keys[0]), "cut", np.random.default_rng(0))
    store.match(bad.keys, bad.blocks)
    left = path_of(folder, NEW.keys[0]).parent / f".{NEW.keys[0]}.1.abc.tmp"
    left.parent.mkdir(exist_ok=True)
    left.write_bytes(bytes(5000))
    return store.total_bytes + ROOM


@dataclass(frozen=True)
class Action:
    """act: what is done. lost: the stored blocks that it may take. raises: whether it may raise OSError.

    damaged: a block that is damaged before it. lost_if_failed: what it may take where a call fails.
    reached: where the checkpoint must stand afterwards, if it has to.
    """

    act: Callable[[SnapshotStore, Path, int], None]
    lost: frozenset[BlockKey] = frozenset()
    raises: bool = False
    damaged: BlockKey | None = None
    lost_if_failed: frozenset[BlockKey] = frozenset()
    reached: int = 0


def part(layer: int) -> list[npt.NDArray[np.uint32]]:
    """What a checkpoint has of a layer."""
    return [np.arange(layer, layer + 300, dtype=np.uint32)]


def restore(store: SnapshotStore, folder: Path, budget: int) -> None:
    for chain in (BASE, FORK, OTHER):
        for key in chain.keys[: store.match(chain.keys, chain.blocks)]:
            with suppress(BadBlock):
                if which(get(store, key), key) == "wrong":
                    raise Wrong(f"wrong bytes under {key}")


def evict(store: SnapshotStore, folder: Path, budget: int) -> None:
    put(store, NEW, 0, pad_bytes=budget // 2)


def resume(store: SnapshotStore) -> int:
    """The layer that is reached, every part before it read; 0 where there is none."""
    at = store.checkpoints.resume(CHECKPOINT)
    if at is None:
        return 0
    reads = [(store.checkpoints.read_layer, layer) for layer in range(at.layer)]
    try:
        for read, layer in [*reads, (store.checkpoints.read_hidden, at.layer)]:
            (found,) = map(np.zeros_like, part(layer))
            read(CHECKPOINT, layer, [found.data])
            if not np.array_equal(found, *part(layer)):
                raise Wrong("wrong bytes in a checkpoint")
    except BadBlock:
        return 0
    return at.layer


def advance(store: SnapshotStore, layer: int = REACHED) -> None:
    store.checkpoints.save_layer(CHECKPOINT, layer, sections_of(part(layer)), {})
    store.checkpoints.save_hidden(CHECKPOINT, layer + 1, sections_of(part(layer + 1)), {})


def read_attached(store: SnapshotStore, folder: Path, budget: int) -> None:
    attach(store, BASE.keys[0], "logits", sections_of(part(0)), {})
    found = attached(store, BASE.keys[0], "logits")
    if found and bytes(found[1][0]) != part(0)[0].tobytes():
        raise Wrong("wrong bytes in an attachment")


def forget(store: SnapshotStore, folder: Path, budget: int) -> None:
    store.remove_tenant("anna")


ACTIONS = {
    "save": Action(lambda store, folder, budget: void(put(store, NEW, 0))),
    "replace": Action(
        lambda store, folder, budget: void(put(store, BASE, 3)),
        lost_if_failed=frozenset({BASE.keys[3]}),
    ),
    "evict": Action(evict, frozenset(STORED - PINNED)),
    "restore": Action(restore),
    "restore a bad block": Action(restore, frozenset({BASE.keys[1]}), damaged=BASE.keys[1]),
    "rebuild": Action(lambda store, folder, budget: void(open_store(folder, budget))),
    "rebuild with a bad block": Action(
        lambda store, folder, budget: void(open_store(folder, budget)),
        frozenset({FORK.keys[3]}),
        damaged=FORK.keys[3],
    ),
    "shrink": Action(
        lambda store, folder, budget: void(open_store(folder, budget - 4 * ROOM)),
        frozenset(STORED - PINNED),
    ),
    "remove": Action(
        lambda store, folder, budget: void(store.remove(FORK.keys[3])), frozenset({FORK.keys[3]}), True
    ),
    "remove a tenant": Action(forget, frozenset({*BASE.keys, *FORK.keys}), True),
    "pin": Action(lambda store, folder, budget: store.pin(BASE.keys[3]), raises=True),
    "unpin": Action(lambda store, folder, budget: void(store.unpin(BASE.keys[3])), raises=True),
    "attach": Action(read_attached),
    "checkpoint": Action(lambda store, folder, budget: advance(store), reached=REACHED),
    "resume": Action(lambda store, folder, budget: void(resume(store))),
    "remove a checkpoint": Action(lambda store, folder, budget: void(store.checkpoints.remove(CHECKPOINT))),
    "make a key": Action(lambda store, folder, budget: void(store.salt("carl", b""))),
    "expire": Action(lambda store, folder, budget: void(store.checkpoints.remove_expired(0)), raises=True),
}


def void(_: object) -> None:
    """Drop a result."""


class Sweep:
    def __init__(self, folder: Path, encrypted: bool = False) -> None:
        self.folder = folder
        self.template = folder / "template"
        self.budget = prepare(self.template, encrypted)
        self.cases: Counter[str] = Counter()
        self.failures: list[str] = []
        self._num = 0

    def run(self, seed: int, sample: float) -> None:
        rng = np.random.default_rng(seed)
        for name, action in ACTIONS.items():
            num_steps = self._num_steps(name)
            for step in range(num_steps):
                if rng.random() < sample:
                    self.killed(name, action, Fault("kill half" if rng.integers(2) else "kill", step))
                if rng.random() < sample:
                    self.failed(name, action, Fault(str(rng.choice(ERRORS)), step))
        for kind in DAMAGES:
            for key in sorted(STORED):
                if rng.random() < sample:
                    self.damaged(kind, key, rng)
        for _ in range(round(20 * sample)):
            self.clock(rng)
            self.two(rng)

    def _fresh(self, action: Action | None = None) -> Path:
        self._num += 1
        folder = self.folder / str(self._num)
        shutil.copytree(self.template, folder)
        if keys_of(self.template).is_dir():
            shutil.copytree(keys_of(self.template), keys_of(folder))
        keyring_of(folder)
        if action and action.damaged:
            # Damage that shows in the header, or only when the block is read.
            damage(path_of(folder, action.damaged), "cut", np.random.default_rng(self._num))
        return folder

    def _num_steps(self, name: str) -> int:
        folder = self._fresh(ACTIONS[name])
        store = open_store(folder, self.budget) if not name.startswith(("rebuild", "shrink")) else None
        with injected(Fault("kill")) as made:
            ACTIONS[name].act(store, folder, self.budget)  # type: ignore[arg-type]
        shutil.rmtree(folder)
        return len(made)

    def _act(self, name: str, action: Action, folder: Path, fault: Fault) -> None:
        store = open_store(folder, self.budget) if not name.startswith(("rebuild", "shrink")) else None
        with injected(fault):
            action.act(store, folder, self.budget)  # type: ignore[arg-type]

    def killed(self, name: str, action: Action, fault: Fault) -> None:
        folder = self._fresh(action)
        child = os.fork()
        if not child:
            logging.disable()
            with suppress(BaseException):
                self._act(name, action, folder, fault)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        self.check(f"{name}, {fault}", "killed", folder, action.lost, reached=action.reached)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            self.cases["ended before it was killed"] += 1

    def failed(self, name: str, action: Action, fault: Fault) -> None:
        folder, case = self._fresh(action), f"{name}, {fault}"
        try:
            self._act(name, action, folder, fault)
        except OSError as error:
            if not action.raises:
                self.failures.append(f"{case}: raised {error!r}\n{traceback.format_exc()}")
        except Exception as error:
            self.failures.append(f"{case}: raised {error!r}\n{traceback.format_exc()}")
        # A disk that cannot read a block costs that block.
        self.check(
            case,
            "failed",
            folder,
            action.lost | action.lost_if_failed,
            may_lose=1 if fault.kind == "EIO" else 0,
            reached=action.reached,
        )

    def damaged(self, kind: str, key: BlockKey, rng: np.random.Generator) -> None:
        folder, case = self._fresh(), f"{kind} {key}"
        store = open_store(folder, self.budget)
        damage(path_of(folder, key), kind, rng)
        try:
            restore(store, folder, self.budget)
        except Exception as error:
            self.failures.append(f"{case}: raised {error!r}\n{traceback.format_exc()}")
        self.check(case, "damaged", folder, frozenset({key}))

    def clock(self, rng: np.random.Generator) -> None:
        folder = self._fresh()
        seconds = float(rng.choice([-1, 1])) * float(10 ** rng.uniform(0, 9))
        for path in files_in(folder):
            if rng.integers(2):
                when = max(time.time() - seconds * rng.random(), 0)
                os.utime(path, (when, when))
        case = f"clock {seconds:+.0f} s"
        try:
            with clock_moved(seconds):
                store = open_store(folder, self.budget)
                restore(store, folder, self.budget)
                put(store, NEW, 0)
                evict(store, folder, self.budget)
        except Exception as error:
            self.failures.append(f"{case}: raised {error!r}\n{traceback.format_exc()}")
        self.check(case, "clock", folder, frozenset(STORED - PINNED))

    def two(self, rng: np.random.Generator) -> None:
        """Two processes save, replace, evict and restore the same prefixes; sometimes one dies."""
        folder, names = self._fresh(), ["save", "replace", "evict", "restore", "rebuild", "checkpoint"]
        children = []
        for _ in range(2):
            chosen = [str(name) for name in rng.choice(names, 3)]
            step = int(rng.integers(0, 400))
            child = os.fork()
            if not child:
                logging.disable()
                code = 1
                with suppress(BaseException), injected(Fault("kill", step)) if step < 100 else nullcontext():
                    store = open_store(folder, self.budget)
                    for name in chosen:
                        ACTIONS[name].act(store, folder, self.budget)
                    code = 0
                os._exit(code)
            children.append(child)
        for child in children:
            _, status = os.waitpid(child, 0)
            if os.WIFEXITED(status) and os.WEXITSTATUS(status):
                self.failures.append(f"two processes, case {self._num}: one raised")
        self.check(f"two processes, case {self._num}", "two processes", folder, frozenset(STORED - PINNED))

    def check(
        self,
        case: str,
        kind: str,
        folder: Path,
        lost: frozenset[BlockKey],
        may_lose: int = 0,
        reached: int = 0,
    ) -> None:
        """Ask of the folder what must hold after any fault."""
        self.cases[kind] += 1
        try:
            self._check(folder, lost, may_lose, reached)
        except Exception as error:
            self.failures.append(f"{case}: {error!r}\n{traceback.format_exc()}")
        shutil.rmtree(folder)
        shutil.rmtree(keys_of(folder), ignore_errors=True)

    def _check(self, folder: Path, lost: frozenset[BlockKey], may_lose: int, reached: int) -> None:
        if disk_usage(folder) > self.budget:
            raise Wrong(f"{disk_usage(folder)} bytes on disk, budget {self.budget}")
        store = open_store(folder, self.budget)
        if store.read_only:
            raise Wrong("the folder is read-only afterwards")
        if left := [path.name for path in files_in(folder) if path.suffix == ".tmp"]:
            raise Wrong(f"left behind: {left}")
        restore(store, folder, self.budget)
        if resume(store) < reached:
            raise Wrong("the checkpoint is lost")
        found = {entry.key for entry in store.entries() if store.info(entry.key)}
        for key in found:
            with suppress(BadBlock):
                if store.info(key).num_tokens and which(get(store, key), key) == "wrong":  # type: ignore[union-attr]
                    raise Wrong(f"wrong bytes under {key}")
        missing = STORED - found - lost
        if len(missing) > may_lose:
            raise Wrong(f"lost {len(missing)} blocks that no fault hit: {sorted(missing)}")
        if store.total_bytes != disk_usage(folder):
            raise Wrong(f"{store.total_bytes} bytes counted, {disk_usage(folder)} on disk")
        if not put(store, NEW, 0) or which(get(store, NEW.keys[0]), NEW.keys[0]) == "wrong":
            raise Wrong("the next save is not right")
        for index in range(len(BASE.keys)):
            later = path_of(folder, BASE.keys[index])
            if not put(store, BASE, index) and not later.exists():
                raise Wrong("the next save of a known chain is not right")
        if disk_usage(folder) > self.budget:
            raise Wrong("over budget after the next save")
        if store.salt("carl", b"") != store.salt("carl", b""):
            raise Wrong("a tenant has no key that stays")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--sample", type=float, default=1.0)
    parser.add_argument("--encrypted", action="store_true")
    parser.add_argument("--report", type=Path)
    options = parser.parse_args()
    logging.disable()
    # Memory as a disk: the calls are the same, and thousands of syncs cost nothing.
    memory = Path("/dev/shm")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        sweep = Sweep(Path(folder), options.encrypted)
        for seed in range(options.seeds):
            sweep.run(seed, options.sample)
    arguments = f"--seeds {options.seeds} --sample {options.sample}" + " --encrypted" * options.encrypted
    report = {
        "bench": "snapshot fault sweep",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "command": f"python tests/cache_store/fault_sweep.py {arguments}",
        "cases": sum(n for kind, n in sweep.cases.items() if kind != "ended before it was killed"),
        "by_fault": dict(sweep.cases),
        "actions": list(ACTIONS),
        "failures": len(sweep.failures),
        "seconds": round(time.perf_counter() - began, 1),
    }
    print(json.dumps(report))
    for failure in sweep.failures[:10]:
        print(failure, file=sys.stderr)
    if options.report:
        options.report.write_text(json.dumps(report) + "\n")
    sys.exit(bool(sweep.failures))


if __name__ == "__main__":
    main()
