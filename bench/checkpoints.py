"""What the checkpoints of a long prefill cost, and how much of it a kill could lose.

    nice python -m bench.checkpoints TEXT [--model smollm2-135m-instruct] [--tokens 6000] [--rounds 3]

The first --tokens tokens of TEXT pass through stage one with the worker's own policy and without checkpoints,
in turn, over stores in a temporary folder. `share`: seconds of writing by those of stage one. `lost_at_most`:
the longest time without a checkpoint by the same, from the start on or from the first one on. Prints one JSON
line; it is kept in bench/results/checkpoints.<device>.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.machine import commit, cpu_name
from worker import accelerate


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.checkpoints", description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    load = os.getloadavg()
    accelerate.prepare_cpu()  # before MLX is loaded

    import numpy as np

    from cache_store import SnapshotStore
    from worker.engine.checkpoints import DEFAULT_POLICY, Checkpoint, Pace
    from worker.engine.model import load as load_model
    from worker.engine.prefill import prefill_prefix
    from worker.engine.report import Silent
    from worker.engine.snapshots import Prefix
    from worker.models import default_models_dir, ensure

    class Noted(Pace):
        """Keeps when each checkpoint was written."""

        def __init__(self) -> None:
            super().__init__(DEFAULT_POLICY)
            self.times: list[float] = []

        def wrote(self, num_bytes: int, began_s: float) -> None:
            super().wrote(num_bytes, began_s)
            self.times.append(self.elapsed_s)

    model = load_model(ensure(options.model, default_models_dir()), options.model)
    text = options.text.read_text()[: 5 * options.tokens]
    tokens = np.array(model.tokenizer.encode(text)[: options.tokens], np.uint32)
    prefix = Prefix("bench", tokens)
    rows: list[dict[str, Any]] = []
    without_s: list[float] = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            store = SnapshotStore(Path(folder), 1 << 40)
            pace = Noted()
            prefill_prefix(
                model, model.new_cache(), prefix.tokens, 0, Silent(), Checkpoint(store, prefix, 0, {}, pace)
            )
            whole_s = pace.elapsed_s
            gaps = np.diff([0.0, *pace.times, whole_s])
            rows.append(
                {
                    "prefill_s": round(whole_s, 2),
                    "num_checkpoints": len(pace.times),
                    "written_s": round(pace.written_s, 3),
                    "written_mb": round(pace.written_bytes / 1e6, 1),
                    "on_disk_mb": round(sum(store.checkpoints.keys().values()) / 1e6, 1),
                    "share": round(pace.written_s / whole_s, 4),
                    "lost_at_most": round(float(gaps.max()) / whole_s, 3),
                    "lost_at_most_after_first": round(float(gaps[1:].max(initial=0.0)) / whole_s, 3),
                }
            )
            print(rows[-1], file=sys.stderr)
        began = time.perf_counter()
        prefill_prefix(model, model.new_cache(), prefix.tokens, 0, Silent())
        without_s.append(round(time.perf_counter() - began, 2))
    result = {
        "bench": "checkpoints",
        "machine": f"{cpu_name()}, {os.cpu_count()} cores",
        "load_average_at_start": [round(x, 1) for x in load],
        "nice": os.nice(0),
        "model": options.model,
        "prefix_tokens": len(prefix.tokens),
        "max_share": DEFAULT_POLICY.max_share,
        "rounds": rows,
        "prefill_without_s": without_s,
        "versions": {"python": platform.python_version(), "mlx": metadata.version("mlx")},
        "commit": commit(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
