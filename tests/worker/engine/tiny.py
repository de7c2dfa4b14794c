"""A small random model of any architecture, with SmolLM2's tokenizer and weights that make choices clear."""

from pathlib import Path

from tests.worker.engine.test_architectures import OWN_SHAPE, SHAPE, write_model
from worker.engine import model as model_loader
from worker.engine.model import Model


def load_tiny(path: Path, smollm2: Path, model_type: str = "llama", **changes) -> Model:
    """Write the model into `path` and load it."""
    config = SHAPE | OWN_SHAPE.get(model_type, {}) | {"model_type": model_type, "eos_token_id": 2} | changes
    return model_loader.load(write_model(path, smollm2, config), "tiny")
