"""Who may import whom. Each layer knows only those below it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "rag_explain"

# From the bottom up. Modules on one line may know each other only where they are one package or the foundation.
LAYERS: list[tuple[str, ...]] = [
    ("errors", "plain", "frozen", "segments", "drawn", "types", "contrast", "comparison", "reference", "twin"),
    ("models", "encoder", "store", "render", "shifted"),
    ("linear", "chunking", "multivector"),
    ("methods",),
    ("documents",),
    ("explainer",),
    ("retrieval",),
    ("faiss", "log", "doctor"),
    ("cli",),
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
# What looks at a result is drawn by render: one-line imports inside methods, the only way up.
ALLOWED = {("drawn", "render"), ("types", "render"), ("contrast", "render"), ("comparison", "render")}
FRAMEWORKS = (
    "faiss",
    "langchain_core",
    "langchain_community",
    "langchain_classic",
    "llama_index",
    "ray",
    "opentelemetry",
)


def imports(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """The modules that are imported when the code runs, and whether that happens inside a function."""

    def visit(node: ast.AST, inside: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                yield from ((alias.name, inside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module:
                assert child.level == 0, "imports are absolute"
                if child.module == "rag_explain":
                    yield from ((f"rag_explain.{alias.name}", inside) for alias in child.names)
                else:
                    yield child.module, inside
            else:
                yield from visit(child, inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))

    return visit(tree, False)


def modules() -> list[tuple[str, Path]]:
    return [
        (path.relative_to(PACKAGE).with_suffix("").parts[0], path)
        for path in sorted(PACKAGE.rglob("*.py"))
        if path != PACKAGE / "__init__.py"
    ]


def test_every_module_has_its_layer() -> None:
    assert {name for name, _ in modules()} <= set(RANK)


@pytest.mark.parametrize(("name", "path"), modules(), ids=lambda value: getattr(value, "stem", None))
def test_a_module_knows_only_what_is_below_it(name: str, path: Path) -> None:
    for module, _ in imports(ast.parse(path.read_text(encoding="utf-8"))):
        if not module.startswith("rag_explain.") or (other := module.split(".")[1]) not in RANK:
            continue
        below = RANK[other] < RANK[name] or other == name or RANK[name] == RANK[other] == 0
        assert below or (name, other) in ALLOWED, f"{path.name} must not import {module}"


def test_frameworks_stay_outside() -> None:
    own = {"faiss": {"faiss"}, "log": {"opentelemetry"}}
    for name, path in modules():
        for module, _ in imports(ast.parse(path.read_text(encoding="utf-8"))):
            framework = module.split(".")[0]
            assert framework not in FRAMEWORKS or framework in own.get(name, set()), f"{path.name} imports {module}"


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [("langchain", ("langchain_core", "langchain_rag_explain")), ("llama_index", ("llama_index",))],
)
def test_an_integration_knows_one_framework_and_the_library(folder: str, allowed: tuple[str, ...]) -> None:
    files = [path for path in (ROOT / "integrations" / folder).rglob("*.py") if "tests" not in path.parts]
    assert files
    for path in files:
        for module, _ in imports(ast.parse(path.read_text(encoding="utf-8"))):
            top = module.split(".")[0]
            known = top in ("rag_explain", "pydantic", "typing_extensions", *allowed) or top in sys.stdlib_module_names
            assert known, f"{path.name} must not import {module}"


def test_nothing_imports_an_integration() -> None:
    for folder in ("rag_explain", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name == "frameworks.py":  # measures the integrations
                continue
            text = path.read_text(encoding="utf-8")
            assert "langchain_rag_explain" not in text
            assert "retrievers.rag_explain" not in text


def test_importing_the_library_loads_no_torch_and_no_framework() -> None:
    code = "import sys, rag_explain; print(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "rag_explain" in loaded
    heavy = {"torch", "transformers", "sentence_transformers", "numpy", *FRAMEWORKS}
    assert not heavy & {name.split(".")[0] for name in loaded}
