"""Whether this device has the memory that a request needs, and the refusal where it hasn't."""

from __future__ import annotations

import logging
from typing import Any

import mlx.core as mx

from worker.engine.errors import EngineError
from worker.engine.planner import OUTPUT_TOKENS, SUFFIX_TOKENS, machine_bytes, most_tokens, plan

log = logging.getLogger("worker.engine")


def device_bytes() -> int:
    """The memory of MLX's default device, or what macOS lets a GPU keep of it; the machine's if unknown."""
    info = mx.device_info()
    sizes = (_gpu_share_bytes(), info.get("memory_size"), info.get("total_memory"), machine_bytes())
    return int(next(size for size in sizes if size))


def keep_resident(num_bytes: int | None) -> None:
    """Have macOS page out none of so many bytes of MLX's; leave it to macOS where None.

    Raises:
        EngineError: `wired_bytes_exceeded` where macOS lets its GPU keep fewer.
    """
    if num_bytes is None:
        return
    share = _gpu_share_bytes()
    if share is None:
        log.warning("LONGLEAF_WIRED_BYTES has no effect here: macOS alone pages out what a GPU works on")
        return
    if num_bytes > share:
        raise EngineError(
            "wired_bytes_exceeded",
            f"LONGLEAF_WIRED_BYTES is {_gb(num_bytes)}, but macOS lets this GPU keep {_gb(share)}; "
            "set it to no more, or raise that with `sudo sysctl iogpu.wired_limit_mb=N`.",
            wired_bytes=num_bytes,
            limit_bytes=share,
        )
    mx.set_wired_limit(num_bytes)


def _gpu_share_bytes() -> int | None:
    """What macOS lets its GPU keep in memory at once; past it work is slow, or ended. None elsewhere."""
    share = mx.device_info().get("max_recommended_working_set_size")
    return int(share) if share else None


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
        f"but the limit is {_gb(limit_bytes)} (what the device may use, or LONGLEAF_MEMORY_BYTES); "
        f"{next_step}",
        num_tokens=num_tokens,
        predicted_bytes=found.total_bytes,
        limit_bytes=limit_bytes,
        fitting_tokens=num_fitting,
    )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
