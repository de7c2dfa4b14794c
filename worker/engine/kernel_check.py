"""Whether this device computes attention rightly, found before a worker says that it is ready."""

from __future__ import annotations

import logging
import math

from kernels import disable_native
from kernels.self_test import attention_error
from worker.engine.errors import EngineError
from worker.engine.model import Model

log = logging.getLogger("worker.engine")

MAX_KERNEL_ERROR = 0.01
"""Relative, against float32 on the same codes: float16 arithmetic stays ten times below it."""


def check_kernels(model: Model) -> None:
    """Small attentions against the reference, which also build what the first job would wait for.

    A device whose own kernels are wrong or don't compile is served by the plain ones, slowly but right.

    Raises:
        EngineError: `kernel_self_test_failed` if those are wrong too.
    """
    error = _kernel_error(model)
    if not error < MAX_KERNEL_ERROR:
        log.warning("this device's own kernels fail their self-test (error %.2g): using plain ones", error)
        disable_native()
        error = _kernel_error(model)
    if not error < MAX_KERNEL_ERROR:
        raise EngineError(
            "kernel_self_test_failed",
            f"Attention on {model.card.device} differs from the reference by {error:.2g}, more than "
            f"{MAX_KERNEL_ERROR}; answers would be wrong. Please report this machine.",
            error=error,
            limit=MAX_KERNEL_ERROR,
        )


def _kernel_error(model: Model) -> float:
    """The first that is too large of the kinds of blocks that the model's layers have; else the last."""
    error = math.inf
    # In the order of the layers, each kind once.
    for num_kv_heads, head_dim, format in dict.fromkeys(
        (shape.num_kv_heads, shape.head_dim, shape.format)
        for shape in model.shapes
        if shape.window is None and shape.source is None
    ):
        try:
            error = attention_error(model.card.num_q_heads, num_kv_heads, head_dim, format)
        except RuntimeError:  # what MLX raises for a kernel that doesn't compile
            log.exception("the kernel self-test could not run")
            return math.inf
        if not error < MAX_KERNEL_ERROR:
            break
    return error
