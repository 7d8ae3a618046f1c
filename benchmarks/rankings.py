"""Do the stages of fused rankings sum to what the frameworks give? `python benchmarks/rankings.py --data FOLDER`.

FOLDER holds `cran.all.1400`, `cran.qry` and `cranqrel` (Cranfield). Every fusion mode of LlamaIndex over BM25 and
vectors, with one query and with three, LangChain's ensemble with and without weights, and `HybridRetriever` are asked
for the first queries. For each, the wrapped retriever must return the same documents in the same order with the same
scores as the bare one, and the contributions in `hit.stages` must sum to the fused scores; where the framework tells
none, to scores in whose order the documents are. Printed: how many of how many searches were the same, how many
documents were split, and the largest difference as a share of the score. Fails above 1e-9.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from data_sets import cranfield
from langchain_classic.retrievers import EnsembleRetriever
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_rag_explain import ExplainingRetriever as LangChainRetriever
from llama_index.core import VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.llms import MockLLM
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.retrievers.fusion_retriever import FUSION_MODES
from llama_index.core.schema import QueryBundle, TextNode
from llama_index.retrievers.bm25 import BM25Retriever
from llama_index.retrievers.rag_explain import ExplainingRetriever as LlamaIndexRetriever
from sentence_transformers import SentenceTransformer

from rag_explain import Explainer
from rag_explain.encoder.loading import DEFAULT_MODEL, load
from rag_explain.faiss import FaissRetriever
from rag_explain.results.stages import Stage, fused
from rag_explain.retrieval.hybrid import HybridRetriever

TOP, LIMIT = 10, 1e-9


class Answer(NamedTuple):
    """What a retriever returned of one document: its name, its score, and what was made of it."""

    name: str
    score: float | None
    stages: Sequence[Stage] = ()


Ask = Callable[[str], list[Answer]]


class Kept(Embeddings):
    """Embeds each text once."""

    def __init__(self, model: SentenceTransformer) -> None:
        self.client, self._known = model, dict[str, list[float]]()

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        missing = list(dict.fromkeys(text for text in texts if text not in self._known))
        if missing:
            self._known |= zip(missing, self.client.encode(missing).tolist(), strict=True)
        return [self._known[text] for text in texts]

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


class KeptToo(BaseEmbedding):
    """The same for LlamaIndex."""

    _kept: Kept = PrivateAttr()

    def __init__(self, kept: Kept) -> None:
        super().__init__(model_name="kept")
        self._kept = kept

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._kept.embed_query(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._kept.embed_query(query)

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._kept.embed_query(text)

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self._kept.embed_documents(texts)


class Generating(QueryFusionRetriever):
    """Asks the first and the second half of a query too, as one with a language model does."""

    def _get_queries(self, original_query: str) -> list[QueryBundle]:
        words = original_query.split()
        return [QueryBundle(" ".join(part)) for part in (words[: len(words) // 2], words[len(words) // 2 :])]


def llama_index(texts: dict[str, str], kept: Kept) -> dict[str, tuple[Ask, Ask]]:
    nodes = [TextNode(text=text, id_=name) for name, text in texts.items()]
    legs = [
        VectorStoreIndex(nodes, embed_model=KeptToo(kept)).as_retriever(similarity_top_k=TOP),
        BM25Retriever.from_defaults(nodes=nodes, similarity_top_k=TOP),  # type: ignore[arg-type]
    ]
    found = {}
    for mode in FUSION_MODES:
        for kind, count in ((QueryFusionRetriever, 1), (Generating, 3)):
            base = kind(
                legs,  # type: ignore[arg-type]
                llm=MockLLM(),
                mode=mode,
                num_queries=count,
                use_async=False,
                similarity_top_k=TOP,
                retriever_weights=[0.6, 0.4],
            )
            wrapped = LlamaIndexRetriever(base)

            def bare(query: str, base: Any = base) -> list[Answer]:
                return [Answer(one.node.node_id, one.score) for one in base.retrieve(query)]

            def told(query: str, base: Any = wrapped) -> list[Answer]:
                return [Answer(one.node.node_id, one.score, one.hit.stages) for one in base.retrieve(query)]

            found[f"LlamaIndex {mode.value}, {count} quer{'y' if count == 1 else 'ies'}"] = bare, told
    return found


def langchain(texts: dict[str, str], kept: Kept) -> dict[str, tuple[Ask, Ask]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # langchain-community says that it ends
        from langchain_community.retrievers import BM25Retriever as Words
    store = InMemoryVectorStore(kept)
    store.add_texts(list(texts.values()), ids=list(texts))
    words = Words.from_texts(list(texts.values()), ids=list(texts))
    words.k = TOP
    found = {}
    for weights in (None, [0.7, 0.3]):
        more = {} if weights is None else {"weights": weights}
        base = EnsembleRetriever(retrievers=[words, store.as_retriever(search_kwargs={"k": TOP})], **more)
        wrapped = LangChainRetriever(retriever=base)

        def bare(query: str, base: Any = base) -> list[Answer]:
            return [Answer(one.id, None) for one in base.invoke(query)]

        def told(query: str, base: Any = wrapped) -> list[Answer]:
            return [Answer(one.id, one.hit.score, one.hit.stages) for one in base.invoke(query)]

        found[f"LangChain ensemble, weights {weights or 'equal'}"] = bare, told
    return found


def hybrid(texts: dict[str, str], kept: Kept) -> dict[str, tuple[Ask, Ask]]:
    vectors = kept.embed_documents(list(texts.values()))
    base = FaissRetriever.from_vectors(vectors, list(texts.values()), Explainer(kept.client), ids=list(texts))
    retriever = HybridRetriever(base)

    def ask(query: str) -> list[Answer]:
        return [Answer(hit.id, hit.score, hit.stages) for hit in retriever.search(query, TOP)]

    return {"HybridRetriever": (ask, ask)}


def check(bare: Ask, told: Ask, queries: Sequence[str]) -> dict[str, float]:
    """How many searches were the same, how many documents were split, and the largest error of a sum."""
    same, split, documents, worst = 0, 0, 0, 0.0
    for query in queries:
        plain, found = bare(query), told(query)
        same += [(one.name, one.score) for one in plain] == [(one.name, one.score) for one in found]
        sums = [fused(one.stages, len(one.stages) - 1) for one in found]
        known = [value for value in sums if value is not None]
        split, documents = split + len(known), documents + len(found)
        for one, value in zip(found, sums, strict=True):
            if one.score is not None and value is not None:
                worst = max(worst, abs(value - one.score) / max(1e-12, abs(one.score)))
        if any(one.score is None for one in found):
            worst = max([worst, *(after - before for before, after in pairwise(known))])
    return {"searches": len(queries), "same": same, "documents": documents, "split": split, "largest error": worst}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--queries", type=int, default=50)
    parser.add_argument("--documents", type=int, default=1400)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    collection = cranfield(arguments.data)
    texts = dict(list(collection.documents.items())[: arguments.documents])
    queries = list(collection.queries.values())[: arguments.queries]
    model, _ = load(DEFAULT_MODEL, "cpu")
    assert isinstance(model, SentenceTransformer)
    kept, results, is_right = Kept(model), {}, True
    for make in (llama_index, langchain, hybrid):
        for name, (bare, told) in make(texts, kept).items():
            one = results[name] = check(bare, told, queries)
            is_right &= one["same"] == one["searches"] and one["split"] == one["documents"]
            is_right &= one["largest error"] <= LIMIT
            print(
                f"{name}: {one['same']} of {one['searches']} the same, {one['split']} of {one['documents']} documents "
                f"split, largest error {one['largest error']:.1e}",
                flush=True,
            )
    if arguments.json:
        options = f"--queries {arguments.queries} --documents {arguments.documents}"
        data = {"command": f"python benchmarks/rankings.py --data FOLDER {options}", "results": results}
        arguments.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
