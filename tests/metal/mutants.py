"""Mutation test of the checks: small automatic changes to correct kernels; what notices each?

    python -m tests.metal.mutants           all of them, about three minutes; fails on a new survivor

A survivor is either equivalent to the original or a hole in the checks or the cases: read each one.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from tests.metal.emulator import MetalError, MetalKernel, Options
from tests.metal.sample_kernels import ATTN_COMBINE, ATTN_PARTIAL, MATMUL, ROW_SUM, Attention, differs

RULES = [
    *((r"(?<![<-])<(?![<=\w])", "<="), (r"<=", "<"), (r"(?<![->])>(?![>=\w(])", ">="), (r"==", "!=")),
    *((r"(?<=[\w\])]) \+ (?=[\w(])", " - "), (r"(?<=[\w\])]) - (?=[\w(])", " + ")),
    *((r" \* ", " + "), (r" / ", " * "), (r" % ", " / "), (r"\+= ", "= ")),
    *((r"\bmax\(", "min("), (r"\bmin\(", "max("), (r"\bsimd_sum\(", "simd_max("), (r"-INFINITY", "0.0")),
    *((r"\blane\b", "sg"), (r"\bsg\b", "lane"), (r"\bR\b", "NSG"), (r"\bNSG\b", "R"), (r"\bsplits\b", "R")),
    *((r"\bcap\b", "tokens"), (r"\bG\b", "W"), (r"\bW\b", "G")),
    *((r"(?<![\w.])0(?![\w.])", "1"), (r"(?<![\w.])1(?![\w.])", "2"), (r"\b32\b", "16"), (r"\b8\b", "4")),
]
DECLARATION = re.compile(r"(const|float|int|uint|threadgroup|for|return)\b")
ATTENTION_CASES = [  # tokens, capacity, seed, rows, splits, simdgroups, extreme
    *((45, 48, 0, 3, 5, 4, 0), (1, 1, 1, 3, 5, 4, 0), (7, 16, 2, 5, 2, 2, 0), (100, 100, 0, 5, 40, 2, 0)),
    *((33, 40, 0, 3, 5, 4, 20), (33, 40, 1, 3, 5, 4, -20)),
]


EQUIVALENT = {
    # A chunk may be larger: it still ends at the last token.
    *(("partial", "line 7: - -> +"), ("partial", "line 7: / -> *")),
    # Scaled away while m is -inf; softmax doesn't see a shift; any lane of a uniform value; log2(0) is -inf.
    *(("partial", "line 18: 0 -> 1"), ("partial", "line 28: 0 -> 1"), ("partial", "line 37: 0 -> 1")),
    *(("partial", "line 53: > -> >="), ("partial", "line 53: 0 -> 1"), ("combine", "line 5: 32 -> 16")),
    *(("row_sum", "line 7: 0 -> 1"), ("row_sum", "line 12: 0 -> 1")),
    # One more tile, all zeros; what pads one factor meets the zeros that pad the other.
    *(("matmul", "line 11: < -> <="), ("matmul", "line 14: 0 -> 1"), ("matmul", "line 18: 0 -> 1")),
}
"""Survivors that were read: kernel, line and change."""


@dataclass(frozen=True)
class Mutant:
    kernel: str
    what: str
    source: str

    @property
    def is_equivalent(self) -> bool:
        return (self.kernel, self.what.split(" | ")[0]) in EQUIVALENT


def mutate(source: str) -> list[tuple[str, str]]:
    """What was changed, and the changed source. Declarations of constants stay: they rarely compile."""
    changes = []
    for number, line in enumerate(source.split("\n")):
        code = line.split("//")[0]
        if "constexpr" in code or "#" in code:
            continue
        for pattern, replacement in RULES:
            for m in re.finditer(pattern, code):
                what = f"{m.group().strip()} -> {replacement.strip()}"
                changes.append((number, what, code[: m.start()] + replacement + code[m.end() :]))
        statement = code.strip()
        if statement.endswith(";") and not DECLARATION.match(statement):
            changes.append((number, "delete", code[: len(code) - len(code.lstrip())] + ";"))
    lines = source.split("\n")
    return [
        (f"line {n + 1}: {what} | {new.strip()}", "\n".join([*lines[:n], new, *lines[n + 1 :]]))
        for n, what, new in changes
    ]


def options(seed: int) -> Options:
    return Options(seed=seed, timeout_s=2.0)


def attention_differs(partial: str = ATTN_PARTIAL, combine: str = ATTN_COMBINE) -> bool:
    attention = Attention(partial, combine)
    for tokens, capacity, seed, rows, splits, simdgroups, extreme in ATTENTION_CASES:
        out, expected = attention(
            *(tokens, 64, 2, rows, splits, simdgroups),
            capacity=capacity,
            extreme=extreme,
            options=options(seed),
        )
        if differs(out, expected):
            return True
    return False


def row_sum_differs(source: str) -> bool:
    x = np.random.default_rng(0).standard_normal((3, 777)).astype(np.float32)
    kernel = MetalKernel("r", ["x"], ["y"], source)
    for threads, seed in ((256, 0), (64, 1), (1024, 2), (32, 0)):
        (y,) = kernel([x], [(3,)], [mx.float32], (3 * threads, 1, 1), (threads, 1, 1), options=options(seed))
        if differs(y, x.sum(1)):
            return True
    return False


def matmul_differs(source: str) -> bool:
    kernel = MetalKernel("mm", ["a", "b"], ["out"], source, "#include <metal_simdgroup_matrix>\n")
    for m, k, n, seed in ((40, 50, 70, 0), (32, 16, 32, 1), (5, 3, 9, 2)):
        a = np.random.default_rng(1).standard_normal((m, k)).astype(np.float32)
        b = np.random.default_rng(2).standard_normal((k, n)).astype(np.float32)
        grid = ((n + 31) // 32 * 128, (m + 31) // 32, 1)
        template = [("T", mx.float32)]
        (c,) = kernel([a, b], [(m, n)], [mx.float32], grid, (128, 1, 1), template, options=options(seed))
        if differs(c, a @ b):
            return True
    return False


ORIGINALS: dict[str, tuple[str, Callable[[str], bool]]] = {
    "partial": (ATTN_PARTIAL, lambda source: attention_differs(partial=source)),
    "combine": (ATTN_COMBINE, lambda source: attention_differs(combine=source)),
    "row_sum": (ROW_SUM, row_sum_differs),
    "matmul": (MATMUL, matmul_differs),
}


def all_mutants() -> list[Mutant]:
    return [
        Mutant(name, what, changed)
        for name, (source, _) in ORIGINALS.items()
        for what, changed in mutate(source)
    ]


def killed_by(mutant: Mutant) -> str | None:
    """`result`, the kind of the first finding, or None for a survivor."""
    try:
        return "result" if ORIGINALS[mutant.kernel][1](mutant.source) else None
    except MetalError as e:
        return e.findings[0].kind


def main() -> None:
    judged = [(m, killed_by(m)) for m in all_mutants()]
    for name in ORIGINALS:
        kinds = Counter(str(kind) for m, kind in judged if m.kernel == name)
        print(f"{name}: {kinds.total()} mutants: " + ", ".join(f"{k} {n}" for k, n in kinds.most_common()))
    survivors = [m for m, kind in judged if kind is None and not m.is_equivalent]
    for m in survivors:
        print(f"  survived: {m.kernel} {m.what}")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
