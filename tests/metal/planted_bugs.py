# ruff: noqa: E501
"""Planted bugs, each with what must catch it: the kind of a finding, or `result` (only the output shows it)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from tests.metal.emulator import MetalError, MetalKernel, Options, Program, run_text
from tests.metal.emulator.toolchain import MLX_INCLUDE
from tests.metal.sample_kernels import ATTN_PARTIAL, Attention, Case, differs

F32, BF16 = mx.float32, mx.bfloat16


@dataclass(frozen=True)
class Bug:
    name: str
    case: Case
    caught_by: set[str]


def plant(source: str, old: str, new: str) -> str:
    assert old in source, old
    return source.replace(old, new, 1)


def attention(partial: str = ATTN_PARTIAL, num_tokens: int = 45, capacity: int = 0) -> Case:
    return lambda options: Attention(partial)(num_tokens, 128, 2, 4, 3, capacity=capacity, options=options)


def simple(
    source: str,
    inputs: Sequence[np.ndarray],
    shape: tuple[int, ...],
    dtype: mx.Dtype,
    threads: int,
    threadgroup: int,
    expected: np.ndarray | None = None,
    header: str = "",
) -> Case:
    """A kernel of one output over a line of threads; without `expected` only a finding can catch it."""

    def case(options: Options) -> tuple[np.ndarray, np.ndarray]:
        kernel = MetalKernel("bug", ["x", "z", "w"][: len(inputs)], ["y"], source, header)
        (y,) = kernel(inputs, [shape], [dtype], (threads, 1, 1), (threadgroup, 1, 1), options=options)
        return y, y if expected is None else expected

    return case


def sdpa_without_barrier(number: int) -> Case:
    """MLX's own sdpa_vector with one of its barriers removed."""
    barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    path = Path(MLX_INCLUDE) / "mlx/backend/metal/kernels/sdpa_vector.h"
    head, body = path.read_text().split("void sdpa_vector(", 1)
    parts = body.split(barrier)
    kept = [part + (";" if i == number else barrier) for i, part in enumerate(parts[:-1])]
    text = f"{head}void sdpa_vector({''.join(kept)}{parts[-1]}"

    def case(options: Options) -> tuple[np.ndarray, np.ndarray]:
        r = np.random.default_rng(0)
        dim, tokens, heads = 64, 40, 1
        q = r.standard_normal((heads, dim)).astype(np.float32)
        k, v = r.standard_normal((2, heads, tokens, dim)).astype(np.float32)
        out = np.zeros((heads, dim), np.float32)
        scalars = {4: np.array([1], np.int32), 5: np.array([tokens], np.int32)}
        strides = {
            i: np.array([n], np.uint64) for i, n in zip((6, 7, 8, 9), (tokens * dim, dim) * 2, strict=True)
        }
        scale = {10: np.array([dim**-0.5], np.float32)}
        buffers = {0: q, 1: k, 2: v, 3: ("out", out), **scalars, **strides, **scale}
        run_text(
            Program(text, f"sdpa_vector<float, {dim}, {dim}>"), buffers, (1024, 1, 1), (1024, 1, 1), options
        )
        s = (k[0] @ q[0]) * dim**-0.5
        p = np.exp(s - s.max())
        return out, (p @ v[0] / p.sum())[None]

    return case


def caught(bug: Bug) -> tuple[str | None, str]:
    """What caught a bug, in the natural order of threads, and what was said."""
    options = Options(timeout_s=1.0 if bug.caught_by == {"timeout"} else 60.0)
    try:
        y, expected = bug.case(options)
    except MetalError as e:
        return e.findings[0].kind, str(e.findings[0])
    return (
        ("result", "differs from NumPy") if y.shape == expected.shape and differs(y, expected) else (None, "")
    )


rng = np.random.default_rng(0)
x64 = rng.standard_normal(64).astype(np.float32)
x1k = rng.standard_normal(1024).astype(np.float32)
HELP = "inline float total(const thread float* p, int n) { float s = 0; for (int i = 0; i < n; i++) s += p[i]; return s; }\n"
DEVHELP = "inline float first(const device float* p) { return p[0]; }\n"
REV = "threadgroup float s[64]; uint i = thread_index_in_threadgroup; s[i] = x[i]; BARRIER y[i] = s[63 - i];"
B = "threadgroup_barrier(mem_flags::mem_threadgroup);"
WAR = (
    "threadgroup float s[2]; uint i = thread_index_in_threadgroup, g = simdgroup_index_in_threadgroup; float a = 0;"
    "for (int k = 0; k < 3; k++) { float v = simd_sum(x[i] * float(k + 1)); if (thread_index_in_simdgroup == 0) s[g] = v; "
    + B
    + " a += s[0] + s[1]; BARRIER } y[i] = a;"
)
war_ref = np.full(64, 6 * x64.sum(), np.float32)


BUGS = [
    Bug(
        "missing threadgroup_barrier (split-K attention)",
        attention(plant(ATTN_PARTIAL, "  threadgroup_barrier(mem_flags::mem_threadgroup);\n", "")),
        {"race", "uninitialised"},
    ),
    Bug(
        "missing second barrier in a loop (write after read)",
        simple(WAR.replace("BARRIER", ""), [x64], (64,), F32, 64, 64, war_ref),
        {"race"},
    ),
    Bug(
        "barrier with mem_none instead of mem_threadgroup",
        simple(
            REV.replace("BARRIER", "threadgroup_barrier(mem_flags::mem_none);"),
            [x64],
            (64,),
            F32,
            64,
            64,
            x64[::-1],
        ),
        {"race"},
    ),
    Bug(
        "wrong stride: runs out of the buffer",
        attention(plant(ATTN_PARTIAL, "unpack4<E>(kq + at * W", "unpack4<E>(kq + at * 2 * W")),
        {"out-of-bounds"},
    ),
    Bug(
        "wrong stride: stays inside (tokens for capacity)",
        attention(plant(ATTN_PARTIAL, "size_t(hk) * cap + t", "size_t(hk) * tokens + t"), capacity=64),
        {"result"},
    ),
    Bug(
        "off-by-one at the last block, buffer longer than T",
        attention(plant(ATTN_PARTIAL, "t < t1", "t <= t1"), capacity=64),
        {"result"},
    ),
    Bug(
        "off-by-one at the last block, buffer exactly T",
        attention(plant(ATTN_PARTIAL, "t < t1", "t <= t1"), num_tokens=45, capacity=45),
        {"out-of-bounds", "result"},
    ),
    Bug(
        "last block: (n + b - 1) / b forgotten",
        simple(
            "uint i = thread_position_in_grid.x; y[i] = x[i];",
            [x1k[:1000]],
            (1000,),
            F32,
            1000 // 64 * 64,
            64,
            x1k[:1000],
        ),
        {"unwritten"},
    ),
    Bug(
        "device pointer to a thread-pointer helper",
        simple("y[thread_position_in_grid.x] = total(x, 2);", [x64], (32,), F32, 32, 32, header=HELP),
        {"compile"},
    ),
    Bug(
        "input shrinks below 8 elements: constant to a device helper",
        simple("y[thread_position_in_grid.x] = first(x);", [x64[:4]], (32,), F32, 32, 32, header=DEVHELP),
        {"compile"},
    ),
    Bug(
        "write out of bounds (one past the end)",
        simple("uint i = thread_position_in_grid.x; y[i + 1] = x[i];", [x64], (64,), F32, 64, 32),
        {"out-of-bounds"},
    ),
    Bug(
        "grid larger than the output, no bounds check",
        simple("uint i = thread_position_in_grid.x; y[i] = 1.0;", [x64], (60,), F32, 64, 32),
        {"out-of-bounds"},
    ),
    Bug(
        "threadgroup array overrun into the next one",
        simple(
            "threadgroup float a[32], b[32]; uint i = thread_index_in_threadgroup; b[i] = 0; threadgroup float* p = a; p[i + 1] = x[i]; "
            + B
            + " y[i] = p[i + 1] + b[i];",
            [x64],
            (32,),
            F32,
            32,
            32,
        ),
        {"out-of-bounds"},
    ),
    Bug(
        "index outside of a thread array",
        simple(
            "float a[4] = {0, 1, 2, 3}; uint i = thread_position_in_grid.x; y[i] = a[i % 5];",
            [x64],
            (32,),
            F32,
            32,
            32,
        ),
        {"array-index"},
    ),
    Bug(
        "read of uninitialised threadgroup memory",
        simple(
            "threadgroup float s[64]; uint i = thread_index_in_threadgroup; if (i < 32) s[i] = x[i]; "
            + B
            + " y[i] = s[i];",
            [x64],
            (64,),
            F32,
            64,
            64,
            x64,
        ),
        {"uninitialised"},
    ),
    Bug(
        "accumulate into an output without init_value",
        simple("uint i = thread_position_in_grid.x; y[i] += x[i];", [x64], (64,), F32, 64, 32, x64),
        {"uninitialised"},
    ),
    Bug(
        "uninitialised local variable",
        simple(
            "uint i = thread_position_in_grid.x; float a; if (x[i] > 0) a = 1; y[i] = a;",
            [x64],
            (64,),
            F32,
            64,
            32,
        ),
        {"compile"},
    ),
    Bug(
        "barrier in divergent control flow",
        simple(
            "threadgroup float s[64]; uint i = thread_index_in_threadgroup; s[i] = x[i]; if (i < 32) { "
            + B
            + " } y[i] = s[i];",
            [x64],
            (64,),
            F32,
            64,
            64,
            x64,
        ),
        {"barrier-divergence"},
    ),
    Bug(
        "early return before a barrier",
        simple(
            "threadgroup float s[64]; uint i = thread_index_in_threadgroup; if (i >= 60) return; s[i] = x[i]; "
            + B
            + " y[i] = s[i];",
            [x64],
            (60,),
            F32,
            64,
            64,
            x64[:60],
        ),
        {"divergence", "barrier-divergence"},
    ),
    Bug(
        "two different barriers in if/else",
        simple(
            "threadgroup float s[64]; uint i = thread_index_in_threadgroup; if (i < 32) { s[i] = x[i]; "
            + B
            + " } else { s[i] = 0; "
            + B
            + " } y[i] = s[i];",
            [x64],
            (64,),
            F32,
            64,
            64,
        ),
        {"barrier-divergence"},
    ),
    Bug(
        "double",
        simple(
            "uint i = thread_position_in_grid.x; double a = x[i]; y[i] = float(a);", [x64], (64,), F32, 64, 32
        ),
        {"compile", "rule"},
    ),
    Bug(
        "simd_sum in a divergent branch",
        simple(
            "uint i = thread_position_in_grid.x; float s = 0; if (thread_index_in_simdgroup < 16) s = simd_sum(x[i]); y[i] = s;",
            [x64],
            (64,),
            F32,
            64,
            64,
        ),
        {"divergence"},
    ),
    Bug(
        "simd_sum in a loop with lane-dependent trip count",
        simple(
            "uint i = thread_position_in_grid.x; float s = 0; for (uint k = i; k < 50; k += 32) s += simd_sum(x[k]); y[i] = s;",
            [x64],
            (32,),
            F32,
            32,
            32,
        ),
        {"divergence"},
    ),
    Bug(
        "simd op by a partial simdgroup (grid 100, group 64)",
        simple("uint i = thread_position_in_grid.x; y[i] = simd_sum(x[i]);", [x1k], (100,), F32, 100, 64),
        {"partial-simdgroup"},
    ),
    Bug(
        "simd_shuffle from a lane that does not exist",
        simple(
            "uint i = thread_position_in_grid.x; y[i] = simd_shuffle(x[i], ushort(i + 1));",
            [x64],
            (32,),
            F32,
            32,
            32,
        ),
        {"inactive-lane"},
    ),
    Bug(
        "race between two simdgroups on threadgroup memory",
        simple(
            "threadgroup float s[1]; uint i = thread_index_in_threadgroup; float v = simd_sum(x[i]); if (thread_index_in_simdgroup == 0) s[0] = v; "
            + B
            + " y[i] = s[0];",
            [x64],
            (64,),
            F32,
            64,
            64,
            np.full(64, x64.sum(), np.float32),
        ),
        {"race"},
    ),
    Bug(
        "lanes exchange through threadgroup memory without simdgroup_barrier",
        simple(
            "threadgroup float s[32]; uint i = thread_index_in_threadgroup; s[i] = x[i]; y[i] = s[31 - i];",
            [x64],
            (32,),
            F32,
            32,
            32,
            x64[31::-1],
        ),
        {"race", "uninitialised"},
    ),
    Bug(
        "two threadgroups write one output element",
        simple("uint i = thread_position_in_grid.x; y[i % 32] = x[i];", [x64], (32,), F32, 64, 32),
        {"race"},
    ),
    Bug(
        "a threadgroup reads what another wrote in one dispatch",
        simple(
            "uint i = thread_position_in_grid.x; y[i] = x[i]; if (i >= 32) y[i] += y[i - 32];",
            [x64],
            (64,),
            F32,
            64,
            32,
        ),
        {"race"},
    ),
    Bug(
        "pointer without address space",
        simple(
            "uint i = thread_position_in_grid.x; y[i] = f(x + i);",
            [x64],
            (64,),
            F32,
            64,
            32,
            header="float f(const float* p) { return *p; }\n",
        ),
        {"rule"},
    ),
    Bug(
        "method without device qualifier on a device object",
        simple(
            "uint i = thread_position_in_grid.x; y[i] = ((const device S*)x)[i].get(2);",
            [x64],
            (64,),
            F32,
            64,
            32,
            header="struct S { float v; float get(int k = 1) const { return v * k; } float operator()(float a) { return a; } S twice() { S s; s.v = 2 * v; return s; } };\n",
        ),
        {"compile"},
    ),
    Bug(
        "cast that changes the address space",
        simple(
            "uint i = thread_position_in_grid.x; thread float* p = (thread float*)(x); y[i] = p[i];",
            [x64],
            (64,),
            F32,
            64,
            32,
        ),
        {"compile"},
    ),
    Bug(
        "constant without initialiser",
        simple(
            "uint i = thread_position_in_grid.x; y[i] = tab[i % 4];",
            [x64],
            (64,),
            F32,
            64,
            32,
            header="constant float tab[4];\n",
        ),
        {"compile"},
    ),
    Bug(
        "program-scope variable outside constant",
        simple(
            "uint i = thread_position_in_grid.x; y[i] = eps;",
            [x64],
            (64,),
            F32,
            64,
            32,
            header="const float eps = 1e-5;\n",
        ),
        {"compile"},
    ),
    Bug(
        "write to an input",
        simple("uint i = thread_position_in_grid.x; x[i] = 0; y[i] = x[i];", [x64], (64,), F32, 64, 32),
        {"compile"},
    ),
    Bug(
        "write to an input through a cast",
        simple(
            "uint i = thread_position_in_grid.x; ((device float*)x)[i] = 0; y[i] = x[i];",
            [x64],
            (64,),
            F32,
            64,
            32,
        ),
        {"write-to-input"},
    ),
    Bug(
        "float to bfloat without conversion",
        simple("uint i = thread_position_in_grid.x; y[i] = x[i];", [x64], (64,), BF16, 64, 32),
        {"compile"},
    ),
    Bug(
        "half4 assigned to float4",
        simple(
            "uint i = thread_position_in_grid.x; float4 v = half4(1.0h); y[i] = v.x + x[i];",
            [x64],
            (64,),
            F32,
            64,
            32,
        ),
        {"compile"},
    ),
    Bug(
        "max(half, float) is ambiguous",
        simple(
            "uint i = thread_position_in_grid.x; y[i] = metal::max(half(x[i]), 0.0f);",
            [x64],
            (64,),
            F32,
            64,
            32,
        ),
        {"compile"},
    ),
    Bug(
        "threadgroup variable in a helper function",
        simple(
            "uint i = thread_position_in_grid.x; y[i] = f(x[i]);",
            [x64],
            (64,),
            F32,
            64,
            32,
            header="inline float f(float v) { threadgroup float s[4]; s[0] = v; return s[0]; }\n",
        ),
        {"rule"},
    ),
    Bug(
        "misaligned float4 load",
        simple(
            "uint i = thread_position_in_grid.x; const device float4* p = (const device float4*)(x + 1); y[i] = p[i].x;",
            [x64],
            (8,),
            F32,
            8,
            8,
        ),
        {"misaligned"},
    ),
    Bug(
        "more than 32 KB of threadgroup memory",
        simple(
            "threadgroup float s[8200]; uint i = thread_position_in_grid.x; s[i] = x[i]; y[i] = s[i];",
            [x64],
            (64,),
            F32,
            64,
            64,
        ),
        {"threadgroup-memory"},
    ),
    Bug(
        "16-bit token index past 32K",
        simple(
            "short t = 0; for (int k = 0; k < 33000; k += 100) t = t + short(100); y[thread_position_in_grid.x] = float(t) + x[0];",
            [x64],
            (32,),
            F32,
            32,
            32,
            np.full(32, 33000 + x64[0]),
        ),
        {"result"},
    ),
    Bug(
        "int32 offset overflow",
        simple(
            "int i = thread_position_in_grid.x; int o = (x_shape[0] + i) * 40000000; y[i] = float(o);",
            [x64],
            (32,),
            F32,
            32,
            32,
        ),
        {"overflow"},
    ),
    Bug(
        "endless loop",
        simple(
            "uint i = thread_position_in_grid.x; volatile int k = 0; while (x[i] < 100.0) { k = k + 1; } y[i] = k;",
            [x64],
            (64,),
            F32,
            64,
            32,
        ),
        {"timeout"},
    ),
    Bug(
        "threadgroup of more than 1024 threads",
        simple("uint i = thread_position_in_grid.x; y[i] = 1;", [x64], (2048,), F32, 2048, 2048),
        {"limit"},
    ),
    Bug(
        "NaN from exp(-inf - -inf) on an empty split",
        attention(
            plant(
                plant(ATTN_PARTIAL, "mx == -INFINITY ? 0.0 : fast", "fast"),
                "sum > 0 ? mx + metal::log2(sum) : -INFINITY",
                "mx + metal::log2(sum)",
            ),
            num_tokens=1,
        ),
        {"result"},
    ),
    *(
        Bug(
            f"MLX's sdpa_vector with its barrier {i + 1} of 3 removed",
            sdpa_without_barrier(i),
            {"race", "uninitialised"},
        )
        for i in range(3)
    ),
    Bug(
        "uninitialised element of a thread array",
        simple(
            "uint i = thread_position_in_grid.x; float a[4]; a[0] = 1; y[i] = a[i % 4] + x[i];",
            [x64],
            (64,),
            F32,
            64,
            32,
            x64 + 1,
        ),
        {"result"},
    ),
]
