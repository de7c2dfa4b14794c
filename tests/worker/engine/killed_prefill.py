"""One run of a tiny model as a process of its own, which may kill itself in the middle of stage one.

    python -m tests.worker.engine.killed_prefill FOLDER DOCUMENT [KILLED_AT]

FOLDER holds a model and gets `snapshots`. KILLED_AT: the share of stage one after which the process gets
SIGKILL; "store": once the first block is stored. Each step of prefill is a line in the file $STEPS. Prints
the text, where stage one began, and a digest of all stored blocks. A checkpoint is due after every layer.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import sys
from pathlib import Path

from worker import accelerate

accelerate.prepare_cpu()

from cache_store import SnapshotStore  # noqa: E402
from worker.engine import model as model_loader  # noqa: E402
from worker.engine.checkpoints import CheckpointPolicy  # noqa: E402
from worker.engine.engine import Document, Engine, Sampling  # noqa: E402
from worker.engine.report import Silent  # noqa: E402

EVERY_LAYER = CheckpointPolicy(max_share=math.inf, min_prefill_s=0.0, max_repeated=0.0)


class Killing(Silent):
    """Notes what prefill reports, and ends the process at its part of it."""

    def __init__(self, kill_at: float) -> None:
        self.kill_at, self.resumed_at = kill_at, 0.0

    def progress(self, phase: str, num_done: int, num_total: int, cached_tokens: int) -> None:
        share = (num_done - cached_tokens) / (num_total - cached_tokens)
        if phase == "restore" and num_done < num_total:
            self.resumed_at = share
        if phase == "prefill":
            with open(os.environ["STEPS"], "a") as file:
                file.write(f"{share}\n")
            if share >= self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)


def kill_once_a_block_is_stored() -> None:
    write = SnapshotStore.write

    def dying(self, *args, **options):  # type: ignore[no-untyped-def]
        write(self, *args, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    SnapshotStore.write = dying  # type: ignore[method-assign]


def digest(store: SnapshotStore) -> str:
    """Of every stored block's bytes, in the order of their keys; headers tell times, so not of those."""
    whole = hashlib.sha256()
    for entry in sorted(store.entries(), key=lambda e: e.key):
        info = store.info(entry.key)
        assert info is not None
        buffers = [memoryview(bytearray(section.num_bytes)) for section in info.sections]
        store.read(entry.key, buffers)
        whole.update(entry.key.digest + bytes([info.exact]) + b"".join(buffers))
    return whole.hexdigest()


def main() -> None:
    folder, document = Path(sys.argv[1]), Path(sys.argv[2])
    kill_at = sys.argv[3] if len(sys.argv) > 3 else "9"
    if kill_at == "store":
        kill_once_a_block_is_stored()
    report = Killing(9.0 if kill_at == "store" else float(kill_at))
    store = SnapshotStore(folder / "snapshots", 1_000_000_000, min_free_bytes=0)
    engine = Engine(model_loader.load(folder, "tiny"), store, 1 << 40, checkpoints=EVERY_LAYER)
    documents = [Document("d", document.read_text())]
    output = engine.generate(documents, "Why?", Sampling(12), report)
    print(
        json.dumps(
            {
                "text": output.text,
                "prefix": output.prefix,
                "resumed_at": report.resumed_at,
                "digest": digest(store),
                "num_checkpoints": len(store.checkpoints.keys()),
            }
        )
    )


if __name__ == "__main__":
    main()
