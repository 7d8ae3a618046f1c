"""An index in a folder: what is written is read back, and a damaged or foreign one is refused."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_explain.errors import FormatError, InvalidInput
from rag_explain.faiss import FaissRetriever
from rag_explain.probes import Probes
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


def test_a_row_that_was_given_no_id_has_none_when_it_is_read_back(tmp_path: Path) -> None:
    names: Any = ["a", None, "c"]
    FaissRetriever.from_texts(TEXTS[:3], explainer(), ids=names).save(tmp_path)
    loaded = FaissRetriever.load(tmp_path, explainer())
    assert [document.id for document in loaded.rows().values()] == names
    assert sorted(hit.id for hit in loaded.search(QUERY)) == ["1", "a", "c"]


def test_a_damaged_or_foreign_index_is_refused(tmp_path: Path) -> None:
    FaissRetriever.from_texts(TEXTS, explainer()).save(tmp_path)
    with pytest.raises(InvalidInput, match="weights, settings or embeddings differ"):
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
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    for name in manifest.keys() - {"format", "version"}:
        kept = {key: value for key, value in manifest.items() if key != name}
        (tmp_path / "manifest.json").write_text(json.dumps(kept))
        with pytest.raises(FormatError, match="its manifest is not whole"):
            FaissRetriever.load(tmp_path, explainer())
    (tmp_path / "manifest.json").write_text('{"format": "other"}')
    with pytest.raises(FormatError, match="build the index again"):
        FaissRetriever.load(tmp_path, explainer())


def test_an_index_whose_model_computes_something_else_now_is_refused(tmp_path: Path) -> None:
    """The same weights and settings by every digest, and another model all the same: a library that changed, say."""
    FaissRetriever.from_texts(TEXTS, explainer()).save(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    kept = Probes.from_dict(manifest["probes"])

    def load_with(change: float) -> None:
        values = [value + np.float32(change) * np.abs(value).max() for value in kept.values]
        (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "probes": Probes.of(values).to_dict()}))
        FaissRetriever.load(tmp_path, explainer())

    load_with(1e-6)  # another machine
    with pytest.raises(InvalidInput, match="embeddings differ"):
        load_with(1e-2)
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "probes": {"shapes": [[3]], "values": "AAAA"}}))
    with pytest.raises(FormatError, match="damaged"):
        FaissRetriever.load(tmp_path, explainer())


def test_a_function_cannot_be_saved(tmp_path: Path) -> None:
    index, _ = build("flat-ip")
    with pytest.raises(InvalidInput, match="cannot be listed"):
        FaissRetriever(index, lambda row: TEXTS[row], explainer()).save(tmp_path / "index")
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_what_is_saved_is_for_its_owner_only(umask: int, tmp_path: Path) -> None:
    retriever = FaissRetriever.from_texts(TEXTS[:3], explainer())
    before = os.umask(umask)
    try:
        retriever.save(tmp_path / "index")
    finally:
        os.umask(before)
    folder = tmp_path / "index"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    rights = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert rights == dict.fromkeys(("documents.jsonl", "index.faiss", "manifest.json"), 0o600)


def test_a_file_where_the_folder_should_be_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InvalidInput, match="cannot be written to"):
            FaissRetriever.from_texts(TEXTS[:3], explainer()).save(place)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_manifest_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"format": "rag_explain.faiss", "version": 2}')
    with pytest.raises(FormatError, match="not whole"):
        FaissRetriever.load(tmp_path, explainer())
