"""What LangChain's embeddings and stores really computed is what is explained, or the explanation says what differs."""

from __future__ import annotations

import tempfile
from functools import cache
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from langchain_core.stores import InMemoryByteStore
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore, VectorStoreRetriever
from langchain_rag_explain import ExplainedDocument, ExplainingRetriever
from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize

from rag_explain import Explainer
from rag_explain.encoder.loading import packaged_path
from rag_explain.results.explanation import Explanation
from rag_explain.results.notices import UNCHECKED
from tests.support.models import CORPUS, folder, routed, static, tiny

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

QUERY = "why did the dog\nlook at the moon?"
PROMPTS = {"query": "the old bridge: ", "document": "a cat: ", "other": "honeybees, "}
IDS = [f"id-{number}" for number in range(len(CORPUS))]


@cache
def saved(**settings: Any) -> str:
    """Where a model with prompts is kept, for embeddings that load it by name."""
    where = tempfile.mkdtemp(prefix="tiny-prompts-")
    after = [Normalize()] if settings.pop("normalize", True) else []
    tiny("roberta", after=lambda: after, dtype=torch.float32, prompts=PROMPTS, **settings).save(
        where, create_model_card=False
    )
    return where


def embeddings_of(package: str, folder: str, **options: Any) -> Embeddings:
    """HuggingFaceEmbeddings of either package, or the ones for BGE models."""
    kind = "HuggingFaceBgeEmbeddings" if package == "bge" else "HuggingFaceEmbeddings"
    module = pytest.importorskip(
        "langchain_huggingface" if package == "huggingface" else "langchain_community.embeddings"
    )
    made: Embeddings = getattr(module, kind)(model_name=folder, **options)
    return made


def explained(retriever: BaseRetriever, query: str = QUERY) -> list[tuple[ExplainedDocument, Explanation]]:
    found = []
    for document in retriever.invoke(query):
        assert isinstance(document, ExplainedDocument)
        assert document.explanation is not None, document.hit.reason
        found.append((document, document.explanation))
    assert found
    return found


def filled(store: VectorStore, texts: list[str] = CORPUS) -> VectorStore:
    store.add_documents([Document(text.replace(" ", "\n", 1), id=name) for name, text in zip(IDS, texts, strict=True)])
    return store


def chroma(embeddings: Embeddings, space: str = "cosine") -> Any:
    module = pytest.importorskip("langchain_chroma")
    return module.Chroma(uuid4().hex, embeddings, collection_metadata={"hnsw:space": space})


USAGES: list[tuple[str, dict[str, Any]]] = [
    ("huggingface", {}),
    ("community", {}),
    ("huggingface", {"encode_kwargs": {"prompt": "paris: "}}),
    ("community", {"encode_kwargs": {"prompt_name": "other", "batch_size": 2}}),
    ("huggingface", {"query_encode_kwargs": {"prompt_name": "query"}}),
    ("huggingface", {"encode_kwargs": {"prompt": "a "}, "query_encode_kwargs": {"prompt_name": "other"}}),
    ("community", {"encode_kwargs": {"truncate_dim": 8}}),
    ("huggingface", {"encode_kwargs": {"truncate_dim": 8, "normalize_embeddings": True}}),
    ("huggingface", {"model_kwargs": {"default_prompt_name": "other"}}),
    ("huggingface", {"model_kwargs": {"prompts": {"query": "germany? "}, "truncate_dim": 12}}),
    ("bge", {"query_instruction": "where: ", "embed_instruction": "the capital: "}),
    ("bge", {"query_instruction": "where: ", "model_kwargs": {"default_prompt_name": "other"}}),
]


@pytest.mark.parametrize(("package", "options"), USAGES, ids=str)
def test_what_the_embeddings_do_is_what_is_explained(package: str, options: dict[str, Any]) -> None:
    include_prompt = "default_prompt_name" not in str(options)  # pooling may leave out the prompt, but no instruction
    embeddings = embeddings_of(package, saved(include_prompt=include_prompt), **options)
    store = filled(InMemoryVectorStore(embeddings))
    plain = dict(store.similarity_search_with_score(QUERY)[0][0])
    query = np.array(embeddings.embed_query(QUERY))
    for document, explanation in explained(ExplainingRetriever(vectorstore=store)):
        assert explanation.surrogate is None
        assert explanation.score == pytest.approx(document.hit.score, abs=1e-5)
        stored = np.array(embeddings.embed_documents([document.page_content])[0])
        cosine = query @ stored / np.linalg.norm(query) / np.linalg.norm(stored)
        assert explanation.score == pytest.approx(cosine, abs=1e-5)
        assert explanation.gap == pytest.approx(0.0, abs=1e-4)
        assert (explanation.query, explanation.document) == (QUERY, document.page_content)
        for text, tokens in ((QUERY, explanation.query_tokens), (document.page_content, explanation.document_tokens)):
            assert all(text[one.start : one.end] == one.text for one in tokens if one.part == "text")
            seen = {place for one in tokens if one.part == "text" for place in range(one.start, one.end)}
            assert {place for place, letter in enumerate(text) if letter.strip()} <= seen
    (one, *_) = explained(ExplainingRetriever(retriever=store.as_retriever()))
    assert [notice.code for notice in one[1].notices] == []
    assert dict(store.similarity_search_with_score(QUERY)[0][0]) == plain


def test_prompts_that_the_embeddings_used_are_tokens_of_their_own() -> None:
    prompts = {"encode_kwargs": {"prompt": "the capital: "}, "query_encode_kwargs": {"prompt": "where: "}}
    embeddings = embeddings_of("huggingface", saved(), **prompts)
    (_, explanation) = explained(
        ExplainingRetriever(vectorstore=filled(InMemoryVectorStore(embeddings)), unit="token")
    )[0]
    assert "prompt" in {token.part for token in explanation.query_tokens}
    assert "prompt" in {token.part for token in explanation.document_tokens}
    plain = embeddings_of("huggingface", saved())
    (_, explanation) = explained(ExplainingRetriever(vectorstore=filled(InMemoryVectorStore(plain)), unit="token"))[0]
    assert "prompt" not in {token.part for token in (*explanation.query_tokens, *explanation.document_tokens)}


def test_a_dot_product_of_normalised_vectors_is_a_cosine() -> None:
    folder = saved(normalize=False, similarity_fn_name="dot")
    scaled = embeddings_of("huggingface", folder, encode_kwargs={"normalize_embeddings": True})
    for store in (filled(InMemoryVectorStore(scaled)), filled(chroma(scaled, "ip")), filled(chroma(scaled, "l2"))):
        for document, explanation in explained(ExplainingRetriever(vectorstore=store)):
            assert (explanation.surrogate, explanation.measure) == (None, "cosine")
            assert document.hit.gap == pytest.approx(0.0, abs=1e-5)
    unscaled = embeddings_of("huggingface", folder)
    for document, explanation in explained(ExplainingRetriever(vectorstore=filled(chroma(unscaled, "ip")))):
        assert (explanation.surrogate, explanation.measure) == (None, "dot")
        assert document.hit.gap == pytest.approx(0.0, abs=1e-4)
    for space in ("l2", "cosine"):
        for _, explanation in explained(ExplainingRetriever(retriever=filled(chroma(unscaled, space)).as_retriever())):
            assert "vectors that are not normalised" in (explanation.surrogate or "")


def test_an_explainer_that_embeds_otherwise_is_told_what_to_pass() -> None:
    folder, query = saved(), "where is the cat?"
    store: Any = InMemoryVectorStore(embeddings_of("bge", folder, query_instruction="where: "))
    store.add_texts(CORPUS)
    mine = Explainer(SentenceTransformer(folder, device="cpu"))
    for given in ({"vectorstore": store}, {"retriever": store.as_retriever()}):
        for _, explanation in explained(ExplainingRetriever(**given, explainer=mine, surrogate=False), query):
            assert "HuggingFaceBgeEmbeddings gives the query another vector" in (explanation.surrogate or "")
            assert "prompts={'query': 'where: ', 'document': ''}" in (explanation.surrogate or "")
    told = Explainer(SentenceTransformer(folder, device="cpu", prompts={"query": "where: ", "document": ""}))
    for _, explanation in explained(ExplainingRetriever(vectorstore=store, explainer=told), query):
        assert explanation.surrogate is None
    for _, explanation in explained(ExplainingRetriever(vectorstore=store, explainer=told), "where is\nthe cat?"):
        assert "line breaks become blanks" in (explanation.surrogate or "")
    store = InMemoryVectorStore(embeddings_of("huggingface", folder, encode_kwargs={"truncate_dim": 8}))
    store.add_texts(CORPUS)
    (_, explanation) = explained(ExplainingRetriever(vectorstore=store, explainer=told), query)[0]
    assert "8 dimensions, and this encoder has 16" in (explanation.surrogate or "")
    assert "truncate_dim=8" in (explanation.surrogate or "")


def test_embeddings_that_were_changed_are_noticed() -> None:
    embeddings: Any = embeddings_of("huggingface", saved())
    store = filled(InMemoryVectorStore(embeddings))
    wrapped = ExplainingRetriever(vectorstore=store, unit="token")
    assert {one.surrogate for _, one in explained(wrapped)} == {None}
    embeddings.query_encode_kwargs["prompt_name"] = "query"
    for document, explanation in explained(wrapped):
        assert explanation.surrogate is None
        assert explanation.score == pytest.approx(document.hit.score, abs=1e-5)
        assert "prompt" in {token.part for token in explanation.query_tokens}


class Shouting(Embeddings):
    """Someone's own class: no attribute of it says what it does to a text."""

    def __init__(self, model: SentenceTransformer) -> None:
        self.model, self.calls = model, 0

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return self.model.encode([text.upper() for text in texts]).tolist()  # type: ignore[no-any-return]

    def embed_query(self, text: str) -> list[float]:
        self.calls += 1
        return self.embed_documents([text])[0]


def test_what_cannot_be_seen_is_measured_once_and_not_in_the_search() -> None:
    mine = Shouting(SentenceTransformer(saved(), device="cpu"))
    wrapped = ExplainingRetriever(retriever=filled(InMemoryVectorStore(mine)).as_retriever())
    for mode in ("lazy", "off"):
        mine.calls = 0
        documents: Any = wrapped.invoke(QUERY, explain=mode)
        assert mine.calls == 1  # the search's own
    assert documents[0].explanation is None
    assert mine.calls == 1
    documents = wrapped.invoke(QUERY)
    assert all("Shouting gives the query another vector" in one.explanation.surrogate for one in documents)
    assert mine.calls == 3  # one more search, and one question


class Failing(Shouting):
    """Cannot be reached once it has searched."""

    def embed_query(self, text: str) -> list[float]:
        if self.calls:
            raise TimeoutError("no route to host")
        return super().embed_query(text)


def test_embeddings_that_fail_when_they_are_asked_fail_nothing() -> None:
    model = SentenceTransformer(saved(), device="cpu")
    (_, explanation) = explained(ExplainingRetriever(vectorstore=filled(InMemoryVectorStore(Failing(model)))))[0]
    (note,) = [notice for notice in explanation.notices if notice.code == UNCHECKED]
    assert note.text == "Failing could not be compared with this encoder (TimeoutError: no route to host)"
    assert note.level == "note"


@pytest.mark.parametrize("kind", ["memory", "chroma", "faiss"])
@pytest.mark.parametrize("form", ["retriever", "vectorstore"])
@pytest.mark.parametrize("contents", ["own", "random", "header"])
def test_an_index_of_other_vectors_is_not_exact(kind: str, form: str, contents: str) -> None:
    embeddings = embeddings_of("huggingface", saved())
    vectors = {
        "own": embeddings.embed_documents(CORPUS),
        "random": np.random.default_rng(0).normal(size=(len(CORPUS), 16)).tolist(),
        "header": embeddings.embed_documents([f"the {text}" for text in CORPUS]),
    }[contents]
    store: Any
    if kind == "chroma":
        store = chroma(embeddings, "l2" if contents != "random" else "cosine")
        store._collection.add(ids=IDS, embeddings=vectors, documents=CORPUS)
    elif kind == "faiss":
        stores = pytest.importorskip("langchain_community.vectorstores")
        store = stores.FAISS.from_embeddings(list(zip(CORPUS, vectors, strict=True)), embeddings, ids=IDS)
    else:
        store = InMemoryVectorStore(embeddings)
        for name, text, vector in zip(IDS, CORPUS, vectors, strict=True):
            store.store[name] = {"id": name, "text": text, "vector": vector, "metadata": {}}
    wrapped = ExplainingRetriever(**{form: store if form == "vectorstore" else store.as_retriever()}, surrogate=False)
    for document, explanation in explained(wrapped):
        assert document.hit.id in IDS
        if contents == "own":
            assert explanation.notices == ()
        else:
            assert "the index's vector of this document is not the one" in (explanation.surrogate or "")
    wrapped.precompute(unit="token", progress=False)
    for _, explanation in explained(wrapped):  # from the store, without encoding the document
        assert explanation.provenance["path"] == "memory"
        assert (explanation.surrogate is None) == (contents == "own")


def test_a_store_that_tells_nothing_is_said_to_be_unchecked() -> None:
    class Closed(InMemoryVectorStore):
        """Keeps its vectors to itself."""

    class Opaque(VectorStore):
        def __init__(self, inner: VectorStore) -> None:
            self._inner = [inner]

        @property
        def embeddings(self) -> Embeddings | None:
            return self._inner[0].embeddings

        def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
            return self._inner[0].similarity_search(query, k, **kwargs)

        @classmethod
        def from_texts(cls, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

    store = Opaque(filled(Closed(embeddings_of("huggingface", saved()))))
    for _, explanation in explained(ExplainingRetriever(retriever=store.as_retriever())):
        assert explanation.surrogate is None
        assert [(notice.code, notice.level) for notice in explanation.notices] == [(UNCHECKED, "note")]
    for _, explanation in explained(
        ExplainingRetriever(retriever=store.as_retriever(search_type="similarity"), surrogate="mixed")
    ):
        assert explanation.surrogate == "mixed"


def test_chroma_lists_its_documents_for_precompute() -> None:
    store = filled(chroma(embeddings_of("huggingface", saved())))
    wrapped = ExplainingRetriever(retriever=store.as_retriever())
    assert wrapped.precompute(unit="token", progress=False).kept == len(CORPUS)
    assert {one.provenance["path"] for _, one in explained(wrapped)} == {"memory"}


def test_embeddings_with_a_cache_around_them_are_seen_without_filling_it() -> None:
    classic, kept = pytest.importorskip("langchain_classic.embeddings"), InMemoryByteStore()
    inner = embeddings_of("huggingface", saved(), query_encode_kwargs={"prompt": "where: "})
    cached = classic.CacheBackedEmbeddings.from_bytes_store(inner, kept, key_encoder="sha256")
    wrapped = ExplainingRetriever(vectorstore=filled(InMemoryVectorStore(cached)))
    before = dict(kept.store)
    for document, explanation in explained(wrapped):
        assert explanation.surrogate is None
        assert explanation.score == pytest.approx(document.hit.score, abs=1e-5)
    assert kept.store == before


def test_a_score_of_token_vectors_is_a_stand_in_for_one_of_text_vectors() -> None:
    encoder = Explainer(MultiVectorEncoder(str(folder("bert")), device="cpu"))
    store = filled(InMemoryVectorStore(embeddings_of("huggingface", saved())))
    for _, explanation in explained(ExplainingRetriever(retriever=store.as_retriever(), explainer=encoder)):
        assert "the documents were ranked by vectors of HuggingFaceEmbeddings" in (explanation.surrogate or "")


@cache
def saved_towers() -> str:
    """Where a model is kept whose queries are a mean of word vectors and whose documents a transformer reads."""
    where = tempfile.mkdtemp(prefix="tiny-towers-")
    model = routed(static(width=16), tiny("roberta", dtype=torch.float32), Normalize(), prompts=PROMPTS)
    model.save(where, create_model_card=False)
    return where


TASKS: list[dict[str, Any]] = [{}, {"query_encode_kwargs": {"task": "query"}, "encode_kwargs": {"task": "document"}}]


@pytest.mark.parametrize("options", TASKS, ids=["told no task", "told the task"])
def test_the_tower_that_the_framework_takes_is_the_one_that_is_explained(options: dict[str, Any]) -> None:
    embeddings = embeddings_of("huggingface", saved_towers(), **options)
    query = np.array(embeddings.embed_query(QUERY))
    wrapped = ExplainingRetriever(retriever=filled(chroma(embeddings)).as_retriever(), unit="token")
    for document, explanation in explained(wrapped):
        stored = np.array(embeddings.embed_documents([document.page_content])[0])
        assert explanation.notices == ()
        assert explanation.score == pytest.approx(float(query @ stored), abs=1e-5)
        assert explanation.gap == pytest.approx(0.0, abs=1e-4)
        # A table of word vectors has no special tokens: without a task both are read by the default route.
        assert ("special" in {token.part for token in explanation.query_tokens}) == (not options)


class ByQuestion(Embeddings):
    """Treats one query otherwise than another, which a single look cannot tell."""

    def __init__(self, model: SentenceTransformer) -> None:
        self.model = model

    def embed_query(self, text: str) -> list[float]:
        found: list[float] = self.model.encode(text, prompt="question: " if text.endswith("?") else "").tolist()
        return found

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        found: list[list[float]] = self.model.encode(texts).tolist()
        return found


class Derived(InMemoryVectorStore):
    """May search otherwise than the store in memory does, so that it is not asked for scores."""


@pytest.mark.parametrize("kind", [Derived, InMemoryVectorStore])
def test_every_query_is_compared_by_its_scores_or_its_vector(kind: type[InMemoryVectorStore]) -> None:
    mine = ByQuestion(SentenceTransformer(str(packaged_path()), device="cpu"))  # whose scores differ, unlike a toy's
    wrapped = ExplainingRetriever(retriever=filled(kind(mine)).as_retriever())
    for query, is_right in (("the moon?", True), ("where is the moon", False), ("the dog?", True)):
        for _, explanation in explained(wrapped, query):
            assert (explanation.surrogate is None) == is_right
            assert is_right or "gives the query another vector" in (explanation.surrogate or "")


class Elsewhere(VectorStoreRetriever):
    """Asks for something else than the query, as retrievers of people's own do."""

    def _get_relevant_documents(self, query: str, *, run_manager: Any, **kwargs: Any) -> list[Document]:
        return super()._get_relevant_documents("honeybees by the sun", run_manager=run_manager, **kwargs)[::-1]


def test_a_retriever_of_ones_own_class_is_not_taken_for_the_plain_one() -> None:
    mine = ByQuestion(tiny("roberta", after=lambda: [Normalize()], dtype=torch.float32))
    wrapped = ExplainingRetriever(retriever=Elsewhere(vectorstore=filled(InMemoryVectorStore(mine))))
    for _, explanation in explained(wrapped, "the moon"):
        assert "chosen by Elsewhere" in (explanation.surrogate or "")


def test_a_search_of_a_stores_own_is_said_not_to_be_known() -> None:
    class Asking(InMemoryVectorStore):
        def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
            return super().similarity_search("the moon", k, **kwargs)

    store = Asking(embeddings_of("huggingface", saved()))
    store.add_texts(CORPUS, ids=IDS)
    for document, explanation in explained(ExplainingRetriever(retriever=store.as_retriever())):
        assert document.hit.score is None
        (note,) = [notice for notice in explanation.notices if notice.code == UNCHECKED]
        assert "the search of Asking is not known here" in note.text


def test_a_store_that_cannot_be_read_fails_no_search() -> None:
    class Fickle(InMemoryVectorStore):
        is_broken = False

        @property
        def retrieval_mode(self) -> None:
            if self.is_broken:
                raise ConnectionError("no route to host")

    store = Fickle(embeddings_of("huggingface", saved()))
    store.add_texts(CORPUS, ids=IDS)
    retriever = ExplainingRetriever(retriever=store.as_retriever(), explainer=Explainer(tiny("bert")))
    wanted = [document.page_content for document in retriever.invoke(QUERY)]
    Fickle.is_broken = True
    found: list[Any] = retriever.invoke(QUERY)
    assert [document.page_content for document in found] == wanted
    assert "no route to host" in found[0].explanation.surrogate
