"""What explaining and logging every answer adds to a RAG loop of LangChain and of LlamaIndex, on a real corpus.

    python benchmarks/production.py --data FOLDER [--documents 1400] [--queries 6] [--rounds 15] [--json FILE]

FOLDER holds Cranfield or SciFact. The loops are as people build them: HuggingFaceEmbeddings or HuggingFaceEmbedding
with all-MiniLM-L6-v2, a vector store, a prompt, and a language model that answers the same at once, since a real one
would hide what is measured. Queries have up to 13 tokens; all of ten documents each are explained by sentences, which
are kept for what the queries return. Both search FAISS, which leaves the smallest time to compare with; with --store
own, the store that each framework brings along, which takes longer to search.

  plain        the framework's own retriever
  wrapped      the same one wrapped, explanations computed when they are looked at: nobody does
  explained    the same, explanations computed before it returns
  answered     plain retrieval, prompt and answer
  logged       the same with `explained`, and the record on disk when it returns
  waited       the same with `wrapped` and a log that writes in the background: until the caller has the answer
  written      and until all is explained and the record is on disk

All take turns, query by query, in one process, after a round that is not counted, each in a thread of its own, as in a
server: LangChain runs parts of a chain in new threads anyway, and torch is slower where they take turns with a main
thread that computes too. Figures are medians over queries and rounds. A query is always new to the explainer, its
length is not: that is so for nearly all queries of a service that runs. Every text that is tokenized for any model is
counted. Fails if one of them is a document.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import data_sets
import faiss
import torch
from langchain_community.vectorstores import FAISS
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_huggingface import HuggingFaceEmbeddings
from langchain_rag_explain import ExplainingRetriever as LangChainRetriever
from langchain_rag_explain import ExplanationLogHandler
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import TextNode
from llama_index.embeddings.huggingface import HuggingFaceEmbedding
from llama_index.retrievers.rag_explain import ExplainingRetriever as LlamaIndexRetriever
from llama_index.retrievers.rag_explain import log_queries
from llama_index.vector_stores.faiss import FaissVectorStore
from retrieval import LENGTHS, TOP, choose
from rich.console import Console
from rich.table import Table
from sentence_transformers.base.modules.transformer import Transformer

from rag_explain import Explainer
from rag_explain.encoder.loading import DEFAULT_MODEL, packaged_path
from rag_explain.log import ExplanationLog

ANSWER_WORDS = 20
WAYS = ("plain", "wrapped", "explained", "answered", "logged", "waited", "written")


@dataclass(frozen=True)
class Loop:
    """A RAG loop of one framework, bare and with all that we add."""

    plain: Callable[[str], Any]
    wrapped: Callable[[str], Any]
    explained: Callable[[str], Sequence[Any]]  # each with its `hit`
    answered: Callable[[str], Any]
    logged: Callable[[str, ExplanationLog], Any]
    waited: Callable[[str, ExplanationLog], Any]
    precompute: Callable[[Sequence[str]], Any]
    explainer: Explainer


def langchain(documents: dict[str, str], model: str, is_own: bool) -> Loop:
    embeddings = HuggingFaceEmbeddings(model_name=model, model_kwargs={"device": "cpu"})
    names, texts = list(documents), list(documents.values())
    kind: type[VectorStore] = InMemoryVectorStore if is_own else FAISS
    store = kind.from_texts(texts, embeddings, ids=names)
    plain = store.as_retriever(search_kwargs={"k": TOP})
    wrapped, eager = (LangChainRetriever(retriever=plain, explain=when) for when in ("lazy", "eager"))

    def chain(retriever: Runnable[str, Any]) -> Runnable[str, Any]:
        prompt = ChatPromptTemplate.from_template("{context} Question: {question}")
        llm = FakeListChatModel(responses=[" ".join(["text"] * ANSWER_WORDS)])
        context = retriever | (lambda found: "\n".join(document.page_content for document in found))
        return {"context": context, "question": RunnablePassthrough()} | prompt | llm

    bare, lazily, full = chain(plain), chain(wrapped), chain(eager)
    return Loop(
        plain.invoke,
        wrapped.invoke,
        eager.invoke,
        bare.invoke,
        lambda query, log: full.invoke(query, {"callbacks": [ExplanationLogHandler(log)]}),
        lambda query, log: lazily.invoke(query, {"callbacks": [ExplanationLogHandler(log)]}),
        lambda queries: wrapped.precompute([one for query in queries for one in plain.invoke(query)], progress=False),
        eager._hit_explainer._explainer_for(eager._search()),
    )


def llama_index(documents: dict[str, str], model: str, is_own: bool) -> Loop:
    embedding = HuggingFaceEmbedding(model, device="cpu")
    nodes = [TextNode(text=text, id_=name) for name, text in documents.items()]
    width = len(embedding.get_text_embedding("a"))
    store = None if is_own else FaissVectorStore(faiss_index=faiss.IndexFlatIP(width))
    index = VectorStoreIndex(
        nodes, storage_context=StorageContext.from_defaults(vector_store=store), embed_model=embedding
    )
    plain = index.as_retriever(similarity_top_k=TOP)
    wrapped, eager = (LlamaIndexRetriever(plain, explain=when) for when in ("lazy", "eager"))
    bare, lazily, full = (
        RetrieverQueryEngine.from_args(one, llm=MockLLM(max_tokens=ANSWER_WORDS)) for one in (plain, wrapped, eager)
    )

    def logged(engine: RetrieverQueryEngine, query: str, log: ExplanationLog) -> Any:
        with log_queries(log):  # it listens to all engines: not to the bare one
            return engine.query(query)

    return Loop(
        plain.retrieve,
        wrapped.retrieve,
        eager.retrieve,
        bare.query,
        partial(logged, full),
        partial(logged, lazily),
        lambda queries: wrapped.precompute(
            [one.node for query in queries for one in plain.retrieve(query)], progress=False
        ),
        eager._hit_explainer._explainer_for(eager._search()),
    )


def counted(read: list[str]) -> None:
    """From now on, what is tokenized for any model of this process goes into `read`: nothing is encoded without."""
    tokenize = Transformer.preprocess

    def run(self: Transformer, inputs: Any, *rest: Any, **options: Any) -> Any:
        read.extend(inputs)
        return tokenize(self, inputs, *rest, **options)

    Transformer.preprocess = run  # type: ignore[method-assign]


def apart(call: Callable[[], Any]) -> Any:
    """The result of a call in a new thread."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()


class Measured:
    """The times of one loop in milliseconds, how often it read a query, and its two logs."""

    def __init__(self, loop: Loop, folder: Path) -> None:
        self.loop = loop
        self.taken: dict[str, list[float]] = {way: [] for way in WAYS}
        self.reads: dict[str, list[int]] = {way: [] for way in WAYS}
        self.direct = ExplanationLog(folder / "direct", background=False)
        self.default = ExplanationLog(folder / "default")

    def ask(self, query: str, read: list[str]) -> None:
        """Each way once."""
        loop = self.loop
        self._time("plain", lambda: loop.plain(query), read)
        self._time("wrapped", lambda: loop.wrapped(query), read)
        found = self._time("explained", lambda: loop.explained(query), read)
        for one in found:
            explanation = one.hit.explanation
            assert (explanation.unit, explanation.provenance["path"]) == ("sentence", "memory"), one.hit.reason
            assert explanation.surrogate is None, explanation.surrogate
        self._time("answered", lambda: loop.answered(query), read)
        self._time("logged", lambda: loop.logged(query, self.direct), read)
        start = time.perf_counter()
        self._time("waited", lambda: loop.waited(query, self.default), read)
        assert self.default.flush(60)
        self.taken["written"].append(1000 * (time.perf_counter() - start))

    def _time(self, way: str, call: Callable[[], Any], read: list[str]) -> Any:
        self.loop.explainer._prepared.cache_clear()  # the query is new; `close` would close the store as well
        before = len(read)

        def timed() -> Any:
            start = time.perf_counter()
            result = call()
            self.taken[way].append(1000 * (time.perf_counter() - start))
            return result

        result = apart(timed)
        self.reads[way].append(len(read) - before)
        return result

    def result(self) -> dict[str, Any]:
        times = {way: statistics.median(values) for way, values in self.taken.items()}
        lines = self.direct.folder.current.read_bytes().splitlines()
        assert all(hit.explanation for record in self.direct.records() for hit in record.hits)
        with self.direct.folder._locked("sealed"):  # closing does not seal: 16 MiB or a day do
            self.direct.folder._seal()
        sealed = sum(file.stat().st_size for file in self.direct.folder.path.glob("*.gz"))
        return {
            "milliseconds": times,
            "over plain retrieval": {way: times[way] / times["plain"] for way in WAYS[1:]},
            "over answered": {way: times[way] / times["answered"] for way in WAYS[4:]},
            "reads of the query": {way: statistics.median(self.reads[way]) for way in WAYS[:-1]},
            "bytes of log per answer": {"written": statistics.median(map(len, lines)), "sealed": sealed / len(lines)},
        }


def main() -> int:
    options = parse()
    collection = data_sets.collection_in(options.data)
    documents = dict([one for one in collection.documents.items() if one[1].strip()][: options.documents])
    read: list[str] = []
    counted(read)
    model, is_own = str(packaged_path() or f"sentence-transformers/{DEFAULT_MODEL}"), options.store == "own"
    made = {"LangChain": langchain, "LlamaIndex": llama_index}
    loops = {name: apart(partial(make, documents, model, is_own)) for name, make in made.items()}
    queries = apart(lambda: choose(collection, loops["LangChain"].explainer, options.queries)[LENGTHS[0]])
    for loop in loops.values():
        print(apart(partial(loop.precompute, queries)), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        measured = {name: Measured(loop, Path(folder) / name) for name, loop in loops.items()}
        for number in range(options.rounds + 1):
            if number == 1:  # the first round warms up
                read.clear()
                for one in measured.values():
                    for values in (*one.taken.values(), *one.reads.values()):
                        values.clear()
            for query in queries:
                for one in measured.values():
                    one.ask(query, read)
        encoded = [text for text in read if text not in queries]
        frameworks = {name: one.result() for name, one in measured.items()}
        for one in measured.values():
            one.default.close()
    given = f"--documents {options.documents} --queries {options.queries} --rounds {options.rounds}"
    result = {
        "command": f"python benchmarks/production.py --data FOLDER {given} --store {options.store}",
        "collection": collection.name,
        "documents": len(documents),
        "queries": len(queries),
        "documents encoded": len(encoded),
        "frameworks": frameworks,
        "machine": f"{torch.get_num_threads()} threads, {platform.machine()}, torch {torch.__version__}",
    }
    show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if encoded else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=1400)
    parser.add_argument("--queries", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--store", choices=("faiss", "own"), default="faiss")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def show(result: dict[str, Any]) -> None:
    console = Console()
    for name, found in result["frameworks"].items():
        title = f"{name}, {result['documents']} documents, {result['queries']} queries"
        table = Table("", "ms", "times plain", "times answered", "reads of the query", title=title)
        for way in WAYS:
            ratios = [found[key].get(way) for key in ("over plain retrieval", "over answered")]
            shown = ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
            table.add_row(
                way, f"{found['milliseconds'][way]:.1f}", *shown, str(found["reads of the query"].get(way, ""))
            )
        console.print(table)
        size = found["bytes of log per answer"]
        console.print(f"log: {size['written']:.0f} bytes an answer as written, {size['sealed']:.0f} once sealed")
    console.print(f"documents encoded while measuring: {result['documents encoded']}")


if __name__ == "__main__":
    sys.exit(main())
