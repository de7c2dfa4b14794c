"""How long GPU kernels take, by CUPTI: through PyTorch's profiler, where PyTorch is installed beside."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx


@cache
def profiler() -> Any:
    """PyTorch's module `torch`; None without it or without CUDA."""
    if not mx.cuda.is_available():
        return None
    try:
        import torch
        import torch.profiler
    except ImportError:
        return None
    torch.zeros(1, device="cuda")
    return torch


def kernel_times(run: Callable[[], object]) -> dict[str, list[float]]:
    """Microseconds of every launch while `run` runs, by kernel; copies and fills are left out.

    Only where there is a `profiler()`.
    """
    torch = profiler()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
    ) as profile:
        run()
        torch.cuda.synchronize()
    by_name: dict[str, list[float]] = defaultdict(list)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith("Mem"):
            by_name[_short(event.name)].append(event.device_time)
    return dict(by_name)


def _short(name: str) -> str:
    """A kernel's name without namespaces and arguments; of ours, what it does."""
    own = re.search(r"longleaf_([a-z]+)", name)
    return own[1] if own else re.sub(r"^(void )?(\w+::)*|[<(].*", "", name)
