"""Recall of the needle model through the engine, by length, depth, task and KV format.

    python -m bench.needle [--tokens 32768 65536 131072] [--formats exact int4c ...] [--depths 5]

Every document is asked cold (prefilled here), restored (its blocks read from snapshots by another engine)
and with a nonce before it and no reuse. Single-key documents hold one fact, at each depth in turn; the
other tasks share one document. `two_bits`, `one_bit` and `shifted` are int4c with every block damaged: were
that to cost no recall, the instrument would measure nothing. Prints a heatmap for each format and task and
one JSON line; the line is kept in bench/results/needle.<device>.json, the heatmaps beside it as an SVG.
131,072 tokens on a CPU take a quarter of an hour for each document and format.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, get_args

import numpy as np

from bench.machine import ROOT, command, cpu_name, git, result_path
from bench.needle import heatmap, words
from bench.needle.documents import TASKS, Document, Filler, make_document, make_facts
from worker import accelerate

SEED = 70_000
NUM_SENTENCES = 30_000


def main() -> None:
    accelerate.prepare_cpu()  # before MLX is loaded

    from bench.needle.recall import DAMAGES
    from kernels import Format

    parser = argparse.ArgumentParser(prog="python -m bench.needle", description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32_768, 65_536, 131_072])
    parser.add_argument("--formats", nargs="+", default=["exact", *get_args(Format), *DAMAGES])
    parser.add_argument("--depths", type=int, default=5, help="single-key documents at each length")
    parser.add_argument("--questions", type=int, default=20, help="of each other task at each length")
    parser.add_argument("--commit", default=git("describe", "--always", "--dirty", "--abbrev=12"))
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    options = parser.parse_args()
    device = device_name()
    path = result_path(options.out, "needle", "cpu" if device == cpu_name() else device)
    rows: list[dict[str, Any]] = []
    for more in measure(options.tokens, options.formats, options.depths, options.questions):
        rows += more
        line = json.dumps(
            {
                "bench": "needle",
                "machine": device,
                "versions": {name: metadata.version(name) for name in ("mlx", "mlx-lm", "numpy")},
                "python": platform.python_version(),
                "command": command("needle"),
                "commit": options.commit,
                "rows": rows,
            }
        )
        path.write_text(line + "\n", encoding="utf-8")
        heatmap.write(path.with_suffix(".svg"), f"Recall of the needle model on {device}", rows)
    print_heatmaps(rows)
    print(f"\n{line}")


def measure(
    lengths: list[int], formats: list[str], num_depths: int, num_questions: int
) -> Iterator[list[dict[str, Any]]]:
    """For each length and format in turn a row for each task, tenth of depth and case."""
    from bench.needle.recall import load_model

    model = load_model()
    for num_tokens in lengths:
        rng = np.random.default_rng(SEED + num_tokens)
        documents = list(make_documents(rng, num_tokens, num_depths, num_questions))
        for format in formats:
            rows = []
            found: dict[tuple[str, float, str], list[bool]] = {}
            for document in documents:
                for case, right in answers(model, document, format):
                    for question, is_right in zip(document.questions, right, strict=True):
                        depth = min(9, int(question.depth * 10)) / 10 + 0.05
                        found.setdefault((question.task, depth, case), []).append(is_right)
            for (task, depth, case), right in sorted(found.items()):
                row = {"task": task, "num_tokens": num_tokens, "depth": depth, "format": format}
                row |= {"restored": case == "restored", "nonce": case == "nonce"}
                rows.append(row | {"num_questions": len(right), "recall": sum(right) / len(right)})
            print(f"{num_tokens} tokens, {format}: done", file=sys.stderr, flush=True)
            yield rows


def make_documents(
    rng: np.random.Generator, num_tokens: int, num_depths: int, num_questions: int
) -> Iterator[Document]:
    """Single-key documents, one for each depth, then one with many facts and `num_questions` of each task."""
    filler = Filler(rng, NUM_SENTENCES)
    for i in range(num_depths):
        yield make_document(rng, filler, num_tokens, make_facts(rng, 1), np.array([(i + 0.5) / num_depths]))
    num_people = min(num_tokens // 96, 500)
    num_lists = num_hops = num_people // 10
    facts = make_facts(rng, num_people - num_lists - num_hops, num_lists, num_hops, alike=True)
    document = make_document(rng, filler, num_tokens, facts)
    asked = []
    for task in TASKS:
        of_task = [q for q in document.questions if q.task == task]
        asked += [of_task[i] for i in rng.permutation(len(of_task))[:num_questions]]
    yield Document(document.ids, asked, document.fact_starts)


def answers(model: Any, document: Document, format: str) -> Iterator[tuple[str, list[bool]]]:
    """What was right in each case; exact keys and values, and damaged ones, have the cold one alone."""
    from bench.needle.recall import DAMAGES, SNAPSHOT_BYTES, ask, ask_exactly, damage_cache, engine_of
    from cache_store import SnapshotStore

    if format == "exact":
        yield "cold", ask_exactly(model, document, document.questions).right
        return
    if format in DAMAGES:
        engine = engine_of(model, "int4c", None)
        ask(engine, document, document.questions[:1])
        damage_cache(engine, DAMAGES[format])
        yield "cold", ask(engine, document, document.questions).right
        return
    with tempfile.TemporaryDirectory() as folder:
        store = SnapshotStore(Path(folder), SNAPSHOT_BYTES, 0)
        for case in ("cold", "restored"):
            asked = ask(engine_of(model, format, store), document, document.questions)
            assert (asked.cached_tokens > 0) == (case == "restored"), "the snapshots were not used as meant"
            yield case, asked.right
    nonce = words.ids(["nonce", "number", *np.random.default_rng(1).choice(words.CODE_WORDS, 4), "."])
    behind = Document(np.concatenate([nonce, document.ids]), document.questions, document.fact_starts)
    yield "nonce", ask(engine_of(model, format, None), behind, behind.questions, reuse=False).right


def print_heatmaps(rows: list[dict[str, Any]]) -> None:
    """For each format, case and task: recall in percent, depth downwards and length across."""
    lengths = sorted({row["num_tokens"] for row in rows})
    depths = sorted({row["depth"] for row in rows})
    cases = dict.fromkeys((row["format"], row["restored"], row["nonce"]) for row in rows)
    for case in cases:
        name = " ".join([case[0], "restored" * case[1], "behind a nonce" * case[2]]).strip()
        of_case = [row for row in rows if (row["format"], row["restored"], row["nonce"]) == case]
        for task in TASKS:
            cells = {(r["depth"], r["num_tokens"]): r["recall"] for r in of_case if r["task"] == task}
            if not cells:
                continue
            print(f"\n{name}, {task}\n{'depth':>6}" + "".join(f"{n:>9}" for n in lengths))
            for depth in depths:
                shown = (cells.get((depth, n)) for n in lengths)
                print(
                    f"{depth:6.2f}" + "".join(f"{'':>9}" if c is None else f"{100 * c:9.0f}" for c in shown)
                )


def device_name() -> str:
    import mlx.core as mx

    if mx.default_device().type == mx.DeviceType.cpu:
        return cpu_name()
    return str(mx.device_info().get("device_name", "gpu"))


if __name__ == "__main__":
    main()
