"""Metal source as tokens: the lexer, pasted includes, and the editable token list that the passes share."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

TOKEN = re.compile(
    r"""
    (?P<ws>[ \t\r\f\v]+|\\\n) | (?P<nl>\n)
  | (?P<com>//(?:\\\n|[^\n])*|/\*.*?\*/)
  | (?P<str>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
  | (?P<num>(?:0[xX][0-9a-fA-F.]+(?:[pP][+-]?\d+)?|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)[A-Za-z]*)
  | (?P<id>[A-Za-z_]\w*)
  | (?P<op>->\*|<<=|>>=|\.\.\.|::|->|\+\+|--|<<|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|\#\#|.)
""",
    re.X | re.S,
)


@dataclass
class Token:
    kind: str  # ws, nl, com, str, num, id, op; pp: a preprocessor line; mark: a #line mark
    text: str
    file: str
    line: int


@dataclass
class Kernel:
    name: str
    params: list[tuple[str, int | str, str]]
    """('buffer', index, name), ('attr', attribute, name) or ('threadgroup', index, name)."""


def lex(source: str, file: str = "kernel", line: int = 1) -> list[Token]:
    tokens = []
    for m in TOKEN.finditer(source):
        tokens.append(Token(str(m.lastgroup), m.group(), file, line))
        line += m.group().count("\n")
    return tokens


Segment = tuple[str, int, list[str]]
"""A file, the number of its first line here, lines."""


def expand_includes(source: str, file: str, folders: Sequence[str], seen: set[str]) -> list[Segment]:
    """Paste `#include "x.h"` once each. `<metal_*>` headers are language.h's business and vanish."""
    parts: list[tuple[str, int, str | list[Segment]]] = []
    for number, text in enumerate(source.split("\n"), 1):
        m = re.match(r'\s*#\s*include\s*([<"])([^>"]+)[>"]', text)
        if m and m.group(1) == '"':
            path = next((p for d in folders if os.path.exists(p := os.path.join(d, m.group(2)))), None)
            if path is None:
                parts.append((file, number, f'#error "include not found: {m.group(2)}"'))
                continue
            if path not in seen:
                seen.add(path)
                with open(path) as f:
                    parts.append((m.group(2), 1, expand_includes(f.read(), m.group(2), folders, seen)))
            parts.append((file, number, ""))
        elif m or re.match(r"\s*#\s*(pragma\s+(once|METAL|unused)|include)", text):
            parts.append((file, number, ""))
        else:
            parts.append((file, number, text))
    segments: list[Segment] = []
    expected = None
    for name, number, what in parts:
        if isinstance(what, list):
            segments += what
            expected = None
            continue
        if expected != number:
            segments.append((name, number, []))
        segments[-1][2].append(what)
        expected = number + 1
    return segments


class Tokens:
    """A token list with edits. Passes index the significant tokens, k, and see neither space nor comments."""

    def __init__(self, tokens: list[Token], types: Iterable[str] = ()) -> None:
        self.tokens = tokens
        self.code = [i for i, t in enumerate(tokens) if t.kind not in ("ws", "nl", "com")]
        self.edits: dict[int, str] = {}
        """Token index → replacement."""
        self.types = set(types)
        """Names of vector and template types, whose conversions need rewriting."""
        self.attributes: dict[int, str] = {}
        """Index of the token before `[[...]]` → what stood inside."""
        self.kernels: dict[str, Kernel] = {}
        self.constants: dict[str, str] = {}
        """Function constants: name → index."""
        self.errors: list[tuple[str, int, str]] = []
        """File, line, message."""

    def s(self, k: int) -> str:
        return self.tokens[self.code[k]].text if 0 <= k < len(self.code) else ""

    def kind(self, k: int) -> str:
        return self.tokens[self.code[k]].kind if 0 <= k < len(self.code) else ""

    def edited(self, k: int) -> str:
        return self.edits.get(self.code[k], self.s(k))

    def put(self, k: int, text: str) -> None:
        self.edits[self.code[k]] = text

    def error(self, k: int, message: str) -> None:
        t = self.tokens[self.code[min(k, len(self.code) - 1)]]
        self.errors.append((t.file, t.line, message))

    def angle(self, k: int) -> int | None:
        """k at `<`: the index of its `>`, or None where it's a comparison."""
        depth = parens = 0
        for j in range(k, min(len(self.code), k + 400)):
            x = self.s(j)
            if x in ("(", "[", "{"):
                parens += 1
            elif x in (")", "]", "}"):
                parens -= 1
                if parens < 0:
                    return None
            elif parens == 0:
                if x == "<":
                    depth += 1
                elif x == ">":
                    depth -= 1
                    if depth == 0:
                        return j
                elif x in (";", "&&", "||"):
                    return None
        return None

    def close(self, k: int, opening: str = "(", closing: str = ")") -> int | None:
        """k at or before `opening`: the index of the one that closes it."""
        depth = 0
        for j in range(k, len(self.code)):
            if self.s(j) == opening:
                depth += 1
            elif self.s(j) == closing:
                depth -= 1
                if depth == 0:
                    return j
        return None

    def text(self) -> str:
        return "".join(self.edits.get(i, t.text) for i, t in enumerate(self.tokens))
