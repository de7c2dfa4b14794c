"""Train the needle model on one GPU, in runs that go on where the last one stopped.

    python -m bench.needle.train --out FOLDER --seconds 300 --phases 512:60,4096:60,32768:60,131072:120

Every step sees the same number of tokens; sequences get longer from phase to phase. A phase ends when
its answers are right (`--advance`) or its time is over. FOLDER receives, each minute and at the end,
weights.safetensors (float32, the names of mlx_lm), muon.safetensors, adam.safetensors, shape.json, run.json
(steps, tokens seen, curves, recall); a run whose FOLDER holds them goes on from there. With `--start` a run
begins from a model folder, its optimiser at rest.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.needle import transformer, words
from bench.needle.batches import Batch, batches
from bench.needle.documents import TASKS
from bench.needle.optimizer import STATES, Optimizer
from bench.needle.probe import recall_rows
from bench.needle.transformer import Layer, Shape, Transformer

MATRIX_RATE, VECTOR_RATE, DECAY = 0.02, 0.003, 0.05
WARMUP_STEPS = 20
SEED = 1


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.needle.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", type=Path, help="a model folder to begin from, where --out holds no run")
    parser.add_argument("--seconds", type=float, required=True, help="of the whole run, recall left out")
    parser.add_argument("--phases", required=True, help="LENGTH:SECONDS, comma-separated")
    parser.add_argument(
        "--advance", type=float, default=0.985, help="share of right answer tokens that ends a phase"
    )
    parser.add_argument("--tokens", type=int, default=131_072, help="in a step")
    parser.add_argument("--peak", type=float, default=1.0, help="of the learning rates")
    parser.add_argument(
        "--cool", type=float, default=0.35, help="share of the run in which they fall to nothing"
    )
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--probe", default="", help="lengths at which recall is measured at the end, comma-separated"
    )
    options = parser.parse_args()
    torch.manual_seed(SEED)
    run = Run(options)
    try:
        run.train()
    finally:
        run.save()
    if options.probe:
        run.measure([int(n) for n in options.probe.split(",")])
        run.save()
    run.stop()


class Producers:
    """Processes that make batches ahead of the step that takes them."""

    def __init__(self, num_workers: int, tokens_per_batch: int, length: int, seed: int) -> None:
        context = multiprocessing.get_context("fork")
        self.length = context.Value("i", length)
        self._queue = context.Queue(maxsize=num_workers)
        self._processes = [
            context.Process(
                target=_produce, args=(seed + i, tokens_per_batch, self.length, self._queue), daemon=True
            )
            for i in range(num_workers)
        ]
        for process in self._processes:
            process.start()

    def take(self) -> Batch:
        return self._queue.get(timeout=120)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()


def _produce(seed: int, tokens_per_batch: int, length: Any, into: Any) -> None:
    for batch in batches(seed, tokens_per_batch, lambda: length.value):
        into.put(batch)


class Run:
    """Model, optimiser and curves; `train` mutates them, `save` writes them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._began = time.perf_counter()
        self._options = options
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        phases = (part.split(":") for part in options.phases.split(","))
        self._phases = [(int(length), float(seconds)) for length, seconds in phases]
        self._model = Transformer(Shape(words.VOCAB_SIZE, num_hidden_layers=options.layers)).to(self._device)
        self._optimizer = Optimizer(self._model, MATRIX_RATE, VECTOR_RATE, DECAY)
        self._log: dict[str, Any] = {
            "steps": 0,
            "tokens": 0,
            "seconds": 0.0,
            "runs": [],
            "curve": [],
            "recall": [],
        }
        state = options.out / "run.json"
        if state.exists():
            self._log = json.loads(state.read_text())
            self._model.load_weights(load_file(options.out / "weights.safetensors"))
            self._optimizer.load({name: load_file(options.out / f"{name}.safetensors") for name in STATES})
        elif options.start:
            self._model.load_weights(load_file(options.start / "model.safetensors"))
        # Each run draws documents of its own, after those that the steps so far have seen.
        seed = SEED + 1000 * (1 + self._log["steps"])
        self._producers = Producers(options.workers, options.tokens, self._phases[0][0], seed)
        self._saved = time.perf_counter()
        self._steps_here = 0

    def train(self) -> None:
        options, model = self._options, self._model
        if self._device == "cuda":
            torch.set_float32_matmul_precision("high")
            transformer.FASTEST_FIRST[:] = _fastest_attention()
            if not options.eager:
                model.before, model.after = (
                    torch.compile(f, dynamic=False) for f in (Layer.before, Layer.after)
                )
        this_run = {"phases": [], "attention": [b.name for b in transformer.FASTEST_FIRST]}
        self._log["runs"].append(this_run)
        for index, (length, seconds) in enumerate(self._phases):
            started, first_step = self._elapsed(), self._log["steps"]
            self._producers.length.value = length
            is_last = index == len(self._phases) - 1
            self._run_phase(
                length, options.seconds if is_last else min(started + seconds, options.seconds), is_last
            )
            phase = {
                "length": length,
                "steps": self._log["steps"] - first_step,
                "seconds": round(self._elapsed() - started, 1),
            }
            this_run["phases"].append(phase)
            print("phase", json.dumps(phase), flush=True)

    def _elapsed(self) -> float:
        return time.perf_counter() - self._began

    def _run_phase(self, length: int, until: float, is_last: bool) -> None:
        window: list[Tensor] = []
        num_steps, good = 0, 0
        step_began = time.perf_counter()
        while self._elapsed() < until:
            batch = self._producers.take()
            if batch.ids.shape[1] > length:
                continue
            window.append(self._step(batch))
            num_steps += 1
            every = 20 if length < 65_536 else 5
            if len(window) == every:
                loss, right, *counts = torch.stack(window).mean(0).tolist()
                shares = zip(counts[: len(TASKS)], counts[len(TASKS) :], strict=True)
                by_task = [round(n / max(total, 1e-9), 4) for n, total in shares]
                window.clear()
                ms = (time.perf_counter() - step_began) / every * 1e3
                step_began = time.perf_counter()
                row = [self._log["steps"], length, round(loss, 4), round(right, 4), by_task]
                self._log["curve"].append(row)
                if num_steps % (5 * every) == 0:
                    waiting = self._producers._queue.qsize()
                    print(f"{self._elapsed():6.1f}s", *row, f"{ms:.0f} ms, {waiting} waiting", flush=True)
                good = good + 1 if right >= self._options.advance else 0
                if good >= 2 and not is_last:
                    return
                if time.perf_counter() - self._saved > 60:
                    self.save()

    def _step(self, batch: Batch) -> Tensor:
        """One update; returns loss, share of right tokens, right tokens and all by task, on the device."""
        device = self._device
        ids = torch.from_numpy(batch.ids).to(device, non_blocking=True).long()
        positions = torch.from_numpy(batch.positions).to(device, non_blocking=True)
        learned = torch.from_numpy(batch.learned).to(device, non_blocking=True).long()
        flat = ids.flatten()
        wanted = flat[learned + 1]
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = self._model(ids, positions, learned)
        loss = F.cross_entropy(logits, wanted)
        loss.backward()
        self._optimizer.step(self._scale())
        self._log["steps"] += 1
        self._steps_here += 1
        self._log["tokens"] += ids.numel()
        with torch.no_grad():
            right = (logits.argmax(-1) == wanted).float()
            tasks = torch.from_numpy(batch.tasks).to(device, non_blocking=True).long()
            by_task = torch.zeros(2, len(TASKS), device=device)
            by_task[0].index_add_(0, tasks, right)
            by_task[1].index_add_(0, tasks, torch.ones_like(right))
            return torch.cat([loss.detach()[None], right.mean()[None], *by_task])

    def _scale(self) -> float:
        """Of the learning rates: warm-up in steps, then full, then falling in the run's last part."""
        left = (1 - self._elapsed() / self._options.seconds) / self._options.cool
        return self._options.peak * min(1.0, (self._steps_here + 1) / WARMUP_STEPS, max(left, 0.03))

    def measure(self, lengths: list[int]) -> None:
        self._producers.stop()
        self._log["recall"] = recall_rows(self._model, lengths, self._device)

    def save(self) -> None:
        out = self._options.out
        out.mkdir(parents=True, exist_ok=True)
        save_file(self._model.weights(), out / "weights.safetensors")
        (out / "shape.json").write_text(json.dumps(self._model.shape.config()))
        for name, state in self._optimizer.state().items():
            save_file(state, out / f"{name}.safetensors")
        self._log["seconds"] = round(self._log["seconds"] + time.perf_counter() - self._saved, 1)
        (out / "run.json").write_text(json.dumps(self._log))
        self._saved = time.perf_counter()

    def stop(self) -> None:
        self._producers.stop()


def _fastest_attention() -> list[SDPBackend]:
    """cuDNN's or PyTorch's own flash attention first, whichever takes less time for a long sequence here."""
    times = []
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        q, k, v = (
            torch.randn(1, 8, 65_536, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in "qkv"
        )
        seconds = float("inf")
        try:
            with sdpa_kernel([backend]):
                for _ in range(2):
                    torch.cuda.synchronize()
                    began = time.perf_counter()
                    F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
                    torch.cuda.synchronize()
                    seconds = time.perf_counter() - began
        except RuntimeError as error:
            print(backend.name, error, flush=True)
        print(f"{backend.name}: {seconds * 1e3:.1f} ms for 65,536 tokens, forward and backward", flush=True)
        times.append((seconds, backend.name, backend))
    return [backend for _, _, backend in sorted(times, key=lambda x: x[:2])] + [SDPBackend.MATH]


if __name__ == "__main__":
    main()
