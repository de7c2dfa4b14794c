"""What clang's C++ for OpenCL does otherwise than Metal, rewritten token by token.

float4(a, b), vec<T, 4>(x), T(x)      mtl::mk<float4>(a, b)   value conversion, never a bit cast
static_cast<T>(x), (float4)x          mtl::cast<T>(x), mtl::cc<float4>()->*x
1.0, 1.0h                             1.0f, ((half)1.0f)      unsuffixed literals are float
[[attribute]]                         removed; the walk over declarations reads those of parameters
"""

from __future__ import annotations

import re

from tests.metal.emulator.tokens import Tokens

SPACES = {"device", "constant", "threadgroup", "thread", "threadgroup_imageblock", "ray_data", "object_data"}
SCALARS = {
    "char",
    "uchar",
    "short",
    "ushort",
    "int",
    "uint",
    "long",
    "ulong",
    "float",
    "half",
    "bfloat",
    "bool",
}
VECTORS = {s + n for s in SCALARS for n in "234"}
CONVERTED = VECTORS | {"half", "bfloat", "float16_t", "bfloat16_t"}
"""T(x) and (T)x of these are rewritten."""
SIZED = {f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)}
OTHERS = {"unsigned", "signed", "size_t", "ptrdiff_t", "void", "float16_t", "bfloat16_t", "complex64_t"}
TYPES = SCALARS | VECTORS | SIZED | OTHERS


def collect_types(u: Tokens) -> None:
    """Note the names of types that a conversion may be written with: parameters of templates, aliases."""
    for k in range(len(u.code)):
        x = u.s(k)
        if x in ("typename", "class"):
            if u.kind(k + 1) == "id" and u.s(k + 2) in (",", ">", "=") and u.s(k - 1) in ("<", ","):
                u.types.add(u.s(k + 1))
        elif x == "using" and u.s(k + 2) == "=" and u.kind(k + 1) == "id":
            body = _until_semicolon(u, k + 3)
            if _names_a_type(u, body, VECTORS | {"vec", "half", "bfloat"}) and not {"*", "&"} & set(body):
                u.types.add(u.s(k + 1))
        elif x == "typedef":
            *body, name = _until_semicolon(u, k + 1) or [""]
            if _names_a_type(u, body, VECTORS | SCALARS | {"vec"}) and not {"*", "&", "(", "{"} & set(body):
                u.types.add(name)


def _until_semicolon(u: Tokens, k: int) -> list[str]:
    words = []
    while u.s(k) not in (";", ""):
        words.append(u.s(k))
        k += 1
    return words


def _names_a_type(u: Tokens, words: list[str], known: set[str]) -> bool:
    return any(w in known or w in u.types for w in words)


def strip_attributes(u: Tokens) -> None:
    """Remove [[...]], noting each under the token before it; function constants get a macro's value."""
    k = 0
    while k < len(u.code):
        if u.s(k) != "[" or u.s(k + 1) != "[":
            k += 1
            continue
        j, depth = k + 2, 2
        while depth:
            depth += (u.s(j) == "[") - (u.s(j) == "]")
            j += 1
        text = "".join(u.s(i) for i in range(k + 2, j - 2))
        before = u.code[k - 1] if k else -1
        u.attributes[before] = ",".join(filter(None, [u.attributes.get(before), text]))
        for i in range(k, j):
            u.put(i, "")
        if text.split(",")[0] == "kernel":
            u.put(k, " kernel ")
        m = re.search(r"function_constant\((\w+)\)", text)
        if m and u.s(j) == ";":  # constant T name [[function_constant(n)]];
            u.constants[u.s(k - 1)] = m.group(1)
            u.put(k, "= MTL_FC_" + u.s(k - 1))
        k = j
    u.code = [i for i in u.code if u.edits.get(i) != ""]


def rewrite_expressions(u: Tokens) -> None:
    """Literals and conversions. What another pass wrote stays."""
    written = dict(u.edits)
    for k in range(len(u.code)):
        x = u.s(k)
        if u.kind(k) == "num":
            _literal(u, k, x)
        elif u.kind(k) != "id":
            continue
        elif x in SPACES and _qualifies_a_method(u, k):
            if x == "thread" and is_constructor(u, k - 1):
                u.put(k, "")  # prvalues have no address space in clang: plain constructor
            elif x == "constant":
                u.put(k, "__constant")  # the macro adds const, which a constructor cannot have
        elif x == "static_cast" and u.s(k + 1) == "<":
            end = u.angle(k + 1)
            if end and not any(u.s(i) in ("*", "&") for i in range(k + 2, end)):
                u.put(k, "mtl::cast")
        elif span := _type_at(u, k):
            _conversion(u, *span)
    u.edits.update(written)


def _qualifies_a_method(u: Tokens, k: int) -> bool:
    after_parameters = u.s(k - 1) == ")" or (u.s(k - 1) == "const" and u.s(k - 2) == ")")
    return after_parameters and u.s(k + 1) in ("{", ":", ";", "noexcept", "->", "=")


def _conversion(u: Tokens, first: int, last: int) -> None:
    """A type at [first, last] that may be a constructor's or a cast's."""
    before, after = u.s(first - 1), u.s(last + 1)
    if after == "(":
        if u.s(last + 2) in ("&", "*"):
            end = u.close(last + 1)
            if end and u.s(end + 1) in ("(", "["):
                return  # declarator: T (&x)[n]
        u.put(first, "mtl::mk<" + u.edited(first))
        u.put(last, u.edited(last) + ">")
    elif after == ")" and before == "(":
        left, right = u.s(first - 2), u.s(last + 2)
        no_operand_left = u.kind(first - 2) not in ("id", "num") and left not in (")", "]", ">")
        operand_right = u.kind(last + 2) in ("id", "num") or right in ("(", "-", "~", "!", "*", "&", "::")
        is_declaration = right in SPACES or right in ("const", "noexcept")
        if (no_operand_left or left in ("return", "case", "else")) and operand_right and not is_declaration:
            u.put(first - 1, "mtl::cc<")
            u.put(last + 1, ">()->*")


def _type_at(u: Tokens, k: int) -> tuple[int, int] | None:
    """The first and last token of the type at k whose conversions are rewritten, or None."""
    x = u.s(k)
    last: int | None = k
    if x == "vec" and u.s(k + 1) == "<":
        last = u.angle(k + 1)
    elif x not in CONVERTED and x not in u.types:
        last = None
    if last is None:
        return None
    first = k
    while u.s(first - 1) == "::" and u.kind(first - 2) == "id":
        if u.s(first - 2) != "metal":
            return None
        first -= 2
    if u.s(first - 1) in (".", "->", "::", "struct", "class", "typename", "using", "operator", "~", "enum"):
        return None
    return first, last


def is_constructor(u: Tokens, k: int) -> bool:
    """k at the `)` of a parameter list: has the name before its `(` no return type?"""
    depth = 0
    while k >= 0:
        depth += (u.s(k) == ")") - (u.s(k) == "(")
        if depth == 0:
            break
        k -= 1
    return u.s(k - 2) in ("{", "}", ";", ":", "constexpr", "explicit", "inline", "METAL_FUNC", ">")


def _literal(u: Tokens, k: int, x: str) -> None:
    if x.lower().startswith("0x"):
        return
    m = re.match(r"((?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)([A-Za-z]*)$", x)
    if whole := re.match(r"(\d+)[hH]$", x):
        u.put(k, f"((half){whole.group(1)}.0f)")
    elif m and m.group(2) == "":
        u.put(k, x + "f")
    elif m and m.group(2) in ("h", "H"):
        u.put(k, f"((half){m.group(1)}f)")
    elif m and m.group(2).lower() == "bf":
        u.put(k, f"((bfloat){m.group(1)}f)")
    elif m and m.group(2) in ("l", "L"):
        u.error(k, f"literal '{x}': Metal has no double")
