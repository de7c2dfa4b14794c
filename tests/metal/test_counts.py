"""The counts that predictions rest on are those one would count by hand."""

import mlx.core as mx
import numpy as np

from tests.metal.emulator import MetalKernel, Options
from tests.metal.emulator.counts import count_arithmetic

SOURCE = """
  uint i = thread_position_in_grid.x;
  threadgroup float s[64];
  float4 v = ((const device float4*)x)[i];
  s[i] = fma(v.x, v.y, v.z) * 3.0f;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = simd_sum(s[63 - i]) + fast::exp2(v.x);
"""


def test_counts_of_a_small_kernel():
    kernel = MetalKernel(
        "counted", ["x"], ["y"], SOURCE, "#include <metal_simdgroup>\nusing namespace metal;\n"
    )
    x = np.ones(256, np.float32)
    prepared = kernel.prepare([x], [(64,)], [mx.float32], (64, 1, 1), (64, 1, 1))
    run = kernel.run(prepared, Options())
    assert not run.findings
    statistics = run.statistics
    assert statistics.loads == {"x": 64}
    assert statistics.bytes_read == {"x": 64 * 16}
    assert statistics.bytes_written == {"y": 64 * 4}
    assert statistics.threadgroup_accesses == 2 * 64
    assert statistics.operations == {"threadgroup_barrier": 1, "simd_sum": 2}
    counts = count_arithmetic(prepared)
    assert counts["float"] == 2 * 3  # two simdgroups: fma, product, sum
    assert counts["exp"] == 2
    np.testing.assert_allclose(run.outputs[0], np.full(64, 32 * 6.0 + 2.0))
