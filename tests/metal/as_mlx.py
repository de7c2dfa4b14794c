"""The emulator in the place of `mx.fast.metal_kernel`: MLX arrays in, MLX arrays out, any finding raises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from tests.metal.emulator import BFloat16, MetalError, MetalKernel, Options, Statistics
from tests.metal.emulator.arrays import Array
from tests.metal.emulator.kernel import Prepared


class EmulatedMetal:
    """Makes kernels that run under `options`, and remembers the last run of each."""

    def __init__(self) -> None:
        self.options = Options()
        self.statistics: dict[str, Statistics] = {}
        self.prepared: dict[str, Prepared] = {}
        self.num_programs: dict[str, int] = {}

    def metal_kernel(self, name: str, **made_with: Any) -> Any:
        kernel = MetalKernel(name, **made_with)
        programs = set()

        def call(inputs: Sequence[Any], output_dtypes: Sequence[mx.Dtype], **how: Any) -> list[mx.array]:
            prepared = kernel.prepare(inputs, output_dtypes=output_dtypes, **how)
            run = kernel.run(prepared, self.options)
            if run.findings:
                raise MetalError("run", run.findings)
            programs.add(prepared.program.key)
            self.num_programs[name] = len(programs)
            self.statistics[name], self.prepared[name] = run.statistics, prepared
            return [_to_mlx(o) for o in prepared.outputs]

        return call


def _to_mlx(a: Array) -> mx.array:
    return mx.array(a.bits).view(mx.bfloat16) if isinstance(a, BFloat16) else mx.array(np.asarray(a))
