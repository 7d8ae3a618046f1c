"""A retriever that finds chunks and returns their documents: the chunk that was found is explained, in its document."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import pytest
from langchain_classic.retrievers import EnsembleRetriever, MultiVectorRetriever, ParentDocumentRetriever
from langchain_classic.retrievers.multi_vector import SearchType
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.stores import InMemoryStore
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_rag_explain import ExplainedDocument, ExplainingRetriever, ExplanationLogHandler, get_explanation
from langchain_text_splitters import CharacterTextSplitter, RecursiveCharacterTextSplitter

from integrations.langchain.tests.conftest import LocalEmbeddings
from rag_explain import Explainer
from rag_explain.encoder.loading import packaged_path
from rag_explain.log import ExplanationLog
from rag_explain.log.verify import verify
from rag_explain.results.notices import CHUNK, UNCHECKED
from tests.support import postgres
from tests.support.models import CORPUS, tiny

QUERY = "why did the dog look at the moon?"
KEYS = ["one", "two", "three"]
PARENTS = [f"{CORPUS[0]}. {CORPUS[1]}", f"{CORPUS[2]}. {CORPUS[3]}. {CORPUS[4]}", f"{CORPUS[4]}. {CORPUS[0]}"]


class Counting(LocalEmbeddings):
    """Counts the queries that are embedded: each search embeds one."""

    searched = 0

    def embed_query(self, text: str) -> list[float]:
        self.searched += text == QUERY
        return super().embed_query(text)


def sentences() -> CharacterTextSplitter:
    return CharacterTextSplitter(separator=". ", chunk_size=1, chunk_overlap=0)


def parents(
    store: VectorStore | None = None, splitter: Any = None, embeddings: Embeddings | None = None, **fields: Any
) -> ParentDocumentRetriever:
    retriever = ParentDocumentRetriever(
        vectorstore=store or InMemoryVectorStore(embeddings or LocalEmbeddings(tiny("bert"))),
        child_splitter=splitter or sentences(),
        **{"docstore": InMemoryStore()} | fields,
    )
    documents = [Document(text, metadata={"page": page}) for page, text in enumerate(PARENTS)]
    retriever.add_documents(documents, ids=KEYS)
    return retriever


def chunks(retriever: ParentDocumentRetriever, k: int = 4) -> dict[str, tuple[Document, float]]:
    """For each document the best of its chunks, as the store tells them."""
    found: dict[str, tuple[Document, float]] = {}
    for chunk, score in retriever.vectorstore.similarity_search_with_score(QUERY, k=k):
        found.setdefault(chunk.metadata["doc_id"], (chunk, score))
    return found


@pytest.fixture
def base() -> ParentDocumentRetriever:
    return parents()


@pytest.mark.parametrize("is_async", [False, True])
def test_the_chunk_that_was_found_is_explained_in_its_document(base: ParentDocumentRetriever, is_async: bool) -> None:
    wrapped = ExplainingRetriever(retriever=base)
    documents = asyncio.run(wrapped.ainvoke(QUERY)) if is_async else wrapped.invoke(QUERY)
    assert documents == base.invoke(QUERY)
    assert [document.metadata for document in documents] == [one.metadata for one in base.invoke(QUERY)]
    best = chunks(base)
    assert len(documents) == len(best) >= 2
    for document, (key, (chunk, score)) in zip(documents, best.items(), strict=True):
        assert isinstance(document, ExplainedDocument)
        hit = document.hit
        assert (hit.id, hit.text, hit.score, hit.metric) == (key, document.page_content, score, "cosine")
        assert hit.chunk is not None
        assert document.page_content[slice(*hit.chunk)] == chunk.page_content
        why = document.explanation
        assert why is not None
        assert why.surrogate is None
        assert [notice.code for notice in why.notices if notice.code not in ("unknown", "spelled")] == [CHUNK]
        assert why.document == document.page_content
        assert why.score == pytest.approx(score, abs=1e-5)
        assert (hit.gap, why.gap) == (pytest.approx(0.0, abs=1e-5), pytest.approx(0.0, abs=1e-4))
        words = why.by_word().document_tokens
        assert [document.page_content[one.start : one.end] for one in words] == [one.text for one in words]
        assert [hit.chunk[0] <= one.start <= one.end <= hit.chunk[1] for one in words] == [True] * len(words)
        assert "".join(one.text for one in words) == chunk.page_content.replace(" ", "")
        for span in (*hit.highlights, *hit.evidence):  # type: ignore[misc]
            assert document.page_content[span.start : span.end] == span.text
            assert hit.chunk[0] <= span.start < span.end <= hit.chunk[1]


def test_the_retriever_searches_once_and_is_left_as_it_was() -> None:
    embeddings = Counting(tiny("bert"))
    base = parents(embeddings=embeddings)
    kept = base.vectorstore, base.docstore
    ExplainingRetriever(retriever=base).invoke(QUERY)
    assert embeddings.searched == 1
    assert (base.vectorstore, base.docstore) == kept


def test_chunks_are_cut_at_their_ends_when_grouped(base: ParentDocumentRetriever) -> None:
    base = parents(splitter=RecursiveCharacterTextSplitter(chunk_size=25, chunk_overlap=5, add_start_index=True))
    for document in ExplainingRetriever(retriever=base, unit="token").invoke(QUERY):
        hit = document.hit  # type: ignore[attr-defined]
        for unit in ("word", "sentence"):
            for token in hit.explanation.grouped(unit).document_tokens:
                assert hit.chunk[0] <= token.start < token.end <= hit.chunk[1]
                assert token.text == document.page_content[token.start : token.end]


def test_a_chunk_that_stands_twice_is_where_the_splitter_says() -> None:
    text = f"{CORPUS[2]}. and {CORPUS[2]}."
    base = parents()
    base.docstore.mset([("twice", Document(text))])
    chunk = Document(CORPUS[2], id="second", metadata={"doc_id": "twice", "start_index": text.rindex(CORPUS[2])})
    base.vectorstore.add_documents([chunk])
    found = ExplainingRetriever(retriever=base).invoke(CORPUS[2])
    (hit,) = [document.hit for document in found if document.page_content == text]  # type: ignore[attr-defined]
    assert hit.chunk == (text.rindex(CORPUS[2]), len(text) - 1)


def test_a_summary_that_was_embedded_for_a_document_is_explained_alone() -> None:
    store, docstore = InMemoryVectorStore(LocalEmbeddings(tiny("bert"))), InMemoryStore()
    docstore.mset([("book", Document("a long book", metadata={"by": "me"}))])
    store.add_documents([Document(CORPUS[2], id="summary", metadata={"doc_id": "book"})])
    base = MultiVectorRetriever(vectorstore=store, docstore=docstore)
    (document,) = ExplainingRetriever(retriever=base).invoke(QUERY)
    assert [document] == base.invoke(QUERY)
    why = get_explanation(document)
    assert why is not None
    assert (why.document, document.hit.text, document.hit.chunk) == (CORPUS[2], CORPUS[2], None)  # type: ignore[attr-defined]
    (notice,) = [notice for notice in why.notices if notice.code == CHUNK]
    assert "does not stand in it" in notice.text
    assert (why.surrogate, document.metadata) == (None, {"by": "me"})


def test_a_store_that_tells_no_scores_is_checked_by_the_chunks_vectors() -> None:
    module = pytest.importorskip("langchain_chroma")
    store = module.Chroma("chunks", LocalEmbeddings(tiny("bert")), collection_metadata={"hnsw:space": "cosine"})
    base = parents(store)
    documents = ExplainingRetriever(retriever=base).invoke(QUERY)
    assert documents == base.invoke(QUERY)
    for document in documents:
        why = get_explanation(document)
        assert why is not None
        assert (why.surrogate, UNCHECKED in {notice.code for notice in why.notices}) == (None, False)
    ids = store.get()["ids"]
    store._collection.update(ids, embeddings=[[1.0] * 16] * len(ids))
    for document in ExplainingRetriever(retriever=base).invoke(QUERY):
        assert "built with another model" in (get_explanation(document).surrogate or "")  # type: ignore[union-attr]


def test_other_kinds_of_search_say_so_or_tell_no_score(base: ParentDocumentRetriever) -> None:
    mmr = parents(search_type=SearchType.mmr)
    found = ExplainingRetriever(retriever=mmr).invoke(QUERY)
    assert found == mmr.invoke(QUERY)
    for document in found:
        assert "MMR" in (document.explanation.surrogate or "")  # type: ignore[attr-defined]
        assert (document.hit.score, document.hit.chunk is None) == (None, False)  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of langchain-community
def test_a_relevance_score_is_no_score_of_the_store() -> None:
    module = pytest.importorskip("langchain_community.vectorstores")
    embeddings = LocalEmbeddings(tiny("bert"))
    index = module.FAISS.from_texts(["a"], embeddings, normalize_L2=True)
    base = parents(index, search_type=SearchType.similarity_score_threshold, search_kwargs={"score_threshold": -9.0})
    found = ExplainingRetriever(retriever=base).invoke(QUERY)
    assert found == base.invoke(QUERY)
    for document in found:
        assert (document.hit.score, document.hit.metric) == (None, "unknown")  # type: ignore[attr-defined]
        assert document.explanation.surrogate is None  # type: ignore[attr-defined]


class Reversed(ParentDocumentRetriever):
    """Has a search of its own."""

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return super()._get_relevant_documents(query, run_manager=run_manager)[::-1]


def test_a_class_with_a_search_of_its_own_is_asked_as_it_is(base: ParentDocumentRetriever) -> None:
    own = Reversed(**dict(base))
    found = ExplainingRetriever(retriever=own).invoke(QUERY)
    assert found == own.invoke(QUERY) == base.invoke(QUERY)[::-1]
    for document in found:
        assert "chosen by Reversed" in (document.explanation.surrogate or "")  # type: ignore[attr-defined]
        assert (document.hit.chunk, document.explanation.document) == (None, document.page_content)  # type: ignore[attr-defined]


class Forgetful(InMemoryStore):
    """Leaves out what it does not have, as a docstore of one's own may."""

    def mget(self, keys: Sequence[str]) -> Any:
        return (one for one in super().mget(keys) if one is not None)


def test_a_docstore_that_leaves_documents_out_fails_no_search() -> None:
    for base in (parents(), parents(docstore=Forgetful())):
        base.docstore.mdelete([chunks(base).popitem()[0]])
        found = ExplainingRetriever(retriever=base).invoke(QUERY)
        assert found == base.invoke(QUERY)
        assert len(found) == len(chunks(base)) - 1
        for document in found:
            hit = document.hit  # type: ignore[attr-defined]
            if isinstance(base.docstore, Forgetful):
                assert (hit.status, hit.chunk) == ("skipped", None)
                assert hit.reason == "the chunk by which the document was found is not known"
                assert hit.text == document.page_content
            else:
                assert document.page_content[slice(*hit.chunk)] == chunks(base)[hit.id][0].page_content


def test_one_document_under_two_keys_is_explained_by_the_chunk_of_each() -> None:
    store, docstore = InMemoryVectorStore(LocalEmbeddings(tiny("bert"))), InMemoryStore()
    document = Document(f"{CORPUS[0]}. {CORPUS[2]}")
    docstore.mset([("a", document), ("b", document)])
    store.add_documents([Document(CORPUS[0], metadata={"doc_id": "a"}), Document(CORPUS[2], metadata={"doc_id": "b"})])
    base = MultiVectorRetriever(vectorstore=store, docstore=docstore)
    found = ExplainingRetriever(retriever=base).invoke(QUERY)
    assert found == base.invoke(QUERY)
    hits = {one.hit.id: one.hit for one in found}  # type: ignore[attr-defined]
    assert {key: hit.text[slice(*hit.chunk)] for key, hit in hits.items()} == {"a": CORPUS[0], "b": CORPUS[2]}


def test_chunks_are_precomputed_and_forgotten_by_the_key_of_their_document(base: ParentDocumentRetriever) -> None:
    with Explainer(tiny("bert")) as explainer:
        wrapped = ExplainingRetriever(retriever=base, explainer=explainer, explain="eager")
        assert wrapped.precompute(progress=False).built == len({text for one in PARENTS for text in one.split(". ")})
        why = get_explanation(wrapped.invoke(QUERY)[0])
        assert why is not None
        assert why.provenance["path"] == "memory"
        assert explainer.store.forget(["one", "two", "three"]) == 5


@pytest.mark.parametrize("matrices", [False, True])
def test_a_logged_chunk_is_verified_as_the_chunk_that_it_was(base: ParentDocumentRetriever, tmp_path, matrices) -> None:
    explainer = Explainer(tiny("bert"))
    with ExplanationLog(tmp_path / "chunks", matrices=matrices) as log:
        ExplainingRetriever(retriever=base, explainer=explainer).invoke(
            QUERY, {"callbacks": [ExplanationLogHandler(log)]}
        )
    (record,) = log.records()
    for hit in record.hits:
        assert hit.chunk is not None
        assert hit.explanation.document == hit.text
    verdicts = list(verify(tmp_path / "chunks", lambda logged: explainer))
    assert [(one.outcome, one.reason) for one in verdicts] == [("holds", "")] * len(record.hits)


def test_a_wrapped_one_inside_an_ensemble_keeps_its_chunks(base: ParentDocumentRetriever, store: VectorStore) -> None:
    ensemble = EnsembleRetriever(retrievers=[store.as_retriever(), ExplainingRetriever(retriever=base)])
    outer = ExplainingRetriever(retriever=ensemble, explainer=tiny("bert"))
    found = outer.invoke(QUERY)
    assert found == ensemble.invoke(QUERY)
    best = {PARENTS[KEYS.index(key)]: chunk.page_content for key, (chunk, _) in chunks(base).items()}
    seen = {one.page_content: one.hit for one in found if one.hit.chunk is not None}  # type: ignore[attr-defined]
    assert {text: text[slice(*hit.chunk)] for text, hit in seen.items()} == best


@pytest.mark.slow
def test_on_real_weights_the_chunks_score_is_explained_and_not_that_of_its_document() -> None:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(packaged_path() or "all-MiniLM-L6-v2"))
    texts = [
        "Paris is the capital of France. It has many bridges and museums. Trains leave every hour.",
        "Honeybees find their way home by the sun. Bread is baked in the morning. The harbour is closed in winter.",
    ]
    base = ParentDocumentRetriever(
        vectorstore=InMemoryVectorStore(LocalEmbeddings(model)), docstore=InMemoryStore(), child_splitter=sentences()
    )
    base.add_documents([Document(text) for text in texts])
    question = "How do bees navigate?"
    (first, *_) = ExplainingRetriever(retriever=base).invoke(question)
    why = get_explanation(first)
    assert why is not None
    assert first.page_content == texts[1]
    assert first.page_content[slice(*first.hit.chunk)] == "Honeybees find their way home by the sun"  # type: ignore[attr-defined]
    whole = Explainer(model).explain(question, texts[1]).score
    assert why.score == pytest.approx(first.hit.score, abs=1e-5)  # type: ignore[attr-defined]
    assert why.score > whole + 0.1


def test_what_the_scored_search_does_not_take_fails_no_search() -> None:
    """PGVector's plain search passes over options that it does not know; its scored one takes none of them."""
    library = pytest.importorskip("langchain_postgres")
    with postgres.engine() as engine:
        store = library.PGVector(LocalEmbeddings(tiny("bert")), connection=engine, collection_name=uuid4().hex)
        base = parents(store, search_kwargs={"k": 3, "score_threshold": 0.1})
        found = ExplainingRetriever(retriever=base).invoke(QUERY)
        plain = base.invoke(QUERY)
        store.delete_collection()
    assert found == plain != []
    assert all(document.hit.score is not None for document in found)  # type: ignore[attr-defined]
