"""A small random model of any architecture, with SmolLM2's tokenizer and weights that make choices clear."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from tests.worker.engine.test_architectures import OWN_SHAPE, SHAPE, random_weight
from worker.engine import model as model_loader
from worker.engine.model import Model


def load_tiny(path: Path, smollm2: Path, model_type: str = "llama", **changes) -> Model:
    """Write the model into `path` and load it."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(smollm2 / name, path / name)
    config = SHAPE | OWN_SHAPE.get(model_type, {}) | {"model_type": model_type, "eos_token_id": 2} | changes
    (path / "config.json").write_text(json.dumps(config))
    make, args = _get_classes(config)
    mx.random.seed(5)
    parameters = tree_flatten(make(args.from_dict(config)).parameters())
    weights = {name: random_weight(model_type, name, w) for name, w in parameters}
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
    return model_loader.load(path, "tiny")
