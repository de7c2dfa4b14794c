"""Whether this device computes attention rightly, found before a worker says that it is ready."""

from __future__ import annotations

import logging

from jobs import ModelCard
from kernels import disable_native
from kernels.self_test import attention_error
from worker.engine.errors import EngineError

log = logging.getLogger("worker.engine")

MAX_KERNEL_ERROR = 0.01
"""Relative, against float32 on the same codes: float16 arithmetic stays ten times below it."""


def check_kernels(card: ModelCard) -> None:
    """One small attention against the reference, which also builds what the first job would wait for.

    A device whose own kernels are wrong or don't compile is served by the plain ones, slowly but right.

    Raises:
        EngineError: `kernel_self_test_failed` if those are wrong too.
    """
    error = _kernel_error(card)
    if not error < MAX_KERNEL_ERROR:
        log.warning("this device's own kernels fail their self-test (error %.2g): using plain ones", error)
        disable_native()
        error = _kernel_error(card)
    if not error < MAX_KERNEL_ERROR:
        raise EngineError(
            "kernel_self_test_failed",
            f"Attention on {card.device} differs from the reference by {error:.2g}, more than "
            f"{MAX_KERNEL_ERROR}; answers would be wrong. Please report this machine.",
            error=error,
            limit=MAX_KERNEL_ERROR,
        )


def _kernel_error(card: ModelCard) -> float:
    try:
        return attention_error(card.num_q_heads, card.num_kv_heads, card.head_dim)
    except RuntimeError:  # what MLX raises for a kernel that doesn't compile
        log.exception("the kernel self-test could not run")
        return float("inf")
