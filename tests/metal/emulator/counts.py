"""How much arithmetic a kernel does: LLVM's instructions per basic block × how often the block ran.

The counting build has no memory checks but a counter in every block. Counted are instructions that come from
the kernel's own text, not from the emulator's headers; collective operations are in `Statistics`. Addresses
that LLVM folds into a load are not counted, nor are moves, loads and stores of private memory.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

from tests.metal.emulator import toolchain
from tests.metal.emulator.dispatch import INITIALISED, Options, dispatch
from tests.metal.emulator.findings import Finding, MetalError
from tests.metal.emulator.kernel import Prepared
from tests.metal.emulator.program import load_library

SIMD_WIDTH = 32

# Kind → LLVM instructions. Widening a half is free on Apple GPUs: an operand of any instruction may be one.
_KINDS = {
    "float": {"fadd", "fsub", "fmul", "fneg", "fcmp"},
    "integer": {"add", "sub", "icmp", "select", "and", "or", "xor"},
    "shift": {"shl", "lshr", "ashr"},
    "multiply": {"mul", "sdiv", "udiv", "srem", "urem"},
    "divide": {"fdiv"},
    "convert": {"sitofp", "uitofp", "fptosi", "fptoui", "fptrunc"},
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names}
_CALLS = {
    **dict.fromkeys(("fma", "fmin", "fmax", "minnum", "maxnum", "floor"), "float"),
    **dict.fromkeys(("exp2", "log2"), "exp"),
    **dict.fromkeys(("smin", "smax", "umin", "umax"), "integer"),
    "sqrt": "divide",
}
"""Functions of the math library, wherever they are called: language.h wraps them."""

_GUARD = re.compile(r"call void @__sanitizer_cov_trace_pc_guard\([^()]*(?:\([^()]*\)[^()]*)?\)")
_INSTRUCTION = re.compile(r"^  (?:%\S+ = )?(?:tail |musttail |notail )?(\w+) (.*)$")
_LANES = re.compile(r"<(\d+) x ")
_CALLEE = re.compile(r"@(?:llvm\.)?([a-z0-9]+?)f?(?:\.f32|\.i32|\.i64)?\(")


def count_arithmetic(prepared: Prepared) -> dict[str, float]:
    """Kind of instruction → how many times a simdgroup executed one, over the whole dispatch.

    Taken from a run of its own; outputs are overwritten with the same numbers.
    """
    program = prepared.program
    path = toolchain.cached(f"{program.key}.count.so")
    text = path.with_suffix(".ll")
    if not path.exists():
        source = path.with_suffix(".cpp")
        source.write_text(program.emulated_text())
        problem = toolchain.compile_to_llvm(source, text)
        if not problem:
            text.write_text(_number_blocks(text.read_text()))
            problem = toolchain.build_llvm(text, path)
        if problem:
            raise MetalError("build", [Finding("compile", "", problem)])
    library = load_library(path)
    blocks = library.mtl_block_counts()
    mix = _instructions_per_block(text)
    before = [blocks[n] for n in range(len(mix))]
    # Unchecked writes are unseen: without the flag every output would be reported as never written.
    buffers = {i: replace(b, flags=b.flags | INITIALISED) for i, b in prepared.buffers.items()}
    findings, _ = dispatch(program, buffers, prepared.grid, prepared.threadgroup, Options(), library)
    assert not findings, findings
    total: Counter[str] = Counter()
    for n, kinds in enumerate(mix):
        times = blocks[n] - before[n]
        for kind, count in kinds.items():
            total[kind] += count * times
    return {kind: count / SIMD_WIDTH for kind, count in total.items()}


def _number_blocks(text: str) -> str:
    """Replace clang's coverage hooks by a counter with the block's number."""
    numbers = iter(range(1 << 16))
    text = _GUARD.sub(lambda _: f"call void @mtl_count(i32 {next(numbers)})", text)
    return text + "\ndeclare void @mtl_count(i32)\n"


def _instructions_per_block(path: Path) -> list[Counter[str]]:
    text = path.read_text()
    mine = _locations_of_the_kernel(text)
    blocks: list[Counter[str]] = []
    for line in text.split("\n"):
        if m := re.search(r"call void @mtl_count\(i32 (\d+)\)", line):
            assert int(m.group(1)) == len(blocks)
            blocks.append(Counter())
            continue
        m = _INSTRUCTION.match(line)
        if not m or not blocks:
            continue
        name, operands = m.groups()
        location = re.search(r"!dbg !(\d+)", line)
        if name == "call":
            callee = _CALLEE.search(operands)
            kind = _CALLS.get(callee.group(1)) if callee else None
        else:
            kind = _KIND_OF.get(name) if location and int(location.group(1)) in mine else None
        if kind:
            lanes = _LANES.search(operands.split("%")[0])
            blocks[-1][kind] += int(lanes.group(1)) if lanes else 1
    return blocks


def _locations_of_the_kernel(text: str) -> set[int]:
    """Numbers of the debug locations whose innermost function stands in the kernel's own text."""
    files = {int(n) for n in re.findall(r'^!(\d+) = !DIFile\(filename: "kernel"', text, re.M)}
    block = r"(?:DISubprogram|DILexicalBlock\w*)"
    scope = re.compile(rf"^!(\d+) = (?:distinct )?!{block}\(.*?\bfile: !(\d+)", re.M)
    scopes = {int(n) for n, file in scope.findall(text) if int(file) in files}
    location = re.compile(r"^!(\d+) = (?:distinct )?!DILocation\(.*?\bscope: !(\d+)", re.M)
    return {int(n) for n, of in location.findall(text) if int(of) in scopes}
