"""Checks and runs Metal kernels on Linux x86-64, without Metal and without a GPU.

    MLX's own generated text → rewrite (front, dialect, declarations, rules) → clang under real address
    spaces (program, toolchain, language.h) → emulated grid (dispatch, collectives.h, runtime.cpp), which
    checks bounds, initialisation, races and divergence on every access → outputs and findings (kernel).

NOTES.md says how each part works and what it cannot see.
"""

from tests.metal.emulator.arrays import BFloat16
from tests.metal.emulator.dispatch import Options, Statistics
from tests.metal.emulator.findings import Finding, MetalError
from tests.metal.emulator.kernel import MetalKernel, run_text
from tests.metal.emulator.program import Program

__all__ = [
    "BFloat16",
    "Finding",
    "MetalError",
    "MetalKernel",
    "Options",
    "Program",
    "Statistics",
    "run_text",
]
