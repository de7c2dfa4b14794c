"""A walk over all declarations: rewrites those that clang reads otherwise, notes kernels, applies the rules.

threadgroup T x[N];                   threadgroup T (&x)[N] = mtl::tg<T[N]>("x");
methods without an address space      work on thread objects only: the other overloads are deleted
int2 a(x, y);                         int2 a = mtl::mk<int2>(x, y);
"""

from __future__ import annotations

import re

from tests.metal.emulator import rules
from tests.metal.emulator.dialect import SPACES, TYPES, VECTORS, is_constructor
from tests.metal.emulator.tokens import Kernel, Tokens

STATEMENTS = ("return", "if", "for", "while", "do", "else", "switch", "case", "break", "continue")
MAX_BUFFERS = 31


def walk_declarations(u: Tokens) -> None:
    names = {u.s(i) for i in range(len(u.code)) if u.kind(i) == "id" and u.s(i - 1) not in (".", "->")}
    functions: list[rules.Function] = []
    scopes: list[str] = []  # of every open brace: namespace, class, kernel, function, block
    head = 0  # first token of the current declaration
    for k in range(len(u.code)):
        x = u.s(k)
        rules.check_word(u, k, names)
        in_function = "function" in scopes or "kernel" in scopes
        if x == "{":
            scopes.append(_open_scope(u, head, k, scopes, functions))
            head = k + 1
        elif x == "}":
            scopes = scopes[:-1]
            head = k + 1
        elif x == ";":
            words = [u.s(i) for i in range(head, k)]
            if not in_function and "(" in words and words[0] != "static_assert":
                rules.check_parameters(u, head, k)
            head = k + 1
        elif in_function and k == head and x not in STATEMENTS:
            _local(u, k, scopes)
        elif in_function and x == "(" and u.s(k - 1) == "for":
            _local(u, k + 1, scopes)
        if in_function and x == "(":
            rules.check_cast(u, k)
    rules.check_recursion(u, functions)


def _open_scope(u: Tokens, head: int, k: int, scopes: list[str], functions: list[rules.Function]) -> str:
    """What the brace at k opens; `head` is the first token of its declaration."""
    words = [u.s(i) for i in range(head, k)]
    if "function" in scopes or "kernel" in scopes:
        return "block"
    if scopes and scopes[-1] == "class" and "(" in words:
        _method(u, head, k)
        return "function"
    if "namespace" in words or "extern" in words:
        return "namespace"
    outside = _head_words(u, head, k)
    if {"struct", "class", "union", "enum"} & set(outside):
        return "class"
    if "(" not in words or ("=" in outside and "operator" not in outside):
        return "block"
    rules.check_parameters(u, head, k)
    if "kernel" in words or any(u.edited(i) == " kernel " for i in range(head, k)):
        _kernel(u, head, k)
        return "kernel"
    end = u.close(k, "{", "}")
    if end:
        name = next((i - 1 for i in range(head, k) if u.s(i) == "(" and u.kind(i - 1) == "id"), k - 1)
        calls = {u.s(i) for i in range(k, end) if u.kind(i) == "id" and u.s(i + 1) == "("}
        functions.append(rules.Function(u.s(name), k, "template" in words, calls))
    return "function"


def _head_words(u: Tokens, a: int, b: int) -> list[str]:
    """Words of a declaration's head outside template<...> and (...)."""
    k, words = a, []
    while k < b:
        if u.s(k) == "template" and u.s(k + 1) == "<":
            k = (u.angle(k + 1) or k) + 1
        elif u.s(k) == "(":
            k = (u.close(k) or k) + 1
        else:
            words.append(u.s(k))
            k += 1
    return words


def _kernel(u: Tokens, a: int, b: int) -> None:
    """Note a kernel's parameters and what they are bound to."""
    k = a
    while k < b and not (u.s(k) == "(" and u.kind(k - 1) == "id"):
        k = (u.angle(k + 1) or k) + 1 if u.s(k) == "template" else k + 1
    name, end = u.s(k - 1), u.close(k)
    assert end is not None
    params: list[tuple[str, int | str, str]] = []
    for p, q in _split_parameters(u, k, end):
        key = next((i for i in range(q - 1, p - 1, -1) if u.code[i] in u.attributes), None)
        text = u.attributes[u.code[key]] if key is not None else ""
        param = u.s(key if key is not None else next((i - 1 for i in range(p, q) if u.s(i) == "["), q - 1))
        if m := re.match(r"(buffer|threadgroup)\((\d+)\)", text):
            params.append((m.group(1), int(m.group(2)), param))
        elif text:
            params.append(("attr", text.split(",")[0], param))
        elif {"*", "&", "["} & {u.s(i) for i in range(p, q)}:  # Metal numbers them in order
            used = [int(o[1]) for o in params if o[0] == "buffer"]
            params.append(("buffer", max(used, default=-1) + 1, param))
        else:
            u.error(p, f"kernel parameter without attribute in '{name}'")
    if sum(kind == "buffer" for kind, _, _ in params) > MAX_BUFFERS:
        u.error(k, f"more than {MAX_BUFFERS} buffer arguments")
    u.kernels[name] = Kernel(name, params)


def _split_parameters(u: Tokens, k: int, end: int) -> list[tuple[int, int]]:
    params, depth, last = [], 0, k
    for j in range(k + 1, end + 1):
        x = u.s(j)
        if x in ("<", "(", "["):
            depth += 1
        elif x in (">", ")", "]") and j != end:
            depth -= 1
        if (x == "," and depth == 0) or j == end:
            if j - last > 1:
                params.append((last + 1, j))
            last = j
    return params


def _method(u: Tokens, a: int, b: int) -> None:
    """A method at [a, b), its brace at b: without an address space it works on thread objects only."""
    rules.check_parameters(u, a, b)
    while a < b and u.s(a) in ("public", "private", "protected", ":"):
        a += 1
    p = a
    while p < b and not (u.s(p) == "(" and (u.kind(p - 1) == "id" or "operator" in (u.s(p - 2), u.s(p - 3)))):
        p = (u.angle(p + 1) or p) + 1 if u.s(p) == "template" and u.s(p + 1) == "<" else p + 1
    end = u.close(p)
    if u.s(p - 1) == "operator" and end is not None:  # operator()(...)
        p = end + 1
        end = u.close(p)
    words = {u.s(i) for i in range(a, b)}
    if u.tokens[u.code[a]].file != "kernel" or end is None or {"static", "friend", "constexpr", "~"} & words:
        return
    qualified = SPACES & {u.s(i) for i in range(end + 1, b)}
    if qualified or is_constructor(u, end) or u.s(p - 1) == u.s(p - 2) or u.s(end + 1) == ":" or p - a < 2:
        return
    head, depth, default = [], 0, False
    for i in range(a, end + 1):
        x = u.s(i)
        if i > p:
            depth += (x in ("(", "[", "{", "<")) - (x in (")", "]", "}", ">"))
            if x == "=" and depth == 0:
                default = True
            elif depth <= 0 and (x == "," or i == end):
                default = False
        if not default and u.edited(i) != "":
            head.append(x)
    const = " const" if u.s(end + 1) == "const" else ""
    spaces = ["__global", "__local", *(["__constant"] if const else [])]
    closing = u.close(b, "{", "}")
    assert closing is not None
    u.put(closing, "} " + " ".join(f"{' '.join(head)}{const} {space} = delete;" for space in spaces))


def _local(u: Tokens, k: int, scopes: list[str]) -> None:
    """A statement that may be a declaration starts at k."""
    j, words = k, []
    while u.s(j) in ("static", "const", "constexpr", "volatile") or u.s(j) in SPACES:
        words.append(u.s(j))
        j += 1
    if "static" in words and "constexpr" not in words and "constant" not in words:
        u.error(k, "static local variables are not available in Metal")
    if "threadgroup" in words:
        _threadgroup_variable(u, k, j, scopes)
        return
    first = u.s(j)
    is_type = first in TYPES or first in u.types or (first == "vec" and u.s(j + 1) == "<")
    if not is_type and not (words and u.kind(j) == "id"):
        return
    j += 1
    if u.s(j) == "<":
        j = (u.angle(j) or j) + 1
    if (first in VECTORS or first in u.types or first == "vec") and u.kind(j) == "id" and u.s(j + 1) == "(":
        end = u.close(j + 1)
        if end and u.s(end + 1) in (";", ","):
            written = "".join(u.s(q) for q in range(k, j) if u.s(q) not in ("const", "constexpr", "thread"))
            u.put(j, f"{u.s(j)} = mtl::mk<{written}>")
    while u.s(j) == "const" or u.s(j) in SPACES:
        words.append(u.s(j))
        j += 1
    rules.check_pointer_variable(u, k, j, first, words)


def _threadgroup_variable(u: Tokens, k: int, j: int, scopes: list[str]) -> None:
    """The statement at k declares threadgroup variables; their type starts at j."""
    end, depth = j, 0
    while u.s(end) and not (u.s(end) == ";" and depth == 0):
        depth += (u.s(end) in ("(", "[", "{")) - (u.s(end) in (")", "]", "}"))
        end += 1
    i = j + 2 if u.s(j) == "typename" else j + 1
    while u.s(i) in ("::", "<") or u.s(i - 1) == "::":
        i = (u.angle(i) or i) + 1 if u.s(i) == "<" else i + 1
    while u.s(i) in ("const", "volatile") or (u.kind(i) == "id" and u.kind(i + 1) == "id"):
        i += 1
    if u.s(i) in ("*", "&", "("):
        return  # a pointer to threadgroup memory, or already a reference
    if scopes[-1] != "kernel":
        where = "the outermost scope of a kernel function"
        u.error(k, f"threadgroup variable '{u.s(i)}' can only be declared in {where}")
    type_text = "".join(u.edited(q) + " " for q in range(j, i)).strip()
    variables = []
    q = i
    while q < end:
        name = u.s(q)
        q += 1
        dims = ""
        while u.s(q) == "[":
            after = (u.close(q, "[", "]") or q) + 1
            dims += "".join(u.edited(z) for z in range(q, after))
            q = after
        variables.append(f'threadgroup {type_text} (&{name}){dims} = mtl::tg<{type_text} {dims}>("{name}")')
        while q < end and u.s(q) != ",":  # an initialiser has no effect on threadgroup memory
            q = (u.close(q, "{", "}") or q) + 1 if u.s(q) == "{" else q + 1
        q += 1
    for z in range(k, end):
        u.put(z, "")
    u.put(k, "; ".join(variables))
