"""What the LangChain and LlamaIndex wrappers add to a retrieval: `python benchmarks/frameworks.py [--json FILE]`.

The retriever that the user has and the same one wrapped take turns over the demo corpus. Query vectors are kept, so
that the call is a millisecond of the framework's own work and what the wrapper adds can be seen beside it; the wrapper
finds the model in the embeddings all the same. Figures are the least milliseconds of processor time that a call took.
Fails when explanations that are off cost a millisecond, or two where they are lazy and not looked at.

Then BM25 and vectors, fused, the query embedded in each call, of a retriever

  bare    as it is
  glance  a glance at the model by itself, after an encoding: some two thousand objects, which are not in the
          processor's cache by then
  around  in another one of the same framework that only passes the question on
  deaf    wrapped, but for hearing what runs inside
  lazy    wrapped

Fails when hearing adds more than a twentieth of a bare call.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from langchain_classic.retrievers import EnsembleRetriever
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_rag_explain import ExplainingRetriever as LangChainRetriever
from llama_index.core import VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever as LlamaIndexBaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.llms import MockLLM
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.retrievers.fusion_retriever import FUSION_MODES
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.retrievers.bm25 import BM25Retriever
from llama_index.retrievers.rag_explain import ExplainingRetriever as LlamaIndexRetriever
from sentence_transformers import SentenceTransformer
from transformers import BertConfig, BertModel

from rag_explain.cli.demo import corpus
from rag_explain.encoder.loading import DEFAULT_MODEL, load
from rag_explain.retrieval.sharing import glance

QUERY = "How do bees find their way home?"
TOP = 5
LIMITS_MS = {"off": 1.0, "lazy": 2.0}
MOST = 0.05


class KeptEmbeddings(Embeddings):
    """LangChain embeddings that know the query already."""

    def __init__(self, model: SentenceTransformer) -> None:
        self.client = model
        self._query = model.encode_query(QUERY).tolist()

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        vectors: list[list[float]] = self.client.encode_document(texts).tolist()
        return vectors

    def embed_query(self, text: str) -> list[float]:
        return list(self._query)


class KeptEmbedding(BaseEmbedding):
    """The same for LlamaIndex."""

    _model: SentenceTransformer = PrivateAttr()
    _query: list[float] = PrivateAttr()

    def __init__(self, model: SentenceTransformer) -> None:
        super().__init__(model_name="kept")
        self._model = model
        self._query = model.encode_query(QUERY).tolist()

    def _get_query_embedding(self, query: str) -> list[float]:
        return list(self._query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return list(self._query)

    def _get_text_embedding(self, text: str) -> list[float]:
        vector: list[float] = self._model.encode_document(text).tolist()
        return vector


def langchain(model: SentenceTransformer) -> dict[str, Callable[[], Any]]:
    store = InMemoryVectorStore(KeptEmbeddings(model))
    store.add_documents([Document(one["text"], id=one["id"]) for one in corpus()])
    base = store.as_retriever(search_kwargs={"k": TOP})
    off, lazy = (LangChainRetriever(retriever=base, explain=explain) for explain in ("off", "lazy"))
    return {
        "bare": lambda: base.invoke(QUERY),
        "off": lambda: off.invoke(QUERY),
        "lazy": lambda: lazy.invoke(QUERY),
    }


def llama_index(model: SentenceTransformer) -> dict[str, Callable[[], Any]]:
    nodes = [TextNode(text=one["text"], id_=one["id"]) for one in corpus()]
    base = VectorStoreIndex(nodes, embed_model=KeptEmbedding(model)).as_retriever(similarity_top_k=TOP)
    off, lazy = (LlamaIndexRetriever(base, explain=explain) for explain in ("off", "lazy"))
    return {
        "bare": lambda: base.retrieve(QUERY),
        "off": lambda: off.retrieve(QUERY),
        "lazy": lambda: lazy.retrieve(QUERY),
    }


class Encoding(KeptEmbeddings):
    """LangChain embeddings that encode the query each time."""

    def embed_query(self, text: str) -> list[float]:
        vector: list[float] = self.client.encode_query(text).tolist()
        return vector


class EncodingToo(KeptEmbedding):
    """The same for LlamaIndex."""

    def _get_query_embedding(self, query: str) -> list[float]:
        vector: list[float] = self._model.encode_query(query).tolist()
        return vector


class Around(BaseRetriever):
    """Passes the question on."""

    inner: Any

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        found: list[Document] = self.inner.invoke(query, config={"callbacks": run_manager.get_child()})
        return found


class AroundToo(LlamaIndexBaseRetriever):
    """The same for LlamaIndex."""

    def __init__(self, inner: LlamaIndexBaseRetriever) -> None:
        super().__init__()
        self._inner = inner

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return self._inner.retrieve(query_bundle)


class Deaf(LangChainRetriever):
    """Explains, and does not hear what runs inside."""

    def _callbacks(self, run_manager: Any, explain: Any) -> tuple[Any, Callable[[], list[Any]]]:
        return run_manager.get_child(), list


class DeafToo(LlamaIndexRetriever):
    """The same for LlamaIndex."""

    def _listening(self) -> Any:
        return nullcontext([])


def ensemble(model: SentenceTransformer) -> dict[str, Callable[[], Any]]:
    """BM25 and vectors, fused by LangChain."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # langchain-community says that it ends
        from langchain_community.retrievers import BM25Retriever
    store = InMemoryVectorStore(Encoding(model))
    documents = [Document(one["text"], id=one["id"]) for one in corpus()]
    store.add_documents(documents)
    words = BM25Retriever.from_documents(documents)
    words.k = TOP
    base = EnsembleRetriever(retrievers=[words, store.as_retriever(search_kwargs={"k": TOP})])
    around, deaf, lazy = Around(inner=base), Deaf(retriever=base), LangChainRetriever(retriever=base)
    return {
        "bare": lambda: base.invoke(QUERY),
        "glance": lambda: glance(model),
        "around": lambda: around.invoke(QUERY),
        "deaf": lambda: deaf.invoke(QUERY),
        "lazy": lambda: lazy.invoke(QUERY),
    }


def fusion(model: SentenceTransformer) -> dict[str, Callable[[], Any]]:
    """BM25 and vectors, fused by LlamaIndex."""
    nodes = [TextNode(text=one["text"], id_=one["id"]) for one in corpus()]
    legs = [
        VectorStoreIndex(nodes, embed_model=EncodingToo(model)).as_retriever(similarity_top_k=TOP),
        BM25Retriever.from_defaults(nodes=nodes, similarity_top_k=TOP),  # type: ignore[arg-type]
    ]
    base = QueryFusionRetriever(
        legs,  # type: ignore[arg-type]
        llm=MockLLM(),
        mode=FUSION_MODES.RECIPROCAL_RANK,
        num_queries=1,
        use_async=False,
        similarity_top_k=TOP,
    )
    around, deaf, lazy = AroundToo(base), DeafToo(base), LlamaIndexRetriever(base)
    return {
        "bare": lambda: base.retrieve(QUERY),
        "glance": lambda: glance(model),
        "around": lambda: around.retrieve(QUERY),
        "deaf": lambda: deaf.retrieve(QUERY),
        "lazy": lambda: lazy.retrieve(QUERY),
    }


def of_base_size(model: SentenceTransformer, folder: str) -> SentenceTransformer:
    """An encoder as large as BERT-base, of random weights, that reads texts as this one does."""
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=len(model.tokenizer))).save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    return SentenceTransformer(folder, device="cpu")


def fastest(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The least milliseconds of processor time that a call took, of calls that take turns."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 5):
        for name, call in ways.items():
            start = time.thread_time()
            call()
            taken[name].append(1000 * (time.thread_time() - start))
    return {name: min(values) for name, values in taken.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    model, _ = load(DEFAULT_MODEL, "cpu")
    assert isinstance(model, SentenceTransformer)
    result: dict[str, dict[str, float]] = {}
    for name, make in (("LangChain", langchain), ("LlamaIndex", llama_index)):
        times = result[name] = fastest(make(model), arguments.rounds)
        print(
            f"{name}: bare {times['bare']:.2f} ms, explanations off {times['off'] - times['bare']:+.2f} ms, "
            f"lazy and not looked at {times['lazy'] - times['bare']:+.2f} ms"
        )
    ratios: dict[str, dict[str, float]] = {}
    fused = (("LangChain EnsembleRetriever", ensemble), ("LlamaIndex QueryFusionRetriever", fusion))
    with TemporaryDirectory() as folder:
        models = {"": model, ", encoder of BERT-base's size": of_base_size(model, folder)}
    for (size, used), (name, make) in product(models.items(), fused):
        name += size
        times = result[name] = fastest(make(used), arguments.rounds)
        added = {
            "wrapped": times["lazy"] - times["bare"],
            "passing on": times["around"] - times["bare"],
            "glance": times["glance"],
            "hearing": times["lazy"] - times["deaf"],
        }
        ratios[name] = {part: milliseconds / times["bare"] for part, milliseconds in added.items()}
        parts = ", ".join(f"{part} {ratio:.1%}" for part, ratio in ratios[name].items())
        print(f"{name}: bare {times['bare']:.2f} ms; what is added, in shares of that: {parts}")
    if arguments.json:
        data = {"command": "python benchmarks/frameworks.py", "milliseconds": result, "ratios": ratios}
        arguments.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    plain = [times for times in result.values() if "off" in times]
    is_quick = all(times[way] - times["bare"] < most for times in plain for way, most in LIMITS_MS.items())
    return 0 if is_quick and all(one["hearing"] <= MOST for one in ratios.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
