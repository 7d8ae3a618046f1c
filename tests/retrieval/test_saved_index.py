"""An index in a folder: what is written is read back, and a damaged or foreign one is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rag_explain.errors import FormatError, InvalidInput
from rag_explain.faiss import FaissRetriever
from rag_explain.texts.passage import Passage
from tests.retrieval.test_faiss import QUERY, TEXTS, build, explainer


@pytest.mark.parametrize("name", ["flat-ip", "idmap-ip", "hnsw-l2"])
def test_saved_and_loaded_it_finds_the_same_and_holds_no_pickle(name: str, tmp_path: Path) -> None:
    index, ids = build(name)
    documents: dict[int, Any] = dict(zip(ids, TEXTS, strict=True))
    (first,) = FaissRetriever(index, documents, explainer()).search(QUERY, 1)
    documents[int(first.id)] = Passage(f"topic: animals\n\n{first.text}", 16)
    metadata = {row: {"row": row, "tag": "größe"} for row in ids}
    retriever = FaissRetriever(index, documents, explainer(), metadata=metadata)
    retriever.save(tmp_path / "index")
    loaded = FaissRetriever.load(tmp_path / "index", explainer())
    assert len(loaded) == len(retriever) == len(TEXTS)
    for one, other in zip(retriever.search(QUERY, 100), loaded.search(QUERY, 100), strict=True):
        assert (one.id, one.text, one.score, one.metadata) == (other.id, other.text, other.score, other.metadata)
        assert one.around == other.around == (("topic: animals\n\n", "") if one.id == first.id else ("", ""))
    assert sorted(path.name for path in (tmp_path / "index").iterdir()) == [
        "documents.jsonl",
        "index.faiss",
        "manifest.json",
    ]


def test_a_damaged_or_foreign_index_is_refused(tmp_path: Path) -> None:
    FaissRetriever.from_texts(TEXTS, explainer()).save(tmp_path)
    with pytest.raises(InvalidInput, match="weights or settings differ"):
        FaissRetriever.load(tmp_path, explainer(normalize=False))
    with pytest.raises(InvalidInput, match="there is no index"):
        FaissRetriever.load(tmp_path / "nowhere", explainer())
    lines = (tmp_path / "documents.jsonl").read_text(encoding="utf-8").splitlines()
    (tmp_path / "documents.jsonl").write_text("\n".join(lines[:-1]), encoding="utf-8")
    with pytest.raises(FormatError, match="99 of 100 documents"):
        FaissRetriever.load(tmp_path, explainer())
    (tmp_path / "index.faiss").write_bytes(b"not an index")
    with pytest.raises(FormatError, match="damaged"):
        FaissRetriever.load(tmp_path, explainer())
    (tmp_path / "manifest.json").write_text('{"format": "other"}')
    with pytest.raises(FormatError, match="build the index again"):
        FaissRetriever.load(tmp_path, explainer())


def test_a_function_cannot_be_saved(tmp_path: Path) -> None:
    index, _ = build("flat-ip")
    with pytest.raises(InvalidInput, match="cannot be listed"):
        FaissRetriever(index, lambda row: TEXTS[row], explainer()).save(tmp_path / "index")
    assert not (tmp_path / "index").exists()
