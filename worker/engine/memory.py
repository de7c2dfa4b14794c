"""Whether this device has the memory that a request needs, and the refusal where it hasn't."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from worker.engine.errors import EngineError
from worker.engine.planner import OUTPUT_TOKENS, SUFFIX_TOKENS, machine_bytes, most_tokens, plan


def device_bytes() -> int:
    """The memory of MLX's default device; the machine's where MLX doesn't say."""
    info = mx.device_info()
    return int(info.get("memory_size") or info.get("total_memory") or machine_bytes())


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed. MLX has no type for it: on a GPU it raises RuntimeError."""
    text = str(error).lower()
    words = ("malloc", "out of memory", "insufficient memory", "unable to allocate")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(word in text for word in words)
    )


def require_memory(
    model_id: str,
    config: dict[str, Any],
    num_tokens: int,
    limit_bytes: int,
    num_suffix: int = SUFFIX_TOKENS,
    num_output: int = OUTPUT_TOKENS,
) -> int:
    """Refuse what is predicted not to fit; return the bytes that are predicted to stay free.

    Args:
        num_tokens: prompt and answer together.
        num_suffix: tokens of the prompt behind the last whole block of the reusable prefix.
        num_output: tokens of the answer.

    Raises:
        EngineError: `memory_exceeded`; names the prediction, the limit and what would fit.
    """
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    on_cuda = not on_cpu and mx.cuda.is_available()
    found = plan(config, num_tokens, num_suffix, num_output, on_cpu, on_cuda)
    if found.total_bytes <= limit_bytes:
        return limit_bytes - found.total_bytes
    num_fitting = most_tokens(config, limit_bytes, num_suffix, num_output, on_cpu, on_cuda)
    next_step = (
        f"up to {num_fitting:,} tokens would fit: send a shorter document, or choose a smaller model."
        if num_fitting
        else "no document would fit: choose a smaller model."
    )
    raise EngineError(
        "memory_exceeded",
        f"{num_tokens:,} tokens of prompt and answer need {_gb(found.total_bytes)} with {model_id} (weights "
        f"{_gb(found.weights_bytes)}, KV cache {_gb(found.kv_bytes)}, prefill {_gb(found.working_bytes)}), "
        f"but the limit is {_gb(limit_bytes)} (this device's memory, or LONGLEAF_MEMORY_BYTES); {next_step}",
        num_tokens=num_tokens,
        predicted_bytes=found.total_bytes,
        limit_bytes=limit_bytes,
        fitting_tokens=num_fitting,
    )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
