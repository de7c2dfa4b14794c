"""Metal text → text for clang's C++ for OpenCL mode, line numbers kept, and what the rules say about it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tests.metal.emulator.declarations import walk_declarations
from tests.metal.emulator.dialect import collect_types, rewrite_expressions, strip_attributes
from tests.metal.emulator.tokens import Kernel, Token, Tokens, expand_includes, lex

PREPROCESSOR = re.compile(r"^([ \t]*#[^\n]*(?:\\\n[^\n]*)*)$", re.M)
MACRO = re.compile(r"([ \t]*#\s*define\s+\w+(?:\([^)]*\))?)(.*)$", re.S)


@dataclass(frozen=True)
class Unit:
    """One rewritten translation unit."""

    text: str
    kernels: dict[str, Kernel]
    errors: list[tuple[str, int, str]]
    """File, line, message, of the source itself (not of its includes)."""
    constants: dict[str, str]
    """Function constants, to be defined as macros MTL_FC_<name>."""


def rewrite(source: str, file: str, folders: Sequence[str], prelude: str | None) -> Unit:
    """Rewrite `source`, after the header `prelude` if one is named."""
    seen: set[str] = set()
    segments = expand_includes(f'#include "{prelude}"', "<prelude>", folders, seen) if prelude else []
    segments += expand_includes(source, file, folders, seen)
    tokens: list[Token] = []
    for name, number, lines in segments:
        if any(line.strip() for line in lines):
            tokens.append(Token("ws", f'\n#line {number} "{name}"\n', name, number))
            tokens += _split_preprocessor("\n".join(lines), name, number)
    u = Tokens([t for t in tokens if t.kind != "pp"])
    collect_types(u)
    for t in tokens:
        if t.kind == "pp":
            t.text = _rewrite_macro(t, u.types)
    strip_attributes(u)
    walk_declarations(u)
    rewrite_expressions(u)

    index, parts = 0, []
    for t in tokens:
        if t.kind == "pp":
            parts.append(t.text)
        else:
            parts.append(u.edits.get(index, t.text))
            index += 1
    errors = [e for e in u.errors if e[0] == file]
    return Unit("".join(parts) + "\n", u.kernels, errors, u.constants)


def _split_preprocessor(text: str, file: str, line: int) -> list[Token]:
    """Lex a text, its preprocessor lines as one token each."""
    tokens: list[Token] = []
    last = 0
    for m in PREPROCESSOR.finditer(text):
        part = text[last : m.start()]
        tokens += lex(part, file, line)
        line += part.count("\n")
        tokens.append(Token("pp", m.group(1), file, line))
        line += m.group(1).count("\n")
        last = m.end()
    return tokens + lex(text[last:], file, line)


def _rewrite_macro(t: Token, types: set[str]) -> str:
    m = MACRO.match(t.text) if re.match(r"[ \t]*#\s*define", t.text) else None
    if not m:
        return t.text
    body = Tokens(lex(m.group(2), t.file, t.line), types)
    strip_attributes(body)
    rewrite_expressions(body)
    return m.group(1) + body.text()
