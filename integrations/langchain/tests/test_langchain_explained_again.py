"""get_explanation for documents that were read back: from the log, from kept factors, or it says what is gone."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
from langchain_core.documents import Document
from langchain_core.runnables import Runnable, RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_rag_explain import ExplainedDocument, ExplainingRetriever, ExplanationLogHandler, get_explanation

from integrations.langchain.tests.conftest import LocalEmbeddings
from rag_explain import Explainer
from rag_explain.errors import InvalidInput, LogError
from rag_explain.log import ExplanationLog
from rag_explain.log.compact import KEPT_PAIRS
from rag_explain.results.notices import MISMATCH, UNCHECKED
from tests.support.encodes import encodes
from tests.support.models import CORPUS, tiny

QUESTION = "why did the dog look at the moon?"


def answered(store: InMemoryVectorStore, log: ExplanationLog, **options: str) -> list[Document]:
    """The documents of a chain whose answer was logged, as they are when they were stored and read back."""
    retriever = ExplainingRetriever(retriever=store.as_retriever(search_kwargs={"k": 2}), **options)
    chain: Runnable[str, list[Document]] = RunnableLambda(lambda question: question) | retriever
    found = chain.invoke(QUESTION, {"callbacks": [ExplanationLogHandler(log)]})
    return [Document(**one.model_dump()) for one in found]


@pytest.mark.parametrize("explain", ["lazy", "eager"])
def test_the_logged_explanation_of_a_document_that_was_read_back(
    store: InMemoryVectorStore, log: ExplanationLog, explain: str
) -> None:
    documents = answered(store, log, explain=explain)
    (record,) = log.records()
    for document, hit in zip(documents, record.hits, strict=True):
        assert get_explanation(document) is None
        for source in (log, log.folder.path, str(log.folder.path)):
            found = get_explanation(document, query=QUESTION, log=source)
            assert found is not None
            assert hit.explanation is not None
            assert found.to_dict() == hit.explanation.to_dict()
            assert found.document == document.page_content


def test_a_document_without_an_id_is_known_by_its_text(store: InMemoryVectorStore, log: ExplanationLog) -> None:
    document, *_ = answered(store, log)
    nameless = Document(document.page_content)
    assert get_explanation(nameless, query=QUESTION, log=log).document == document.page_content  # type: ignore[union-attr]
    other = Document("the text of another version", id=document.id)
    found = get_explanation(other, query=QUESTION, log=log)
    assert found is not None
    assert found.document == document.page_content
    assert MISMATCH in [notice.code for notice in found.notices]


def test_what_stands_beside_comes_before_metadata_and_that_before_the_log(
    store: InMemoryVectorStore, log: ExplanationLog
) -> None:
    answered(store, log)
    options = {"explain": "eager", "metadata_key": "why"}
    (document, *_) = ExplainingRetriever(retriever=store.as_retriever(), **options).invoke(QUESTION)
    assert isinstance(document, ExplainedDocument)
    again = Document(**document.model_dump())
    assert get_explanation(deepcopy(document), query=QUESTION, log=log) is document.hit.explanation
    in_metadata = get_explanation(again, query=QUESTION, log=log)
    assert in_metadata is not None
    assert in_metadata.to_dict() == document.hit.explanation.to_dict()  # type: ignore[union-attr]
    off = ExplainingRetriever(retriever=store.as_retriever(), explain="off").invoke(QUESTION)[0]
    assert off == document.model_copy(update={"metadata": {}})
    assert get_explanation(off) is None  # skipped, and nothing in its metadata: the log has it
    assert get_explanation(off, query=QUESTION, log=log).query == QUESTION  # type: ignore[union-attr]


def test_what_is_gone_is_said(store: InMemoryVectorStore, log: ExplanationLog) -> None:
    document, *_ = answered(store, log)
    with pytest.raises(LogError, match="has no record of this question"):
        get_explanation(document, query="never asked?", log=log)
    with pytest.raises(LogError, match="has this question without this document"):
        get_explanation(Document("never found", id="none"), query=QUESTION, log=log)
    log.erase(documents=[str(document.id)])
    with pytest.raises(LogError, match="or it was erased"):
        get_explanation(document, query=QUESTION, log=log)
    with pytest.raises(InvalidInput, match="pass query= and, with it, log= or explainer="):
        get_explanation(document, query=QUESTION)


def test_a_log_without_texts_explains_the_texts_that_are_at_hand(store: InMemoryVectorStore, tmp_path: Path) -> None:
    with ExplanationLog(tmp_path / "log", top=3, keep_text=False, hash_key=b"a key of sixteen bytes") as log:
        document, *_ = answered(store, log)
        found = get_explanation(document, query=QUESTION, log=log)
        assert found is not None
        assert found.top_pairs(1)[0].document.text == document.page_content  # it is one sentence
        assert KEPT_PAIRS in [notice.code for notice in found.notices]
        with pytest.raises(LogError, match="by hashes with a key: pass log=ExplanationLog"):
            get_explanation(document, query=QUESTION, log=log.folder.path)


@pytest.mark.parametrize(("kept", "unit"), [("sentence", "sentence"), ("token", "word")])
def test_from_kept_factors_it_is_computed_again_without_encoding_a_document(
    tmp_path: Path, kept: str, unit: str
) -> None:
    model = tiny("bert")
    store = InMemoryVectorStore(LocalEmbeddings(model))
    store.add_texts(CORPUS)
    document = Document(**store.similarity_search(QUESTION, k=1)[0].model_dump())
    with Explainer(model, store=tmp_path / "factors") as explainer:
        expected = explainer.explain(QUESTION, document.page_content).grouped(unit)  # type: ignore[arg-type]
        explainer.precompute(CORPUS, unit=kept, progress=False)  # type: ignore[arg-type]
    with Explainer(model, store=tmp_path / "factors") as explainer, encodes() as seen:
        found = get_explanation(document, query=QUESTION, explainer=explainer, unit=unit)  # type: ignore[arg-type]
    assert found is not None
    assert seen.documents == []
    assert set(seen.texts) == {QUESTION}
    assert found.provenance["path"] == "disk"
    assert (found.unit, found.score) == (unit, pytest.approx(expected.score, abs=1e-3))
    assert [notice.text for notice in found.notices if notice.code == UNCHECKED] == [
        "computed again after the search: nothing shows whether this encoder found the document then"
    ]


def test_the_explainer_is_asked_where_the_log_has_nothing(store: InMemoryVectorStore, log: ExplanationLog) -> None:
    document, *_ = answered(store, log)
    with Explainer(tiny("bert")) as explainer:
        logged = get_explanation(document, query=QUESTION, log=log, explainer=explainer)
        computed = get_explanation(document, query="never asked?", log=log, explainer=explainer)
    assert logged is not None
    assert computed is not None
    assert UNCHECKED not in [notice.code for notice in logged.notices]
    assert (logged.query, logged.unit) == (QUESTION, "sentence")
    assert (computed.query, computed.unit) == ("never asked?", "word")
    assert UNCHECKED in [notice.code for notice in computed.notices]


def test_a_text_in_place_of_a_document_is_named() -> None:
    with pytest.raises(InvalidInput, match="takes a Document that a retriever returned, not str"):
        get_explanation("the cat sat on the mat.")  # type: ignore[arg-type]
