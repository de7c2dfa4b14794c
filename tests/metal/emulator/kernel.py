"""Metal kernels to call on a machine without Metal: MLX's custom kernels, and stand-alone texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from tests.metal.emulator.arrays import Array, BFloat16, bits_of, mlx_dtype, numpy_dtype, to_numpy
from tests.metal.emulator.dispatch import CONSTANT, INITIALISED, OUTPUT, Buffer, Options, Statistics, dispatch
from tests.metal.emulator.findings import Finding, MetalError
from tests.metal.emulator.mlx_source import generated_source, instantiation
from tests.metal.emulator.program import Program

SMALL = 8
"""MLX passes inputs of fewer elements as `constant T*`."""


@dataclass
class Prepared:
    """A call whose arrays are laid out and whose program is known, not yet run."""

    program: Program
    buffers: dict[int, Buffer]
    outputs: list[Array]
    grid: tuple[int, ...]
    threadgroup: tuple[int, ...]


@dataclass
class Run:
    """Outputs (float32 where they are bfloat16), findings and counts of a call."""

    outputs: list[np.ndarray]
    findings: list[Finding]
    statistics: Statistics = field(default_factory=Statistics)


class MetalKernel:
    """As `mx.fast.metal_kernel`, on the emulated grid.

    A call takes MLX's own generated text, checks it under real address spaces, compiles it, runs it, and
    raises MetalError if anything was found. Arrays go in as MLX or NumPy arrays and come out as NumPy's.
    """

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
        atomic_outputs: bool = False,
    ) -> None:
        self._kernel = mx.fast.metal_kernel(
            name=name,
            input_names=input_names,
            output_names=output_names,
            source=source,
            header=header,
            ensure_row_contiguous=ensure_row_contiguous,
            atomic_outputs=atomic_outputs,
        )
        self._input_names, self._output_names = list(input_names), list(output_names)
        self._source, self._header = source, header
        self._row_contiguous = ensure_row_contiguous
        self._programs: dict[tuple[Any, ...], Program] = {}

    def __call__(
        self,
        inputs: Sequence[Any],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, ...],
        threadgroup: tuple[int, ...],
        template: Sequence[tuple[str, Any]] = (),
        init_value: float | None = None,
        options: Options = Options(),
        offsets: Mapping[str, int] | None = None,
    ) -> list[np.ndarray]:
        run = self.run(
            self.prepare(
                inputs, output_shapes, output_dtypes, grid, threadgroup, template, init_value, offsets
            ),
            options,
        )
        if run.findings:
            raise MetalError("run", run.findings)
        return run.outputs

    def program(
        self,
        inputs: Sequence[Any],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, ...],
        threadgroup: tuple[int, ...],
        template: Sequence[tuple[str, Any]] = (),
        init_value: float | None = None,
    ) -> Program:
        """The program MLX would compile for such a call: one per template, dtypes, ranks and small inputs."""
        arrays = [to_numpy(a) for a in inputs]
        signature = (
            *((a.ndim, min(a.size, SMALL), str(mlx_dtype(a))) for a in arrays),
            *map(str, template),
            *map(str, output_dtypes),
        )
        if signature not in self._programs:
            call: dict[str, Any] = {
                "template": list(template),
                "grid": grid,
                "threadgroup": threadgroup,
                "output_shapes": output_shapes,
                "output_dtypes": output_dtypes,
            }
            if init_value is not None:
                call["init_value"] = init_value
            examples = [mx.zeros(a.shape, dtype=mlx_dtype(a)) for a in arrays]
            text = generated_source(self._kernel, examples, call)
            self._programs[signature] = Program(text, instantiation(text), self._source, self._header)
        return self._programs[signature]

    def prepare(
        self,
        inputs: Sequence[Any],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, ...],
        threadgroup: tuple[int, ...],
        template: Sequence[tuple[str, Any]] = (),
        init_value: float | None = None,
        offsets: Mapping[str, int] | None = None,
    ) -> Prepared:
        """Check the program and lay out the arrays. `offsets`: elements by which inputs' buffers start late.

        Raises:
            MetalError: if Metal would refuse the text.
        """
        arrays = [to_numpy(a) for a in inputs]
        program = self.program(arrays, output_shapes, output_dtypes, grid, threadgroup, template, init_value)
        refusals = program.check()
        if refusals:
            raise MetalError("check", refusals)
        named: dict[str, Buffer] = {}
        for name, array in zip(self._input_names, arrays, strict=True):
            for b in self._input_buffers(name, bits_of(array), (offsets or {}).get(name, 0)):
                named[b.name] = b
        outputs: list[Array] = []
        for name, shape, dtype in zip(self._output_names, output_shapes, output_dtypes, strict=True):
            bits = np.empty(shape, numpy_dtype(dtype))
            flags = OUTPUT
            if init_value is not None:
                bits[...] = BFloat16(init_value).bits if dtype == mx.bfloat16 else init_value
                flags |= INITIALISED
            outputs.append(BFloat16(bits) if dtype == mx.bfloat16 else bits)
            named[name] = Buffer(name, bits.reshape(-1), flags)
        buffers = {int(i): named[name] for kind, i, name in program.params if kind == "buffer"}
        return Prepared(program, buffers, outputs, grid, threadgroup)

    def run(self, prepared: Prepared, options: Options) -> Run:
        """Run a prepared call and return what was found instead of raising it."""
        findings, statistics = dispatch(
            prepared.program, prepared.buffers, prepared.grid, prepared.threadgroup, options
        )
        outputs = [o.float() if isinstance(o, BFloat16) else o for o in prepared.outputs]
        return Run(outputs, findings, statistics)

    def _input_buffers(self, name: str, x: np.ndarray, offset: int) -> list[Buffer]:
        if self._row_contiguous or x.flags.c_contiguous:
            x = np.ascontiguousarray(x)
            flat = x.reshape(-1)
        else:  # the span of memory that the view covers
            span = sum((d - 1) * s for d, s in zip(x.shape, x.strides, strict=True)) // x.itemsize + 1
            flat = np.lib.stride_tricks.as_strided(x, (span,), (x.itemsize,)).copy()
        flags = INITIALISED | (CONSTANT if x.size < SMALL else 0)
        buffers = [Buffer(name, flat, flags, offset * x.itemsize)]
        if x.ndim:
            strides = [s // x.itemsize for s in x.strides]
            for what, numbers in (
                ("shape", np.array(x.shape, np.int32)),
                ("strides", np.array(strides, np.int64)),
                ("ndim", np.array([x.ndim], np.int32)),
            ):
                buffers.append(Buffer(f"{name}_{what}", numbers, INITIALISED | CONSTANT))
        return buffers


def run_text(
    program: Program,
    buffers: Mapping[int, Any],
    grid: tuple[int, ...],
    threadgroup: tuple[int, ...],
    options: Options = Options(),
) -> Statistics:
    """Run a stand-alone kernel. `buffers`: index → input array, or ("out", array), which is written in place.

    Raises:
        MetalError: if Metal would refuse the text, or the run found something.
    """
    refusals = program.check()
    if refusals:
        raise MetalError("check", refusals)
    laid_out = {}
    for kind, index, name in program.params:
        if kind != "buffer":
            continue
        given = buffers.get(int(index), np.zeros(1, np.int32))
        if isinstance(given, tuple):
            laid_out[int(index)] = Buffer(name, given[1].reshape(-1), OUTPUT)
        else:
            a = np.ascontiguousarray(bits_of(given)).reshape(-1)
            flags = INITIALISED | (CONSTANT if a.size < SMALL else 0)
            laid_out[int(index)] = Buffer(name, a, flags)
    findings, statistics = dispatch(program, laid_out, grid, threadgroup, options)
    if findings:
        raise MetalError("run", findings)
    return statistics
