"""The rules of the house: which folder may import which, how long a file may be, and what must not be in one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED = {
    "schemas": set(),
    "bus": {"schemas"},
    "kernels": set(),
    "supervisors": {"bus", "schemas"},
    "actors": {"schemas", "bus", "kernels", "supervisors"},
    "run": {"schemas", "bus", "kernels", "supervisors", "actors"},
}
SHELLS = {"actor.py", "disk.py", "__init__.py"}
SOCKETS = {"actors/gateway/asgi.py": "the HTTP server is a library's: it is started, and knows nothing of the bus"}
"""Besides shells, what of actors/ may open a socket, and why."""

MAX_LINES = 350
SOURCES = sorted(path for folder in ALLOWED for path in (ROOT / folder).rglob("*.py"))
TEXTS = sorted(
    path
    for path in [*ROOT.glob("*.*"), ROOT / "Makefile", ROOT / "Dockerfile", *ROOT.glob(".ci/*")]
    + [p for folder in (*ALLOWED, "tests") for p in (ROOT / folder).rglob("*")]
    if path.suffix in {".py", ".md", ".toml", ".yaml", ".json", ".conf", ""} and path.is_file()
)


def imports(path: Path) -> Iterator[str]:
    """Every module a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield node.module or ""


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=ids)
def test_imports_flow_one_way(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    roots = {module.partition(".")[0] for module in imports(path)}
    assert roots & (set(ALLOWED) | {"tests"}) - {folder} <= ALLOWED[folder]


@pytest.mark.parametrize("path", [path for path in SOURCES if "actors" in path.parts], ids=ids)
def test_components_keep_to_themselves_and_cores_are_pure(path: Path) -> None:
    """A component's core imports neither asyncio nor the bus; what components share lies in actors/rules."""
    component = path.relative_to(ROOT).parts[1]
    modules = set(imports(path))
    others = {module for module in modules if module.startswith("actors.")}
    assert all(module.split(".")[1] in {component, "rules"} for module in others)
    if path.name not in SHELLS:
        roots = {module.partition(".")[0] for module in modules}
        assert not roots & {"asyncio", "bus", "nats", "threading"}
        assert not roots & {"socket", "uvicorn"} or ids(path) in SOCKETS


@pytest.mark.parametrize("path", SOURCES, ids=ids)
def test_one_noun_per_file(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or node.lineno) - node.lineno <= 80, node.name


def test_no_path_of_a_machine() -> None:
    pattern = re.compile(r"(?<![\w.}])/(?:work|root|home|tmp|farm)/\w")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in TEXTS
        if path.stat().st_size < 1_000_000
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found


def test_the_walk_sees_a_wrong_arrow(tmp_path: Path) -> None:
    path = tmp_path / "core.py"
    path.write_text("def f():\n    from bus.bus import Bus\n    import asyncio.queues\n")
    assert list(imports(path)) == ["bus.bus", "asyncio.queues"]
