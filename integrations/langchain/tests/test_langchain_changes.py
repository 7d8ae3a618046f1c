"""What is changed before a search is followed; what is changed between a search and a look is explained or said."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_rag_explain import ExplainingRetriever
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Router
from sentence_transformers.sentence_transformer.modules import Normalize

from integrations.langchain.tests.test_langchain_truth import chroma, embeddings_of, explained, filled, saved
from rag_explain import Explainer
from tests.support.models import CORPUS, tiny

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

QUERY = "why did the dog look at the moon?"


class Plain(Embeddings):
    """Someone's own class around a model; `prefix` goes in front of queries."""

    def __init__(self, model: SentenceTransformer, prefix: str = "") -> None:
        self.model, self.prefix = model, prefix

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        found: list[list[float]] = self.model.encode(texts).tolist()
        return found

    def embed_query(self, text: str) -> list[float]:
        found: list[float] = self.model.encode(self.prefix + text).tolist()
        return found


def model(name: str = "roberta") -> SentenceTransformer:
    return tiny(name, after=lambda: [Normalize()], dtype=torch.float32)


def own_score(embeddings: Embeddings, text: str, query: str = QUERY) -> float:
    one, other = np.array(embeddings.embed_query(query)), np.array(embeddings.embed_documents([text])[0])
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


def _embedding(wrapped: ExplainingRetriever, store: Any) -> None:
    store.embedding = Plain(model("bert"))
    filled(store)


def _store(wrapped: ExplainingRetriever, store: Any) -> None:
    inner: Any = wrapped.retriever
    inner.vectorstore = filled(InMemoryVectorStore(Plain(model("bert"), "where: ")))


def _retriever(wrapped: ExplainingRetriever, store: Any) -> None:
    wrapped.retriever = filled(InMemoryVectorStore(Plain(model("bert")))).as_retriever()


def _held(wrapped: ExplainingRetriever, store: Any) -> None:
    store.embedding.model = model("bert")
    filled(store)


def _prefix(wrapped: ExplainingRetriever, store: Any) -> None:
    store.embedding.prefix = "where: "


@pytest.mark.parametrize("change", [_embedding, _store, _retriever, _held, _prefix])
@pytest.mark.parametrize("is_looked_at", [True, False])
def test_what_was_exchanged_before_the_search_is_what_is_explained(change: Any, is_looked_at: bool) -> None:
    store: Any = filled(InMemoryVectorStore(Plain(model())))
    wrapped = ExplainingRetriever(retriever=store.as_retriever())
    if is_looked_at:
        assert {one.surrogate for _, one in explained(wrapped, QUERY)} == {None}
    change(wrapped, store)
    now: Any = wrapped._store
    for document, explanation in explained(wrapped, QUERY):
        assert explanation.notices == ()
        assert explanation.score == pytest.approx(own_score(now.embeddings, document.page_content), abs=1e-5)


def test_a_search_of_another_type_is_no_search_by_similarity() -> None:
    store = filled(InMemoryVectorStore(Plain(model())))
    inner: Any = store.as_retriever()
    wrapped = ExplainingRetriever(retriever=inner)
    assert {one.surrogate for _, one in explained(wrapped, QUERY)} == {None}
    inner.search_type = "mmr"
    assert all("diversity" in (one.surrogate or "") for _, one in explained(wrapped, QUERY))
    inner.search_type = "similarity"
    assert {one.surrogate for _, one in explained(wrapped, QUERY)} == {None}


def test_embeddings_without_a_model_any_more_are_asked_and_fail_no_search() -> None:
    store: Any = filled(InMemoryVectorStore(Plain(model())))
    wrapped = ExplainingRetriever(retriever=store.as_retriever())
    vector = store.embedding.embed_query(QUERY)
    store.embedding = Remote([vector])
    (document, *_) = wrapped.invoke(QUERY)
    assert document.explanation is None
    assert "Remote gives every text the same vector" in document.hit.reason
    store.embedding = Far(store.embedding)  # embeds no strings at all
    (document, *_) = wrapped.invoke(QUERY)
    assert document.explanation is None
    assert "holds no SentenceTransformer any more" in document.hit.reason


def _later_prefix(embeddings: Any) -> None:
    embeddings.prefix = "where: "


def _later_model(embeddings: Any) -> None:
    embeddings.model = model("bert")


@pytest.mark.parametrize("change", [_later_prefix, _later_model])
def test_a_hit_is_explained_by_the_prompt_and_the_model_of_its_search(change: Any) -> None:
    embeddings = Plain(model())
    wrapped = ExplainingRetriever(retriever=filled(InMemoryVectorStore(embeddings)).as_retriever())
    documents: Any = wrapped.invoke(QUERY)
    scores = [own_score(embeddings, document.page_content) for document in documents]
    change(embeddings)
    for document, score in zip(documents, scores, strict=True):
        assert document.explanation.score == pytest.approx(score, abs=1e-5)
        assert [notice.level for notice in document.explanation.notices] == ["note"]
        assert "embeds otherwise than in the search" in document.explanation.notices[0].text


def _write(found: Any) -> None:
    with torch.no_grad():
        next(found.parameters()).mul_(1.5)


def _data(found: Any) -> None:
    for one in found.parameters():
        one.data.mul_(1.1)


def _pooling(found: Any) -> None:
    found[1].pooling_mode = "cls"


def _forward(found: Any) -> None:
    run = found[1].forward
    found[1].forward = lambda features: run({**features, "token_embeddings": features["token_embeddings"] ** 2})


@pytest.mark.parametrize("is_looked_at", [True, False])
@pytest.mark.parametrize("change", [_write, _data, _pooling, _forward])
def test_a_model_that_changed_between_search_and_look_is_a_stand_in(change: Any, is_looked_at: bool) -> None:
    embeddings = Plain(model())
    wrapped = ExplainingRetriever(retriever=filled(InMemoryVectorStore(embeddings)).as_retriever())
    if is_looked_at:
        assert {one.surrogate for _, one in explained(wrapped, QUERY)} == {None}
    documents: Any = wrapped.invoke(QUERY)
    change(embeddings.model)
    for document in documents:
        found = document.explanation
        assert found is None or "the model was changed between the search and this explanation" in found.surrogate
        assert found is not None or document.hit.reason


@pytest.mark.parametrize(
    "change",
    [
        lambda found: setattr(found, "step", 1),
        lambda found: found.encode("something else", prompt="other: "),
        lambda found: found.train(),
        lambda found: found.tokenizer(["a"], truncation=True, max_length=3),
    ],
)
def test_what_decides_nothing_is_no_change_for_one_who_looked_before(change: Any) -> None:
    embeddings = Plain(model())
    wrapped = ExplainingRetriever(retriever=filled(InMemoryVectorStore(embeddings)).as_retriever())
    explained(wrapped, QUERY)
    before = wrapped._hit_explainer._explainer_for(wrapped._search())
    documents: Any = wrapped.invoke(QUERY)
    change(embeddings.model)
    assert {document.explanation.notices for document in documents} == {()}
    assert wrapped._hit_explainer._explainer_for(wrapped._search()) is before


@pytest.mark.parametrize("name", ["forward", "preprocess", "encode", "_modules"])
def test_what_is_replaced_on_the_users_own_model_is_noticed(name: str) -> None:
    """The model that explains is a copy of it that embeds as the framework does."""
    embeddings: Any = Plain(model(), "where: ")
    wrapped = ExplainingRetriever(retriever=filled(InMemoryVectorStore(embeddings)).as_retriever())
    before = [one.score for _, one in explained(wrapped, QUERY)]
    if name == "_modules":
        other = model("bert")
        embeddings.model.__dict__["_modules"] = other.__dict__["_modules"]
        assert embeddings.embed_query(QUERY) == other.encode(f"where: {QUERY}").tolist()
    else:
        own = getattr(embeddings.model, name)
        changed = {"forward": _negated, "preprocess": _lowered, "encode": _doubled}[name]
        setattr(embeddings.model, name, lambda *args, **kwargs: changed(own, *args, **kwargs))
    for document in wrapped.invoke(QUERY):
        if document.explanation is not None and not document.explanation.surrogate:
            score = own_score(embeddings, document.page_content)
            assert document.explanation.score == pytest.approx(score, abs=1e-5)
            assert document.explanation.score not in before


def _negated(own: Any, features: Any, **kwargs: Any) -> Any:
    found = own(features, **kwargs)
    return {**found, "sentence_embedding": found["sentence_embedding"].abs()}


def _lowered(own: Any, texts: Any, **kwargs: Any) -> Any:
    return own([text[::-1] for text in texts], **kwargs)


def _doubled(own: Any, *args: Any, **kwargs: Any) -> Any:
    return own(*args, **kwargs) + 1.0


def test_a_refusal_because_of_a_hook_ends_with_the_hook() -> None:
    embeddings = Plain(model())
    store = filled(InMemoryVectorStore(embeddings))
    hook = embeddings.model[1].register_forward_hook(
        lambda module, args, output: {**output, "sentence_embedding": output["sentence_embedding"] + 1.0}
    )
    wrapped = ExplainingRetriever(retriever=store.as_retriever())
    (document, *_) = wrapped.invoke(QUERY)
    assert document.explanation is None
    assert "remove the hook" in document.hit.reason
    hook.remove()
    assert {one.surrogate for _, one in explained(wrapped, QUERY)} == {None}


class Remote(Embeddings):
    """An object whose model is elsewhere: every call costs."""

    def __init__(self, vectors: list[list[float]]) -> None:
        self.vectors, self.asked = vectors, []

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.asked += texts
        return [self.vectors[0] for _ in texts]

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


class Far:
    """Answers searches alone."""

    def __init__(self, inner: Remote) -> None:
        self.embed_query = inner.embed_query


class Derived(InMemoryVectorStore):
    """May search otherwise than the store in memory does, so that it is not asked for scores."""


class Opaque(InMemoryVectorStore):
    """Tells its documents, and no ids by which its vectors could be asked for."""

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> Any:
        return [one.model_copy(update={"id": None}) for one in super().similarity_search(query, k, **kwargs)]


def test_a_model_elsewhere_is_asked_for_nothing_but_the_search() -> None:
    here = model()
    texts, queries = here.encode_document(CORPUS).tolist(), here.encode_query([QUERY]).tolist()
    for kind, form, expected in (
        (InMemoryVectorStore, "vectorstore", []),  # its scores tell
        (InMemoryVectorStore, "retriever", []),  # and so they do here
        (Derived, "retriever", ["unchecked"]),  # its vectors tell of the documents
        (Opaque, "retriever", ["other-ranking"]),
    ):
        remote = Remote(queries)
        store: Any = kind(remote)
        for number, text in enumerate(CORPUS):
            store.store[str(number)] = {"id": str(number), "text": text, "vector": texts[number], "metadata": {}}
        given: dict[str, Any] = {form: store if form == "vectorstore" else store.as_retriever()}
        wrapped = ExplainingRetriever(**given, explainer=Explainer(here))
        for _ in range(2):
            for document in wrapped.invoke(QUERY):
                assert [notice.code for notice in document.explanation.notices] == expected
        assert remote.asked == [QUERY, QUERY]  # of the two searches


class Counting(Plain):
    """Tells whom it was asked as."""

    asked: ClassVar[list[tuple[int, str]]] = []

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.asked.extend((id(self), text) for text in texts)
        return super().embed_documents(texts)

    def embed_query(self, text: str) -> list[float]:
        self.asked.append((id(self), text))
        return super().embed_query(text)


def test_only_copies_of_an_embedding_object_see_the_probe() -> None:
    mine, forwards = Counting(model()), []
    store = filled(InMemoryVectorStore(mine))
    Counting.asked.clear()
    wrapped = ExplainingRetriever(retriever=store.as_retriever())
    mine.model.register_forward_hook(lambda *args: forwards.append(args))
    documents: Any = wrapped.invoke(QUERY)
    assert (len(forwards), [text for name, text in Counting.asked if name == id(mine)]) == (1, [QUERY])
    assert all(document.explanation is not None for document in documents)
    assert {text for name, text in Counting.asked if name == id(mine)} == {QUERY}
    assert {text for name, text in Counting.asked if name != id(mine)} == {"Why was this\nshort text found?"}


def _routed(default: str | None) -> SentenceTransformer:
    def after() -> list[torch.nn.Module]:
        torch.manual_seed(3)
        routes = Router.for_query_document([Dense(16, 16)], [Dense(16, 16)], default_route=default)
        return [routes, Normalize()]

    return tiny("roberta", after=after, dtype=torch.float32)


@pytest.mark.parametrize("default", ["query", "document"])
def test_a_router_that_is_told_no_task_takes_its_default_route(default: str) -> None:
    embeddings = Plain(_routed(default))
    for document, explanation in explained(
        ExplainingRetriever(retriever=filled(InMemoryVectorStore(embeddings)).as_retriever()), QUERY
    ):
        assert explanation.notices == ()
        assert explanation.score == pytest.approx(own_score(embeddings, document.page_content), abs=1e-5)


def store_of(kind: str, embeddings: Embeddings) -> VectorStore:
    return filled(chroma(embeddings) if kind == "chroma" else InMemoryVectorStore(embeddings))


@pytest.mark.parametrize("kind", ["chroma", "memory"])
def test_instructions_of_the_frameworks_own_embeddings_are_those_of_the_search(kind: str) -> None:
    embeddings: Any = embeddings_of("bge", saved(), query_instruction="where: ")
    wrapped = ExplainingRetriever(retriever=store_of(kind, embeddings).as_retriever())
    documents: Any = wrapped.invoke(QUERY)
    scores = [own_score(embeddings, document.page_content) for document in documents]
    embeddings.query_instruction = "the old bridge: "
    for document, score in zip(documents, scores, strict=True):
        assert document.explanation.score == pytest.approx(score, abs=1e-5)
    for document, explanation in explained(wrapped, QUERY):
        assert explanation.notices == ()
        assert explanation.score == pytest.approx(own_score(embeddings, document.page_content), abs=1e-5)
