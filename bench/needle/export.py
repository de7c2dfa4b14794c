"""Make the model folder that the engine loads from a training run's float32 weights.

    python -m bench.needle.export RUN_FOLDER [MODEL_FOLDER] [--recall FILE]

The weights become float16; beside them go config.json, the tokenizer, training.json (the run's steps, curves
and recall) and the model card. A run that did not measure its recall takes the exact rows of a result of
`python -m bench.needle`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import mlx.core as mx

from bench.needle import words
from bench.needle.batches import CONTEXT_TOKENS
from bench.needle.card import write_card
from bench.needle.tokenizer import write_tokenizer

MODEL_FOLDER = Path(__file__).parent / "model"


def export(run: Path, folder: Path, recall: Path | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    weights = mx.load(str(run / "weights.safetensors"))
    assert isinstance(weights, dict)
    mx.save_safetensors(
        str(folder / "model.safetensors"),
        {name: w.astype(mx.float16) for name, w in weights.items()},
        {"format": "mlx"},
    )
    shape = json.loads((run / "shape.json").read_text())
    end = words.ID_OF[words.END]
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        **shape,
        "max_position_embeddings": CONTEXT_TOKENS,
        "rope_traditional": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "eos_token_id": end,
        "pad_token_id": end,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    write_tokenizer(folder)
    log = json.loads((run / "run.json").read_text())
    if recall:
        log["recall"] = [row for row in json.loads(recall.read_text())["rows"] if row["format"] == "exact"]
    (folder / "training.json").write_text(json.dumps(log) + "\n", encoding="utf-8")
    write_card(folder, log)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.needle.export", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path, nargs="?", default=MODEL_FOLDER)
    parser.add_argument("--recall", type=Path, metavar="FILE")
    options = parser.parse_args()
    export(options.run, options.folder, options.recall)
    print(f"{options.folder}: {sum(p.stat().st_size for p in options.folder.iterdir()) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
