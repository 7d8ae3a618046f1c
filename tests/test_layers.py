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

# Every module, from the bottom up: each knows only modules that stand before it. A package stands after its modules.
LAYERS = """
    errors _torch probes budget devices
    texts.tokens texts.passage texts.segments texts.edits texts.units texts
    results.notices results.serialization results.readonly results.metric results.display
    results.deferred results.links results.spans results.terms results.trust results.explanation results.stages
    results.highlights results.evidence results.contrast results.comparison
    results.why_not results.what_if results.x_ray results.calibration results.overview results.documents results.hits
    results.precomputed results.plan results
    factors pairing types
    encoder.batch encoder.unread encoder.towers encoder.reading encoder.chunking encoder.identity encoder.working_copy
    encoder.probing encoder.watch encoder.pair_reading encoder.reference encoder.loading encoder.shared_model
    encoder.model encoder.cross_encoder encoder.static encoder.sparse encoder.sparse_static encoder shifted
    linear.rules linear.identity linear.owners linear.workspace linear.operations linear.rearrangements
    linear.entering linear.early_pooling linear.affine_map linear.registry linear.tape linear.recorder
    linear.handlers.shapes linear.handlers.pointwise linear.handlers.arithmetic linear.handlers.norms
    linear.handlers.attention linear.handlers linear.structure linear
    scorers.base scorers.sources scorers.openai_compatible scorers.embedder scorers.bi_encoder
    scorers.multi_vector scorers.cross_encoder scorers.static scorers.analyser scorers.term_index scorers.bm25s_index
    scorers.holders scorers.bm25 scorers.sparse scorers.checks scorers
    evidence
    methods.base methods.frozen methods.checks methods.bilrp methods.pooled methods.static methods.parts
    methods.occlusion methods.shapley methods.integration_path methods.jacobian methods.baselines methods.bti
    methods.alignment methods.terms methods.cross_encoder methods.slices methods
    store.key store.codec store.memory store.tier store.sqlite_file store.disk store.remote store.store store
    ski_rental planner query progress what_if x_ray comparing explainer
    retrieval.holders retrieval.usage retrieval.engines.base retrieval.engines.chroma retrieval.engines.faiss
    retrieval.engines.lancedb retrieval.engines.milvus retrieval.engines.postgres retrieval.engines.pgvector
    retrieval.engines.qdrant
    retrieval.engines retrieval.fusion retrieval.stages retrieval.trace retrieval.hidden retrieval.sharing
    retrieval.legs retrieval.nested retrieval.mmr retrieval.search retrieval.truth
    retrieval.corpus retrieval.places retrieval.hit_questions retrieval.background retrieval.black_box
    retrieval.looks retrieval.adapter retrieval.saved_index
    retrieval.asked retrieval.ladder retrieval.store_questions retrieval.faiss_rows retrieval.faiss_questions
    retrieval.faiss retrieval.hybrid retrieval faiss
    log.redaction log.compact log.record log.files log.models log.reader log.erasure log.sinks log.sinks.otel log.otel
    log.writer log.lookup log.runs log.states log.verify log.diff log
    render.sentences render.palette render.blocks
    render.views.explanation render.views.overview render.views.highlights render.views.stages render.views.hits
    render.views.documents render.views.contrast render.views.comparison
    render.views.evidence render.views.what_if render.views.why_not
    render.views.x_ray render.views.calibration render.views
    render.terminal render.notebook render.page render.figure render.plot render
    cli.output cli.explain cli.index cli.search cli.contrast cli.demo cli.doctor cli.store cli.log cli __main__
"""
ORDER = LAYERS.split()
RANK = {name: rank for rank, name in enumerate(ORDER)}
# A result is drawn by render, which it imports inside the methods that show it: the only way up.
DRAWN = ("results", "render")
FRAMEWORKS = (
    "chromadb",
    "faiss",
    "bm25s",
    "haystack",
    "haystack_integrations",
    "langchain_core",
    "langchain_community",
    "langchain_classic",
    "llama_index",
    "psycopg",
    "rank_bm25",
    "sqlalchemy",
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
                yield from ((f"{child.module}.{alias.name}", inside) for alias in child.names)
            else:
                yield from visit(child, inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))

    return visit(tree, False)


def modules() -> list[tuple[str, Path]]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:  # the package itself loads its names when they are first used
            found.append((name, path))
    return found


def imported(path: Path) -> Iterator[tuple[str, bool]]:
    """The modules of the package that a module imports, and whether it does so inside a function."""
    known = {name for name, _ in modules()}
    for module, inside in imports(ast.parse(path.read_text(encoding="utf-8"))):
        if module.startswith("rag_explain."):
            name = module.removeprefix("rag_explain.")
            while name and name not in known:  # a name inside a module
                name = name.rpartition(".")[0]
            if name:
                yield name, inside


def test_every_module_has_its_place() -> None:
    assert {name for name, _ in modules()} == set(ORDER)
    assert len(ORDER) == len(RANK)


@pytest.mark.parametrize(("name", "path"), modules(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_module_knows_only_what_is_below_it(name: str, path: Path) -> None:
    for other, inside in imported(path):
        up = inside and (name.partition(".")[0], other.partition(".")[0]) == DRAWN
        assert RANK[other] < RANK[name] or up, f"{name} must not import {other}"


def test_results_and_views_need_no_torch() -> None:
    names = "rag_explain.results.hits, rag_explain.render.page, rag_explain.log"
    code = f"import sys, {names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_frameworks_stay_outside() -> None:
    own = {"retrieval.faiss": {"faiss"}, "retrieval.saved_index": {"faiss"}, "log.sinks.otel": {"opentelemetry"}}
    own |= {"scorers.analyser": {"bm25s"}}
    for name, path in modules():
        for module, _ in imports(ast.parse(path.read_text(encoding="utf-8"))):
            framework = module.split(".")[0]
            assert framework not in FRAMEWORKS or framework in own.get(name, set()), f"{path.name} imports {module}"


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [
        ("langchain", ("langchain_core", "langchain_rag_explain")),
        ("llama_index", ("llama_index",)),
        ("haystack", ("haystack", "haystack_integrations")),
    ],
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
            if path.name in ("frameworks.py", "production.py", "rankings.py"):  # measure the integrations
                continue
            text = path.read_text(encoding="utf-8")
            assert "langchain_rag_explain" not in text
            assert "retrievers.rag_explain" not in text
            assert "explainers.rag_explain" not in text


def test_importing_the_library_loads_no_torch_and_no_framework() -> None:
    code = "import sys, rag_explain; print(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "rag_explain" in loaded
    heavy = {"torch", "transformers", "sentence_transformers", "numpy", *FRAMEWORKS}
    assert not heavy & {name.split(".")[0] for name in loaded}
