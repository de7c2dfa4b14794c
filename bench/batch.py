"""Answers written together and drafts, beside the same answers one by one and without drafts.

    python -m bench.batch [--model MODEL_OR_FOLDER] [--tokens 2048] [--text FILE] [--questions 8]

The document is examples/report.md, or --text, repeated up to --tokens. Ways take turns and times are medians,
so that whatever else the machine does falls on all. `steps`: one step of n rows of a batch, or of n tokens of
one answer, beside a step of one token. near_ties: greedy answers that part where the two likeliest logits are
closer than tests/worker/engine/near_ties.py allows for rounding; any other difference ends the run. Prints
tables and one JSON line; the line is kept in bench/results/batch.<device>.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.machine import ROOT, command, cpu_name, git, result_path
from bench.prefill_attention import alternate
from worker import accelerate

QUESTIONS = (
    "What is the text about?",
    "Name two people or places in it.",
    "What went wrong?",
    "Which numbers does it give?",
    "What happens at the end?",
    "Who decides what?",
    "What is said about money?",
    "Which words describe the weather or the water?",
)
ASK = "Question: {}\nAnswer in three sentences, from the document above."
QUOTE = "Repeat the first paragraphs of the document above word for word."
SIZES = (1, 2, 4, 8, 16)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.batch", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=2048, help="of the document")
    parser.add_argument("--text", type=Path, default=ROOT / "examples" / "report.md")
    parser.add_argument("--questions", type=int, default=len(QUESTIONS))
    parser.add_argument("--output", type=int, default=64, help="most tokens of an answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--commit", default=git("describe", "--always", "--dirty", "--abbrev=12"))
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    options = parser.parse_args()
    in_force = accelerate.prepare_cpu()  # before MLX is loaded

    import mlx.core as mx

    from worker.engine.model import load
    from worker.models import default_models_dir, ensure

    folder = Path(options.model)
    folder = folder if folder.is_dir() else ensure(options.model, default_models_dir())
    model = load(folder, folder.name)
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    device = "cpu" if on_cpu else str(mx.device_info().get("device_name"))
    load_before = os.getloadavg()[0]
    bench = Bench(model, options.text.read_text(), options.tokens, options.output, options.repeats)
    line = json.dumps(
        {
            "bench": "batch",
            "machine": {"device": device, "cpu": cpu_name(), "num_cores": len(os.sched_getaffinity(0))},
            "versions": {name: metadata.version(name) for name in ("mlx", "mlx-lm", "numpy")},
            "python": platform.python_version(),
            "openblas": in_force,
            "load": load_before,  # of the machine before the run
            "command": command("batch"),
            "commit": options.commit,
            "model": model.card.id,
            "document_tokens": bench.num_document,
            "batch": bench.batch(options.questions),
            "drafts": [
                bench.drafts("quote", QUOTE),
                *(bench.drafts(name, ASK.format(name)) for name in QUESTIONS[:2]),
            ],
            "steps": bench.steps(),
        }
    )
    print(f"\n{line}")
    path = result_path(options.out, "batch", device)
    path.write_text(line + "\n", encoding="utf-8")


class Bench:
    """A document in memory, and engines that share its model."""

    def __init__(self, model: Any, text: str, num_tokens: int, num_output: int, repeats: int) -> None:
        import mlx.core as mx

        from tests.worker.engine.near_ties import recording
        from worker.engine.engine import Document, Engine
        from worker.engine.speculate import DraftPolicy

        self._num_output, self._repeats = num_output, repeats
        self._on_cpu = mx.default_device() == mx.Device(mx.cpu)
        self._model, self._recorder = recording(model)
        self._plain = Engine(self._model, None, drafts=DraftPolicy(0))
        self._drafting = Engine(self._model, None)
        token_ids = model.tokenizer.encode(text, add_special_tokens=False)
        text = text * -(-num_tokens // len(token_ids))
        token_ids = model.tokenizer.encode(text, add_special_tokens=False)[:num_tokens]
        self._documents = [Document("document", model.tokenizer.decode(token_ids))]
        self.num_document = self._plain._prompts.build(self._documents, "").document_end
        for engine in (self._plain, self._drafting):  # from here on the prefix is in memory
            self._answer(engine, ["?"], 1)

    def _answer(self, engine: Any, instructions: Sequence[str], num_output: int = 0) -> list[Any]:
        from worker.engine.engine import Request, Sampling
        from worker.engine.report import Silent

        sampling = Sampling(num_output or self._num_output)
        outputs: list[Any] = engine.answer(
            self._documents, [Request(i, sampling, Silent()) for i in instructions]
        )
        return outputs

    def _race(self, ways: list[Callable[[], list[Any]]]) -> tuple[list[float], list[list[Any]], list[Any]]:
        """Median seconds, outputs and tokens of each way."""
        outputs: list[list[Any]] = [[] for _ in ways]
        tokens: list[Any] = [[] for _ in ways]

        def once(index: int) -> None:
            self._recorder.take()
            outputs[index] = ways[index]()
            tokens[index] = self._recorder.take()

        if not self._on_cpu:
            for index in range(len(ways)):
                once(index)  # a GPU's kernels are compiled at first use
        seconds = alternate([lambda i=i: once(i) for i in range(len(ways))], self._repeats)
        return seconds, outputs, tokens

    def _num_near_ties(self, instructions: Sequence[str], these: Any, those: Any) -> int:
        from tests.worker.engine.near_ties import num_near_ties

        prompts = [self._plain._prompts.build(self._documents, i) for i in instructions]
        return num_near_ties(self._model, prompts, these, those)

    def batch(self, num_questions: int) -> dict[str, Any]:
        instructions = [ASK.format(QUESTIONS[i % len(QUESTIONS)]) for i in range(num_questions)]
        seconds, outputs, tokens = self._race(
            [
                lambda: [self._answer(self._plain, [i])[0] for i in instructions],
                lambda: self._answer(self._plain, instructions),
            ]
        )
        row = {
            "num_questions": num_questions,
            "num_output_tokens": [len(t) for t in tokens[0]],
            "single_s": seconds[0],
            "batch_s": seconds[1],
            "single_decode_s": sum(o.timing.decode_s for o in outputs[0]),
            "batch_decode_s": sum(o.timing.decode_s for o in outputs[1]),
            "same_answers": sum(a == b for a, b in zip(*tokens, strict=True)),
            "near_ties": self._num_near_ties(instructions, *tokens),
        }
        print(f"{num_questions} questions on {self.num_document} tokens{'':8}together   one by one   times")
        for what, together, single in (
            ("questions and answers, s", "batch_s", "single_s"),
            ("answers alone, s", "batch_decode_s", "single_decode_s"),
        ):
            ratio = row[single] / row[together]
            print(f"{what:32}{row[together]:14.2f}{row[single]:13.2f}{ratio:8.2f}", flush=True)
        print(f"same answers {row['same_answers']}, near-ties {row['near_ties']}\n")
        return row

    def drafts(self, name: str, instruction: str) -> dict[str, Any]:
        seconds, outputs, tokens = self._race(
            [
                lambda: self._answer(self._plain, [instruction], 2 * self._num_output),
                lambda: self._answer(self._drafting, [instruction], 2 * self._num_output),
            ]
        )
        usage = outputs[1][0].usage
        row = {
            "instruction": name,
            "num_output_tokens": usage.output_tokens,
            "drafted_tokens": usage.drafted_tokens,
            "accepted_tokens": usage.accepted_tokens,
            "plain_s": seconds[0],
            "drafts_s": seconds[1],
            "plain_decode_s": outputs[0][0].timing.decode_s,
            "drafts_decode_s": outputs[1][0].timing.decode_s,
            "near_ties": self._num_near_ties([instruction], *tokens),
        }
        times = row["plain_decode_s"] / row["drafts_decode_s"]
        right = f"{usage.accepted_tokens}/{usage.drafted_tokens}"
        print(
            f"drafts, {name:34}{usage.output_tokens:5} tokens, {right} right, decode {times:.2f} times faster"
        )
        return row

    def steps(self) -> list[dict[str, Any]]:
        """Seconds of a step by its number of rows, and by its number of tokens."""
        import mlx.core as mx

        from worker.engine.batch import BatchCache
        from worker.engine.decode import forward
        from worker.engine.products import rows_joined

        cache = self._plain._held.cache
        if cache is None:
            raise RuntimeError("the engine has no prefix in memory: the document fills no block")
        forward(self._model, cache, mx.array([[1] * 16]))

        def tokens(num: int) -> None:
            mx.eval(forward(self._model, cache, mx.array([[1] * num])), cache.arrays())
            cache.drop(num)

        def rows(batch: BatchCache, num: int) -> None:
            batch.begin_step()
            mx.eval(forward(self._model, batch, mx.array([[1]] * num)), batch.arrays())

        batches = []
        for num in SIZES:
            batches.append(BatchCache(cache))
            for _ in range(num):
                batches[-1].add()
        repeats = 5 * self._repeats
        with rows_joined(self._model.modules):
            by_rows = alternate(
                [lambda b=b, n=n: rows(b, n) for b, n in zip(batches, SIZES, strict=True)], repeats
            )
        by_tokens = alternate([lambda n=n: tokens(n) for n in SIZES], repeats)
        print("\nof a step   " + "".join(f"{n:>8}" for n in SIZES))
        for what, seconds in (("rows", by_rows), ("tokens", by_tokens)):
            print(f"{what:12}" + "".join(f"{s / by_tokens[0]:8.2f}" for s in seconds), flush=True)
        return [
            {"size": n, "rows_s": r, "tokens_s": t} for n, r, t in zip(SIZES, by_rows, by_tokens, strict=True)
        ]


if __name__ == "__main__":
    main()
