"""Metal's rules that clang does not know. Each function reports to the token list and changes nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.metal.emulator.dialect import SPACES, TYPES
from tests.metal.emulator.tokens import Tokens

_WORDS = (
    *("new", "delete", "throw", "try", "catch", "dynamic_cast", "typeid"),
    *("virtual", "thread_local", "goto", "asm"),
)
FORBIDDEN = {word: f"'{word}' is not available in Metal" for word in _WORDS}
FORBIDDEN["double"] = "'double' is not supported in Metal (use float)"
OPENCL_COMPONENT = re.compile(r"(lo|hi|even|odd|s[0-9a-fA-F]{1,4})$")
NO_SPACE = "type must have explicit address space qualifier"


@dataclass
class Function:
    """A function that is no kernel, for the search for recursion."""

    name: str
    at: int
    is_template: bool
    calls: set[str]


def check_word(u: Tokens, k: int, names: set[str]) -> None:
    """Words that Metal does not have. `names`: every identifier of the source that is no member access."""
    x, following = u.s(k), u.s(k + 1)
    if x in FORBIDDEN and u.kind(k) == "id" and not (x == "delete" and u.s(k - 1) == "="):
        u.error(k, FORBIDDEN[x])
    elif x == "long" and following in ("double", "long"):
        u.error(k, f"'long {following}' is not available in Metal")
    elif x == "std" and following == "::":
        u.error(k, "'std::' is not available in Metal")
    elif x == "." and u.s(k + 2) != "(" and following not in names and OPENCL_COMPONENT.match(following):
        u.error(k, f"'.{following}' is an OpenCL component name, not a Metal one")


def check_parameters(u: Tokens, a: int, b: int) -> None:
    """Parameters with * or & and no address space, declared at [a, b). Template ones deduce theirs."""
    k = a
    while k < b and u.s(k) != "(":
        k = (u.angle(k + 1) or k) + 1 if u.s(k) == "template" and u.s(k + 1) == "<" else k + 1
    end = u.close(k) if k < b else None
    if end is None or end > b:
        return
    depth, first = 0, k + 1
    for j in range(k + 1, end + 1):
        x = u.s(j)
        if x in ("<", "(", "[", "{"):
            depth += 1
        elif x in (">", "]", "}") or (x == ")" and j != end):
            depth -= 1
        elif (x == "," and depth == 0) or j == end:
            words = [u.s(i) for i in range(first, j)]
            if "=" in words:
                words = words[: words.index("=")]
            if (
                {"*", "&"} & set(words)
                and not SPACES & set(words)
                and len(words) > 1
                and u.kind(first) == "id"
            ):
                what = "pointer" if "*" in words else "reference"
                u.error(first, f"{what} {NO_SPACE}: '{' '.join(words)}'")
            first = j + 1


def check_cast(u: Tokens, k: int) -> None:
    """(T*)x without an address space; k at the parenthesis."""
    end = u.close(k)
    if end is None or end - k < 3 or u.s(end - 1) != "*":
        return
    if u.kind(k - 1) == "id" and u.s(k - 1) != "return":
        return
    words = [u.s(i) for i in range(k + 1, end)]
    is_type = words[0] in TYPES or words[0] in u.types or words[0] in ("const", "metal", "vec")
    if is_type and not SPACES & set(words) and all(re.match(r"[\w:*<>,]+$", w) for w in words):
        u.error(k, f"pointer {NO_SPACE}: '({' '.join(words)})'")


def check_pointer_variable(u: Tokens, k: int, j: int, first: str, words: list[str]) -> None:
    """A local `T* name` or `T& name` without an address space; j at the star, `words` the qualifiers."""
    if u.s(j) not in ("*", "&") or u.kind(j + 1) != "id" or u.s(j + 2) not in ("=", ";", ",", ")", ":"):
        return
    if not SPACES & set(words) and first != "auto":
        what = "pointer" if u.s(j) == "*" else "reference"
        u.error(k, f"{what} {NO_SPACE}: '{first} {u.s(j)}{u.s(j + 1)}'")


def check_recursion(u: Tokens, functions: list[Function]) -> None:
    """Overloads and templates may call their own name, so only plain functions count."""
    names = [f.name for f in functions]
    plain = {f.name: f for f in functions if names.count(f.name) == 1 and not f.is_template}
    for f in plain.values():
        seen: set[str] = set()
        to_visit = list(f.calls)
        while to_visit:
            name = to_visit.pop()
            if name in plain and name not in seen:
                seen.add(name)
                to_visit += plain[name].calls
        if f.name in seen:
            u.error(f.at, f"'{f.name}' calls itself: Metal has no recursion")
