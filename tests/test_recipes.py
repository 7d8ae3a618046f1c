"""docs/recipes.md, block by block, as it is printed: the same documents, order and scores, explained and compared."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize

from rag_explain.encoder.loading import packaged_path
from rag_explain.results.hits import Hits
from rag_explain.results.metric import Metric
from rag_explain.results.notices import UNCHECKED
from tests.support.models import tiny

PAGE = (Path(__file__).parent.parent / "docs" / "recipes.md").read_text(encoding="utf-8")
BLOCKS = {
    section.split("\n", 1)[0].strip("# "): re.findall(r"```python\n(.*?)```", section, re.S)
    for section in re.split(r"^(?=##? )", PAGE, flags=re.M)
    if "```python" in section
}
(START,) = BLOCKS.pop("Any other stack")
# What each needs beside the library itself.
NEEDS = {
    "NumPy": ["numpy"],
    "Qdrant": ["qdrant_client"],
    "Postgres": ["psycopg", "pgserver"],
    "LanceDB": ["lancedb"],
    "txtai": ["txtai"],
    "DSPy": ["dspy"],  # not beside the pinned versions: its botocore takes no python-dateutil 4
}
NAME, ADDRESS = '"all-MiniLM-L6-v2"', '"postgresql://localhost/rag"'
MODELS = ["tiny", pytest.param("packaged", marks=pytest.mark.slow)]


@cache
def folder(model: str) -> str:
    """Where a model is kept that stands in for the one that the page names: a tiny one, or that very one, from here."""
    if model == "packaged":
        return str(packaged_path())
    kept = tempfile.mkdtemp(prefix="tiny-")
    architecture = {"tiny": "bert", "other": "mpnet"}[model]
    tiny(architecture, after=lambda: [Normalize()], dtype=torch.float32).save(kept, create_model_card=False)
    return kept


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A real Postgres with pgvector, for as long as this module is tested."""
    pgserver: Any = pytest.importorskip("pgserver")
    with tempfile.TemporaryDirectory() as data, pgserver.get_server(data, cleanup_mode="stop") as server:
        yield server.get_uri()


def run(
    title: str, model: str, request: pytest.FixtureRequest, *, explained: str | None = None, before: str = ""
) -> dict[str, Any]:
    """What a recipe leaves behind. Only the model's name, and where Postgres is, are others than on the page.

    `explained` is a model that explains in place of the one that embedded; `before` runs before the recipe.
    """
    missing = [module for module in NEEDS[title] if find_spec(module) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} is not installed")
    (recipe,) = BLOCKS[title]
    code = START + before + recipe
    assert NAME in code
    code = code.replace(NAME, repr(folder(model)))
    if ADDRESS in code:
        code = code.replace(ADDRESS, repr(request.getfixturevalue("address")))
        code = code.replace("create table", "create temporary table")  # each run has its own
    if explained is not None:
        code, count = re.subn(r"HitExplainer\([\w.]+,", f"HitExplainer({folder(explained)!r},", code)
        assert count == 1
    left: dict[str, Any] = {}
    exec(compile(code, f"docs/recipes.md, {title}", "exec"), left)
    return left


def test_every_block_of_the_page_is_a_recipe_that_is_run_here() -> None:
    assert list(BLOCKS) == list(NEEDS)
    assert all(len(blocks) == 1 for blocks in BLOCKS.values())
    assert PAGE.count("```python") == 1 + len(NEEDS)
    assert all(len(block.strip().splitlines()) <= 20 for (block,) in BLOCKS.values())


def test_every_metric_of_the_page_is_known() -> None:
    (table,) = re.findall(r"^\| your engine returns \|.*?\n\n", PAGE, re.M | re.S)
    cells = [line.rstrip(" |").rsplit("|", 1)[1] for line in table.strip().splitlines()[2:]]
    named = [name for cell in cells for name in re.findall(r'"([^"]+)"', cell)]
    named += re.findall(r'metric="([^"]+)"', PAGE)
    assert len(set(named)) > 8
    assert [name for name in named if Metric.find(name) is None] == []


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("title", NEEDS)
def test_a_recipe_explains_what_was_found(
    title: str, model: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    left = run(title, model, request)
    hits, texts = left["hits"], left["documents"]
    assert isinstance(hits, Hits)
    encoder = SentenceTransformer(folder(model))
    expected = encoder.encode_document(list(texts.values())) @ encoder.encode_query(left["question"])
    order = np.argsort(-expected)[:3]
    assert [hit.id for hit in hits] == [list(texts)[row] for row in order]
    assert [hit.score for hit in hits] == [document.score for document in left["found"]]
    for hit, similarity in zip(hits.load(), expected[order], strict=True):
        assert hit.explanation is not None, hit.reason
        assert hit.explanation.surrogate is None
        assert UNCHECKED not in [notice.code for notice in hit.explanation.notices]
        assert hit.explanation.document == texts[hit.id]
        assert hit.similarity == pytest.approx(similarity, abs=1e-5)
        assert hit.explanation.gap == pytest.approx(0.0, abs=1e-4)
        if title == "DSPy":
            assert (hit.score, hit.gap) == (None, None)
        else:
            assert hit.gap == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("title", NEEDS)
def test_a_recipe_with_a_model_that_did_not_embed_the_texts_says_so_in_every_hit(
    title: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for hit in run(title, "tiny", request, explained="other")["hits"]:
        assert "gives the query another vector than this encoder's" in (hit.explanation.surrogate or "")
        assert title in ("txtai", "DSPy") or "vector of this document" in hit.explanation.surrogate


@pytest.mark.parametrize("title", ["NumPy", "Qdrant", "Postgres", "LanceDB"])
def test_a_recipe_marks_the_documents_whose_vectors_in_the_index_are_of_other_texts(
    title: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hits = run(title, "tiny", request, before="vectors = vectors[[1, 0, 3, 2, 4]]\n")["hits"]
    for hit in hits:
        assert ("vector of this document" in (hit.explanation.surrogate or "")) == (hit.id != "sourdough")
        assert (abs(hit.gap) > 1e-3) == (hit.id != "sourdough")
