"""What the CUDA device is: its processors and shared memory. Asks the driver once."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import mlx.core as mx

_NUM_MULTIPROCESSORS = 16
_MAJOR = 75
_SHARED_BYTES_OPT_IN = 97


@dataclass(frozen=True)
class Device:
    """shared_bytes: what one block may use. bulk_copies: whether there is cp.async.bulk (sm_90)."""

    num_multiprocessors: int
    shared_bytes: int
    bulk_copies: bool


@cache
def available() -> bool:
    """Whether MLX runs on a CUDA device here, of an architecture with fp16 mma and cp.async (sm_80)."""
    return bool(mx.cuda.is_available()) and _attribute(_MAJOR) >= 8


@cache
def device() -> Device:
    """The device that MLX uses.

    Raises:
        RuntimeError: if there is no CUDA driver or no device.
    """
    return Device(
        num_multiprocessors=_attribute(_NUM_MULTIPROCESSORS),
        shared_bytes=_attribute(_SHARED_BYTES_OPT_IN),
        bulk_copies=_attribute(_MAJOR) >= 9,
    )


@cache
def _attribute(number: int) -> int:
    driver = ctypes.CDLL("libcuda.so.1")
    value = ctypes.c_int()
    status = driver.cuInit(0) or driver.cuDeviceGetAttribute(ctypes.byref(value), number, 0)
    if status:
        raise RuntimeError(f"the CUDA driver answered {status} when asked for device attribute {number}")
    return value.value
