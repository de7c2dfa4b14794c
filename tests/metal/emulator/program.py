"""One kernel of one Metal text: rewritten, checked, built, loaded on demand; results cached by content."""

from __future__ import annotations

import bisect
import ctypes
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.metal.emulator import toolchain
from tests.metal.emulator.findings import Finding, MetalError
from tests.metal.emulator.front import rewrite

# Warnings of clang that are errors here.
_REFUSED_WARNINGS = (
    *("uninitialized", "return-type", "array-bounds", "shift-count"),
    *("division-by-zero", "infinite-recursion"),
)
_METAL_WORDS = {
    "__global": "device",
    "__local": "threadgroup",
    "__private": "thread",
    "__constant": "constant",
    "_Float16": "half",
    "__bf16": "bfloat",
}
_DIAGNOSTIC = re.compile(
    r"^(?P<file>[^\n:]+):(?P<line>\d+):\d+: (?P<kind>error|warning|note): (?P<text>.*)$", re.M
)
# How the attributes of kernel parameters are filled; the others have a field of their name in thread_info.
_VECTOR_ATTRIBUTES = (
    *("thread_position_in_grid", "thread_position_in_threadgroup", "threadgroup_position_in_grid"),
    *("threads_per_grid", "threads_per_threadgroup", "dispatch_threads_per_threadgroup"),
    "threadgroups_per_grid",
)
_OTHER_ATTRIBUTES = {
    "threads_per_simdgroup": "32u",
    "thread_execution_width": "32u",
    "grid_size": "mtl::attr3{I->threads_per_grid}",
    "dispatch_quadgroups_per_threadgroup": "(I->dispatch_simdgroups_per_threadgroup * 8)",
}


class Program:
    """A kernel `call` ("name" or "name<float, 128>") of the Metal text `msl`.

    `source` is the part of the text that its author wrote as a body, for line numbers in his terms; without
    one the text stands for itself.
    """

    def __init__(
        self,
        msl: str,
        call: str,
        source: str = "",
        header: str = "",
        constants: Mapping[str, object] | None = None,
        folders: Sequence[str] = (toolchain.MLX_INCLUDE,),
    ) -> None:
        self.msl, self.call, self.source = msl, call, source
        at = msl.find(source) if source else -1
        self._first_line = msl[:at].count("\n") if at >= 0 else None
        self._header_lines = header.count("\n") + 1 if header and msl.startswith(header) else 0
        self._lines = msl.split("\n")
        given = dict(constants or {})
        self.key = toolchain.digest(toolchain.own_digest(), msl, call, repr(sorted(given.items())))
        self._unit = rewrite(msl, "kernel", folders, toolchain.MLX_PRELUDE)
        self._constants = {name: given.get(name, 0) for name in self._unit.constants}
        name = re.split(r"\W", call, maxsplit=1)[0]
        if name not in self._unit.kernels:
            raise MetalError("check", [Finding("compile", "", f"no kernel '{name}'")])
        self.params = self._unit.kernels[name].params
        self._library: ctypes.CDLL | None = None
        self._addresses: list[tuple[int, str, int]] | None = None

    def check(self) -> list[Finding]:
        """Compile under real address spaces; what Metal would refuse."""
        findings = [Finding("rule", self.where(f, line), text) for f, line, text in self._unit.errors]
        passed = toolchain.cached(f"{self.key}.ok")
        if passed.exists() and not findings:
            return []
        instantiate = (
            "" if self.source or "<" not in self.call else f"\ntemplate decltype({self.call}) {self.call};\n"
        )
        source = toolchain.cached(f"{self.key}.{os.getpid()}.check.cpp")
        source.write_text(self._text() + instantiate)
        status, diagnostics = toolchain.check(source)
        findings += self._refusals(diagnostics)
        if status and not any(f.kind == "compile" for f in findings):
            findings.append(Finding("compile", "", diagnostics[:1500]))
        if findings:
            source.unlink()
        else:
            source.replace(passed)
        return findings

    def _refusals(self, diagnostics: str) -> list[Finding]:
        findings: list[Finding] = []
        for m in _DIAGNOSTIC.finditer(diagnostics):
            text, file, line = m["text"], m["file"], int(m["line"])
            for clang, metal in _METAL_WORDS.items():
                text = text.replace(clang, metal)
            mine = file == "kernel"
            if m["kind"] == "note":  # why a candidate does not fit
                if findings and mine and "candidate" in text and "not viable" in text:
                    findings[-1].text += f" [{self.where(file, line)}: {text}]"
                continue
            if m["kind"] == "warning":
                to_bfloat = "implicit-float-conversion" in text and re.search(r"to '[^']*bfloat", text)
                if not mine or not (to_bfloat or any(word in text for word in _REFUSED_WARNINGS)):
                    continue
                if to_bfloat:
                    text = "bfloat needs an explicit conversion: " + text
            quoted = f"   | {self.line_text(file, line)}" if mine else ""
            findings.append(Finding("compile", self.where(file, line), text + quoted))
        return findings

    def library(self) -> ctypes.CDLL:
        """Compile with the emulation headers, link with the runtime, load."""
        if self._library is None:
            path = toolchain.cached(f"{self.key}.so")
            if not path.exists():
                source = path.with_suffix(".cpp")
                source.write_text(self.emulated_text())
                problem = toolchain.build(source, path)
                if problem:
                    raise MetalError("build", [Finding("compile", "", problem)])
            self._library = load_library(path)
        return self._library

    def _text(self) -> str:
        macros = "".join(f"#define MTL_FC_{n} {str(v).lower()}\n" for n, v in self._constants.items())
        return f'#include "language.h"\n{macros}{self._unit.text}'

    def emulated_text(self) -> str:
        """The text with an entry point that fills the kernel's parameters."""
        arguments = []
        for kind, what, name in self.params:
            if kind == "buffer":
                arguments.append(f"mtl::buf{{B[{what}]}}")
            elif kind == "threadgroup":
                problem = f"[[threadgroup]] parameter '{name}' is not supported"
                raise MetalError("check", [Finding("rule", "", problem)])
            elif what in _VECTOR_ATTRIBUTES:
                arguments.append(f"mtl::attr3{{I->{what}}}")
            else:
                arguments.append(_OTHER_ATTRIBUTES.get(str(what), f"I->{what}"))
        entry = 'extern "C" void mtl_entry(const __generic ulong* B, const __generic mtl::thread_info* I)'
        return f"{self._text()}\n{entry} {{ {self.call}({', '.join(arguments)}); }}\n"

    def where(self, file: str, line: int) -> str:
        """A place in its author's terms: MLX's text is header, signature, body."""
        if not line or file.endswith(("collectives.h", "language.h", "runtime.cpp")):
            return ""
        if file != "kernel":
            return f"{file}:{line}"
        if self._first_line is None:
            return f"line {line}"
        if self._first_line < line <= self._first_line + self.source.count("\n") + 1:
            return f"source line {line - self._first_line}"
        return f"header line {line}" if line <= self._header_lines else f"generated line {line}"

    def line_text(self, file: str, line: int) -> str:
        return self._lines[line - 1].strip() if file == "kernel" and 0 < line <= len(self._lines) else ""

    def line_of(self, address: int) -> tuple[str, int]:
        """The source position of an address, from the library's line table."""
        if self._addresses is None:
            self._addresses = _line_table(toolchain.cached(f"{self.key}.so"))
        i = bisect.bisect_right(self._addresses, (address, chr(0x10FFFF), 0)) - 1
        return self._addresses[i][1:] if i >= 0 else ("?", 0)


def load_library(path: Path) -> ctypes.CDLL:
    ctypes.CDLL("libm.so.6", mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(path))
    library.mtl_run.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_uint32] + [ctypes.c_void_p] * 4
    library.mtl_block_counts.restype = ctypes.POINTER(ctypes.c_uint64)
    return library


def _line_table(path: Path) -> list[tuple[int, str, int]]:
    """(address, file, line) sorted by address."""
    from elftools.elf.elffile import ELFFile

    table = []
    with path.open("rb") as f:
        dwarf = ELFFile(f).get_dwarf_info()
        for unit in dwarf.iter_CUs():
            program = dwarf.line_program_for_CU(unit)
            names = [entry.name.decode() for entry in program["file_entry"]]
            states = (entry.state for entry in program.get_entries())
            table += [(s.address, names[s.file - 1], s.line) for s in states if s]
    return sorted(table)
