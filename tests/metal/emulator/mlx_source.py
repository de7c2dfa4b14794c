"""The Metal text that MLX generates for a custom kernel, on a machine without Metal.

Inside `mx.export_function` a `metal_kernel` call is traced, not run, and `verbose` prints the text.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx


def generated_source(kernel: Any, inputs: Sequence[mx.array], call: dict[str, Any]) -> str:
    """What MLX would hand to the Metal compiler, less its utils.h; the text is taken from C++'s stdout."""

    def traced(*xs: mx.array) -> Any:
        return kernel(inputs=list(xs), verbose=True, stream=mx.gpu, **call)

    sys.stdout.flush()
    with tempfile.TemporaryFile() as capture, tempfile.TemporaryDirectory() as folder:
        stdout = os.dup(1)
        try:
            os.dup2(capture.fileno(), 1)
            mx.export_function(str(Path(folder) / "kernel.mlxfn"), traced, *inputs)
        finally:
            ctypes.CDLL(None).fflush(None)
            os.dup2(stdout, 1)
            os.close(stdout)
        capture.seek(0)
        text = capture.read().decode()
    m = re.search(r"Generated source code for `[^`]*`:\n```\n(.*)\n```", text, re.S)
    if not m:
        raise RuntimeError("MLX printed no source:\n" + text[:500])
    return m.group(1)


def instantiation(source: str) -> str:
    """How the generated text names the kernel to launch: `name` or `name<float, 128>`."""
    if m := re.search(r"decltype\((.*)\) \1;", source):
        return m.group(1)
    m = re.search(r"\[\[kernel\]\] void (\w+)\(", source)
    assert m is not None, source[:500]
    return m.group(1)
