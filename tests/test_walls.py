"""Who may import whom (DESIGN.md §3), read from the source, and that the API never loads a model."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

MAY_IMPORT = {
    "api": {"jobs", "prompts", "migrations"},
    "migrations": {"api"},
    "worker": {"kernels", "cache_store", "jobs", "prompts"},
    "cli": {"jobs", "cache_store"},
    "kernels": set(),
    "cache_store": set(),
    "jobs": set(),
    "prompts": {"jobs"},
}
"""Alembic's scripts belong to the API and need its tables."""

NEVER = {
    "api": {"mlx", "mlx_lm", "transformers", "torch"},
    "migrations": {"mlx", "mlx_lm", "transformers", "torch"},
    "jobs": {"mlx", "mlx_lm", "transformers", "sqlalchemy", "redis", "rq", "fastapi"},
    "cache_store": {"mlx", "mlx_lm", "transformers", "sqlalchemy", "redis", "rq", "fastapi"},
    "prompts": {"mlx", "mlx_lm", "transformers", "sqlalchemy", "redis", "rq", "fastapi"},
    "cli": {"mlx", "mlx_lm", "transformers", "sqlalchemy"},
}


def imports(package: str) -> Iterator[tuple[str, str]]:
    """(file and line, top-level name) of every import in a package, inside functions too."""
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield place, alias.name.partition(".")[0]
            elif isinstance(node, ast.ImportFrom):
                name = package if node.level else node.module or ""
                yield place, name.partition(".")[0]


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_a_package_imports_only_whom_it_may(package: str) -> None:
    ours = MAY_IMPORT.keys() | {"bench", "tests"}
    forbidden = ours - MAY_IMPORT[package] - {package} | NEVER.get(package, set())
    assert [f"{place} imports {name}" for place, name in imports(package) if name in forbidden] == []


def test_the_api_loads_no_model_library() -> None:
    code = (
        "import sys, api.app, api.__main__, api.migrate; print(*{n.partition('.')[0] for n in sys.modules})"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert set(loaded) & NEVER["api"] == set()
    assert "fastapi" in loaded
