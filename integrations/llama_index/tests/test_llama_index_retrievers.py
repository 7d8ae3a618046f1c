"""ExplainingRetriever and ExplanationPostprocessor in real LlamaIndex pipelines: same nodes, same prompts."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from llama_index.core import VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.llms import MockLLM
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.schema import ImageNode, IndexNode, MetadataMode, NodeWithScore, QueryBundle, TextNode
from llama_index.retrievers.rag_explain import (
    ExplainedNode,
    ExplainingRetriever,
    ExplanationEvent,
    ExplanationPostprocessor,
    embedded,
)
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize

from integrations.llama_index.tests.conftest import LocalEmbedding
from rag_explain import Explainer
from rag_explain.cli.demo import corpus
from rag_explain.encoder.loading import packaged_path
from rag_explain.errors import InvalidInput
from rag_explain.results.explanation import Explanation
from tests.support.models import CORPUS, tiny

QUERY = "why did the dog look at the moon?"
TEXTS = [f"{text} ({number})" for number in range(3) for text in CORPUS]


class Static(BaseRetriever):
    """Returns what it was given."""

    def __init__(self, nodes: list[NodeWithScore]) -> None:
        self.nodes = nodes
        super().__init__()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return self.nodes


class Broken(Explainer):
    """An Explainer that fails."""

    def __init__(self) -> None:
        super().__init__(model())

    def explain_many(self, query: str, documents: Any, *, unit: Any = None, ids: Any = None) -> list[Explanation]:
        raise MemoryError("out of memory")


@cache
def model() -> SentenceTransformer:
    return tiny(after=lambda: [Normalize()], dtype=torch.float32)


def nodes() -> list[TextNode]:
    return [
        TextNode(text=text, id_=f"id-{n}", metadata={"title": f"moon {n}", "secret": n} if n % 2 else {})
        for n, text in enumerate(TEXTS)
    ]


def index() -> VectorStoreIndex:
    made = nodes()
    for node in made:
        node.excluded_embed_metadata_keys = ["secret"]
    return VectorStoreIndex(made, embed_model=LocalEmbedding(model()))


def plain(found: list[NodeWithScore]) -> list[Any]:
    return [
        (
            one.node.node_id,
            one.score,
            one.node.hash,
            one.get_content(MetadataMode.LLM),
            str(one),
            repr(one),
            one.to_json(),
        )
        for one in found
    ]


@contextmanager
def events() -> Iterator[list[Any]]:
    seen: list[Any] = []

    class Handler(BaseEventHandler):
        def handle(self, event: Any, **kwargs: Any) -> None:
            seen.append(event)

    root = get_dispatcher()
    handler = Handler()
    root.add_event_handler(handler)
    try:
        yield seen
    finally:
        root.event_handlers.remove(handler)


def run_sync(retriever: BaseRetriever) -> list[NodeWithScore]:
    return retriever.retrieve(QUERY)


def run_async(retriever: BaseRetriever) -> list[NodeWithScore]:
    return asyncio.run(retriever.aretrieve(QUERY))


RUNS = pytest.mark.parametrize("run", [run_sync, run_async])


@RUNS
@pytest.mark.parametrize(("mode", "top"), [("lazy", None), ("eager", None), ("off", None), ("lazy", 2)])
def test_the_same_nodes_in_the_same_order_with_the_same_scores(
    run: Callable[[BaseRetriever], list[NodeWithScore]], mode: Any, top: int | None
) -> None:
    base = index().as_retriever(similarity_top_k=4)
    expected = run(base)
    found = run(ExplainingRetriever(base, explain=mode, top=top))
    assert len(found) == 4
    assert found == expected
    assert expected == found
    assert plain(found) == plain(expected)
    assert all(isinstance(one, ExplainedNode) for one in found)


@RUNS
def test_explanations_are_lazy_right_and_of_the_embedded_string(
    run: Callable[[BaseRetriever], list[NodeWithScore]],
) -> None:
    found = run(ExplainingRetriever(index().as_retriever(similarity_top_k=len(TEXTS)), unit="token"))
    assert {one.hit.status for one in found} == {"pending"}  # type: ignore[attr-defined]
    for one in found:
        assert isinstance(one, ExplainedNode)
        explanation = one.explanation
        assert explanation is not None
        assert explanation is one.explanation
        assert explanation.document == one.text
        assert explanation.surrogate is None
        assert explanation.score == pytest.approx(one.score, abs=1e-5)
        assert one.hit.gap == pytest.approx(0.0, abs=1e-5)
        parts = {token.part for token in explanation.document_tokens}
        assert ("metadata" in parts) == bool(one.metadata)
        for token in explanation.document_tokens:
            if token.part == "text":
                assert one.text[token.start : token.end] == token.text


def test_modes() -> None:
    retriever = ExplainingRetriever(index().as_retriever(similarity_top_k=3), top=1)

    def statuses(found: list[NodeWithScore]) -> list[str]:
        return [one.hit.status for one in found]  # type: ignore[attr-defined]

    assert statuses(retriever.retrieve(QUERY)) == ["pending", "skipped", "skipped"]
    assert statuses(retriever.with_explain("eager").retrieve(QUERY)) == ["ready"] * 3
    assert statuses(retriever.with_explain("eager", top=2).retrieve(QUERY)) == ["ready", "ready", "skipped"]
    assert statuses(retriever.with_explain("off").retrieve(QUERY)) == ["skipped"] * 3
    assert statuses(retriever.retrieve(QUERY)) == ["pending", "skipped", "skipped"]
    with pytest.raises(InvalidInput, match="explain must be 'lazy', 'eager' or 'off', not 'later'"):
        retriever.with_explain("later")  # type: ignore[arg-type]
    postprocessor = ExplanationPostprocessor(explainer=Explainer(model()), explain="eager", top=1)
    raw = index().as_retriever(similarity_top_k=2).retrieve(QUERY)
    assert statuses(postprocessor.postprocess_nodes(raw, query_str=QUERY)) == ["ready", "skipped"]


def test_an_unknown_metric_is_refused() -> None:
    with pytest.raises(InvalidInput, match="there is no metric 'euclid'"):
        ExplainingRetriever(index().as_retriever(), metric="euclid")
    with pytest.raises(InvalidInput, match="there is no metric 'euclid'"):
        ExplanationPostprocessor(explainer=Explainer(model()), metric="euclid")


@pytest.mark.parametrize("how", ["query", "aquery"])
def test_prompts_and_sources_of_a_query_engine(how: str) -> None:
    base = index().as_retriever(similarity_top_k=3)
    cut = SimilarityPostprocessor(similarity_cutoff=-1.0)

    def ask(retriever: BaseRetriever, *more: Any) -> Any:
        engine = RetrieverQueryEngine.from_args(retriever, llm=MockLLM(), node_postprocessors=[cut, *more])
        return engine.query(QUERY) if how == "query" else asyncio.run(engine.aquery(QUERY))

    expected = ask(base)
    assert TEXTS[0].split()[0] in str(expected)  # the mock answers with its prompt
    postprocessor = ExplanationPostprocessor(explainer=Explainer(model()))
    for response in (
        ask(ExplainingRetriever(base)),
        ask(ExplainingRetriever(base, explain="eager")),
        ask(base, postprocessor),
    ):
        assert str(response) == str(expected)
        assert plain(response.source_nodes) == plain(expected.source_nodes)
        assert all(one.explanation.query == QUERY for one in response.source_nodes)


@pytest.mark.parametrize("mode", ["simple", "reciprocal_rerank", "relative_score"])
def test_fusion_ranks_as_before_inside_and_outside(mode: Any) -> None:
    def fused(*retrievers: BaseRetriever) -> QueryFusionRetriever:
        return QueryFusionRetriever(
            list(retrievers), llm=MockLLM(), mode=mode, similarity_top_k=6, num_queries=1, use_async=False
        )

    def bases() -> list[BaseRetriever]:
        return [index().as_retriever(similarity_top_k=k) for k in (4, 6)]

    expected = fused(*bases()).retrieve(QUERY)
    inside = fused(*(ExplainingRetriever(base, explain="eager") for base in bases())).retrieve(QUERY)
    outside = ExplainingRetriever(fused(*bases()), Explainer(model())).retrieve(QUERY)
    assert plain(inside) == plain(expected) == plain(outside)
    assert "QueryFusionRetriever" in outside[0].explanation.surrogate  # type: ignore[attr-defined]
    assert all(isinstance(one, ExplainedNode) and one.explanation is not None for one in inside)


def test_nodes_are_never_touched() -> None:
    made = index()
    before = {key: node.to_json() for key, node in made.docstore.docs.items()}
    found = ExplainingRetriever(made.as_retriever(), explain="eager").retrieve(QUERY)
    assert {key: node.to_json() for key, node in made.docstore.docs.items()} == before
    assert all("explanation" not in one.metadata for one in found)


@RUNS
@pytest.mark.parametrize("mode", ["lazy", "eager"])
@pytest.mark.parametrize("time_limit", [None, 0.0])
def test_a_failing_explainer_never_fails_the_retrieval(
    run: Callable[[BaseRetriever], list[NodeWithScore]], mode: Any, time_limit: float | None
) -> None:
    base = index().as_retriever()
    found = run(ExplainingRetriever(base, Broken(), explain=mode, time_limit=time_limit))
    assert found == run(base)
    for one in found:
        assert isinstance(one, ExplainedNode)
        assert one.explanation is None
        assert one.hit.status == ("skipped" if mode == "eager" and time_limit == 0.0 else "failed")
        assert one.hit.reason


def test_unusual_nodes_and_scores() -> None:
    class Unreadable(TextNode):
        def get_content(self, *args: Any, **kwargs: Any) -> str:
            raise OSError("gone")

    kept = [
        NodeWithScore(node=TextNode(text=""), score=0.0),
        NodeWithScore(node=TextNode(text="the cat " * 6250), score=None),
        NodeWithScore(node=Unreadable(text="x"), score=1.0),
        NodeWithScore(node=ImageNode(image_url="https://example.com/x.png"), score=0.5),
    ]
    found = ExplainingRetriever(Static(kept), Explainer(model()), explain="eager").retrieve(QUERY)
    assert [one.score for one in found] == [0.0, None, 1.0, 0.5]
    assert [one.hit.status for one in found] == ["ready", "ready", "skipped", "ready"]  # type: ignore[attr-defined]
    assert found[1].explanation.truncated == ("document",)  # type: ignore[attr-defined]
    assert found[0].hit.score == 0.0  # type: ignore[attr-defined]


def test_an_index_node_is_followed_as_before() -> None:
    target = TextNode(text=TEXTS[3], id_="target")
    made = [IndexNode(text=TEXTS[0], index_id="other", obj=target, id_="pointer"), *nodes()[5:8]]
    base = VectorStoreIndex(made, embed_model=LocalEmbedding(model())).as_retriever(similarity_top_k=4)
    expected = base.retrieve(QUERY)
    assert "target" in [one.node_id for one in expected]
    found = ExplainingRetriever(base).retrieve(QUERY)
    assert plain(found) == plain(expected)
    followed = next(one for one in found if one.node_id == "target")
    assert followed.explanation.document == TEXTS[3]  # type: ignore[attr-defined]


def test_what_was_embedded_and_where_the_text_stands() -> None:
    for node in (
        TextNode(text="the cat", metadata={"a": "the cat"}),
        TextNode(text="the cat  ", metadata={"a": 1}),
        TextNode(text="the cat", metadata={"a": "the cat"}, text_template="{content}\n--\n{metadata_str}"),
        TextNode(text="the cat", metadata={"a": 1}, excluded_embed_metadata_keys=["a"]),
        TextNode(text="the cat"),
    ):
        passage = embedded(node)
        assert passage is not None
        assert passage.string == node.get_content(MetadataMode.EMBED)
        assert passage.text == node.text.rstrip()
    last = embedded(TextNode(text="the cat", metadata={"a": "the cat"}))
    assert last is not None
    assert last.start > 7


def test_what_did_not_choose_alone_is_a_surrogate() -> None:
    explainer = Explainer(model())

    def surrogate(base: BaseRetriever, **options: Any) -> str | None:
        explanation: Explanation = ExplainingRetriever(base, explainer, **options).retrieve(QUERY)[0].explanation  # type: ignore[attr-defined]
        return explanation.surrogate

    static = Static(index().as_retriever().retrieve(QUERY))
    assert surrogate(index().as_retriever()) is None
    mmr = index().as_retriever(vector_store_query_mode="mmr")
    assert surrogate(mmr) == "the index was asked in mmr mode, not by this encoder's similarity alone"
    assert ExplainingRetriever(mmr, explainer).retrieve(QUERY)[0].hit.metric == "unknown"  # type: ignore[attr-defined]
    assert "Static" in (surrogate(static) or "")
    assert surrogate(static, surrogate=False) is None
    assert surrogate(static, surrogate="reranked") == "reranked"
    other = VectorStoreIndex(nodes(), embed_model=MockEmbedding(embed_dim=16)).as_retriever()
    assert "built with another model" in (surrogate(other) or "")
    several = QueryBundle(QUERY, custom_embedding_strs=[QUERY, "the moon"])
    found = ExplainingRetriever(index().as_retriever(), explainer).retrieve(several)
    assert "mean of 2 strings" in found[0].explanation.surrogate  # type: ignore[attr-defined]


def test_the_encoder_is_named_once_or_asked_for() -> None:
    with pytest.raises(InvalidInput, match="nothing that embeds was found in Static: pass explainer="):
        ExplainingRetriever(Static([]))


def test_the_postprocessor_without_a_query_and_with_explained_nodes() -> None:
    found = ExplainingRetriever(index().as_retriever(similarity_top_k=2)).retrieve(QUERY)
    postprocessor = ExplanationPostprocessor(explainer=Explainer(model()))
    raw = NodeWithScore(node=nodes()[0], score=0.3)
    again = postprocessor.postprocess_nodes([*found, raw], query_str=QUERY)
    assert again[:2] == found
    assert [one is other for one, other in zip(again, found, strict=False)] == [True, True]
    assert "does not see" in again[2].explanation.surrogate  # type: ignore[attr-defined]
    (silent,) = postprocessor.postprocess_nodes([raw])
    assert isinstance(silent, ExplainedNode)
    assert silent.hit.status == "skipped"
    checked = ExplanationPostprocessor(explainer=Explainer(model()), metric="cosine")
    (wrong,) = asyncio.run(checked.apostprocess_nodes([raw], query_str=QUERY))
    assert "built with another model" in wrong.explanation.surrogate  # type: ignore[attr-defined]


@RUNS
def test_an_event_tells_what_was_found(run: Callable[[BaseRetriever], list[NodeWithScore]]) -> None:
    retriever = ExplainingRetriever(index().as_retriever(), explain="eager")
    with events() as seen:
        run(retriever)
    (event,) = [one for one in seen if isinstance(one, ExplanationEvent)]
    assert event.class_name() == "ExplanationEvent"
    data = json.loads(event.model_dump_json())
    assert data["query"] == QUERY
    assert Explanation.from_dict(data["hits"][0]["explanation"]).query == QUERY


def test_copies_and_pickles_keep_the_explanation() -> None:
    (one, other) = ExplainingRetriever(index().as_retriever()).retrieve(QUERY)
    assert isinstance(one, ExplainedNode)
    assert one.explanation is one.model_copy().explanation is one.model_copy(deep=True).explanation
    assert pickle.loads(pickle.dumps(one)).explanation is not None
    assert pickle.loads(pickle.dumps(other)).explanation is None


def test_threads_and_async_calls_agree_with_one_by_one() -> None:
    retriever = ExplainingRetriever(index().as_retriever(similarity_top_k=3), explain="eager")
    queries = [f"where is the {word}?" for word in ("cat", "dog", "moon", "bridge")]
    alone = {query: retriever.retrieve(query) for query in queries}
    with ThreadPoolExecutor(32) as pool:
        threaded = list(pool.map(retriever.retrieve, queries * 8))

    async def many() -> list[list[NodeWithScore]]:
        return await asyncio.gather(*(retriever.aretrieve(query) for query in queries * 50))

    for results in (threaded, asyncio.run(many())):
        for query, found in zip(queries * 50, results, strict=False):
            assert plain(found) == plain(alone[query])
            for one, other in zip(found, alone[query], strict=True):
                np.testing.assert_allclose(one.explanation.matrix, other.explanation.matrix, atol=1e-6)  # type: ignore[attr-defined]


def test_eight_threads_look_at_every_part_of_the_same_nodes() -> None:
    retriever = ExplainingRetriever(index().as_retriever(similarity_top_k=3))
    alone, found = (retriever.retrieve(QUERY) for _ in range(2))
    parts = ("highlights", "evidence", "explanation")

    def look(thread: int) -> dict[str, list[Any]]:
        brief = [one.hit.brief() for one in found]  # type: ignore[attr-defined]
        order = parts[thread % 3 :] + parts[: thread % 3]
        return {part: [getattr(one.hit, part) for one in found] for part in order} | {"brief": brief}  # type: ignore[attr-defined]

    with ThreadPoolExecutor(8) as pool:
        seen = list(pool.map(look, range(8)))
    for each in seen:
        assert each["explanation"] == seen[0]["explanation"]  # the same objects: computed once
        for at, one in enumerate(alone):
            hit = one.hit  # type: ignore[attr-defined]
            assert each["evidence"][at] == hit.evidence
            values = [span.value for span in each["highlights"][at]]
            assert values == pytest.approx([span.value for span in hit.highlights], abs=1e-5)
            np.testing.assert_allclose(each["explanation"][at].matrix, hit.explanation.matrix, atol=1e-5)
            assert each["brief"][at].score == pytest.approx(hit.brief().score, abs=1e-5)


@pytest.mark.parametrize("kind", ["IndexFlatL2", "IndexFlatIP", "IndexHNSWFlat"])
def test_the_faiss_store_of_llama_index(kind: str) -> None:
    stores = pytest.importorskip("llama_index.vector_stores.faiss")
    import faiss
    from llama_index.core import StorageContext

    flat = getattr(faiss, kind)(16, *([8] if "HNSW" in kind else []))
    context = StorageContext.from_defaults(vector_store=stores.FaissVectorStore(faiss_index=flat))
    made = VectorStoreIndex(nodes(), storage_context=context, embed_model=LocalEmbedding(model()))
    base = made.as_retriever(similarity_top_k=3)
    found = ExplainingRetriever(base).retrieve(QUERY)
    assert plain(found) == plain(base.retrieve(QUERY))
    for one in found:
        assert isinstance(one, ExplainedNode)
        assert one.explanation is not None
        assert one.explanation.surrogate is None
        assert one.hit.metric == ("inner product" if kind == "IndexFlatIP" else "squared L2")
        assert one.hit.gap == pytest.approx(0.0, abs=1e-5)


def test_the_model_of_hugging_face_embedding_is_found(tmp_path: Any) -> None:
    embeddings = pytest.importorskip("llama_index.embeddings.huggingface")
    model().save(str(tmp_path / "model"), create_model_card=False)
    embedding = embeddings.HuggingFaceEmbedding(str(tmp_path / "model"), device="cpu")
    base = VectorStoreIndex(nodes(), embed_model=embedding).as_retriever()
    (one, *_) = ExplainingRetriever(base).retrieve(QUERY)
    assert isinstance(one, ExplainedNode)
    assert one.explanation is not None
    assert one.explanation.surrogate is None


def test_factors_are_kept_from_nodes_and_from_an_index() -> None:
    for source, count in ((None, len(TEXTS)), (index(), len(TEXTS)), (list(index().docstore.docs.values())[:4], 4)):
        with Explainer(model()) as explainer:
            retriever = ExplainingRetriever(
                index().as_retriever(similarity_top_k=len(TEXTS)), explainer, explain="eager"
            )
            assert retriever.precompute(source, progress=False).built == count  # type: ignore[arg-type]
            paths = [one.explanation.provenance["path"] for one in retriever.retrieve(QUERY)]  # type: ignore[attr-defined]
            assert paths.count("memory") == count
    with pytest.raises(InvalidInput, match="Static has no index"):
        ExplainingRetriever(Static([]), Explainer(model())).precompute()
    with pytest.raises(InvalidInput, match="takes a list of nodes"):
        ExplainingRetriever(Static([]), Explainer(model())).precompute(TEXTS)  # type: ignore[arg-type]  # a mistake


@pytest.mark.slow
def test_on_real_weights_prompts_scores_and_reasons() -> None:
    encoder = SentenceTransformer(str(packaged_path() or "all-MiniLM-L6-v2"))
    made = VectorStoreIndex(
        [TextNode(text=one["text"], id_=one["id"], metadata={"topic": one["topic"]}) for one in corpus()],
        embed_model=LocalEmbedding(encoder),
    )
    base = made.as_retriever(similarity_top_k=4)
    question = "How do bees find their way home?"
    expected, response = (
        RetrieverQueryEngine.from_args(retriever, llm=MockLLM()).query(question)
        for retriever in (base, ExplainingRetriever(base, unit="token"))
    )
    assert str(response) == str(expected)
    assert plain(response.source_nodes) == plain(expected.source_nodes)
    for source in response.source_nodes:
        assert isinstance(source, ExplainedNode)
        assert source.explanation is not None
        assert source.explanation.surrogate is None
        assert source.explanation.gap == pytest.approx(0.0, abs=1e-5)
        assert source.hit.gap == pytest.approx(0.0, abs=1e-5)
        assert "metadata" in {token.part for token in source.explanation.document_tokens}


def test_copies_explain_and_pickles_are_refused() -> None:
    explainer = Explainer(model())
    (raw,) = [NodeWithScore(node=TextNode(text=CORPUS[0]), score=0.5)]
    retriever = copy.deepcopy(ExplainingRetriever(Static([raw]), explainer))
    postprocessor = copy.deepcopy(ExplanationPostprocessor(explainer=explainer))
    for found in (retriever.retrieve(QUERY), postprocessor.postprocess_nodes([raw], query_str=QUERY)):
        assert isinstance(found[0], ExplainedNode)
        assert found[0].explanation is not None
    for one in (retriever, postprocessor):
        with pytest.raises(InvalidInput, match="cannot be pickled"):
            pickle.dumps(one)
