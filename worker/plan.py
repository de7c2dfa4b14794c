"""`python -m worker.plan MODEL`: what a model needs for a context, and whether a machine has it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from pydantic import ByteSize, TypeAdapter, ValidationError

from jobs.settings import folder_name, model_id
from worker.engine.architectures import is_unverified, refusal
from worker.engine.planner import Plan, machine_bytes, most_tokens, plan
from worker.engine.shapes import text_config
from worker.models import default_models_dir


def table(model: str, found: Plan, memory_bytes: int, num_fitting: int) -> str:
    """The plan as lines of text."""
    fits = found.total_bytes <= memory_bytes
    rows = [
        ("weights", _gb(found.weights_bytes)),
        ("KV fp16", f"{_gb(found.kv_fp16_bytes)}  (not used; for comparison)"),
        (f"KV {found.kv_format}", _gb(found.kv_bytes)),
        ("prefill working set", _gb(found.working_bytes)),
        ("total", _gb(found.total_bytes)),
        (f"fits in {_gb(memory_bytes).strip()}?", f"{'yes' if fits else 'no':>10}"),
        ("most tokens that fit", f"{num_fitting:>10,}"),
    ]
    return "\n".join(
        [f"{model}, {found.num_tokens:,} tokens", *(f"  {name:<22}{value}" for name, value in rows)]
    )


def read_config(model: str, models_dir: Path) -> dict[str, Any]:
    """The text config of a model folder, or of a model whose folder is in `models_dir`.

    Raises:
        ValueError: if there is none that the planner knows; says what to do.
    """
    folder = Path(model).expanduser()
    if not (folder / "config.json").is_file():
        folder = models_dir / folder_name(model_id(model))
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{model} is neither a model folder nor a model in {models_dir} ({error}); "
            f"`python -m worker.models pull {model}` fetches it"
        ) from error
    if not isinstance(config, dict):
        raise ValueError(f"{folder}/config.json holds no object")
    if reason := refusal(config, unverified=True):
        raise ValueError(f"{model} {reason}")
    if is_unverified(config["model_type"]):
        print(f"{config['model_type']!r} is not verified: planned as a llama of its sizes", file=sys.stderr)
    return text_config(config)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="longleaf plan", description=__doc__)
    parser.add_argument("model", metavar="MODEL", help="a model folder, or an id whose folder is there")
    parser.add_argument(
        "--context", type=int, metavar="TOKENS", help="prompt and answer; the model's context"
    )
    parser.add_argument("--memory", metavar="SIZE", help="such as 64GB; what this machine's device may use")
    parser.add_argument("--cpu", action="store_true", help="for a machine without a GPU: float32 throughout")
    parser.add_argument("--models-dir", metavar="DIR", type=Path, default=default_models_dir())
    options = parser.parse_args(arguments)
    try:
        memory = TypeAdapter(ByteSize).validate_python(options.memory or _memory_here(options.cpu))
        config = read_config(options.model, options.models_dir)
        num_tokens = options.context or config["max_position_embeddings"]
        if not 0 < num_tokens <= config["max_position_embeddings"]:
            raise ValueError(
                f"--context {num_tokens}: {options.model} has a context of "
                f"{config['max_position_embeddings']} tokens"
            )
        found = plan(config, num_tokens, on_cpu=options.cpu)
        num_fitting = most_tokens(config, memory, on_cpu=options.cpu)
    except ValidationError:
        print(f"error: --memory {options.memory}: expected bytes or a size such as 64GB", file=sys.stderr)
        return 2
    except KeyError as error:
        print(f"error: {options.model}: config.json states no {error}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(options.model, found, memory, num_fitting))
    return 0


def _memory_here(on_cpu: bool) -> int:
    if on_cpu:
        return machine_bytes()
    from worker.engine.memory import device_bytes  # loads MLX, which a plan for another machine needn't

    return device_bytes()


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:>7.2f} GB"


if __name__ == "__main__":
    sys.exit(main())
