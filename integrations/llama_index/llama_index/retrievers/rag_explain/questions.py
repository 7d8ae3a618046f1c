"""What can be asked of a wrapped LlamaIndex retriever about a result, and what its index is asked for that."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.schema import BaseNode
from llama_index.retrievers.rag_explain._internals import unfiltered
from llama_index.retrievers.rag_explain.nodes import carried, embedded
from llama_index.retrievers.rag_explain.stores import engine_of_retriever

from rag_explain.errors import InvalidInput
from rag_explain.results.hits import Hits
from rag_explain.retrieval import Corpus, EngineCorpus, Entry, Removed, RetrievedDocument, StoreQuestions


class Questions(StoreQuestions):
    """The questions of a wrapped retriever."""

    base: BaseRetriever

    def _searching(self) -> list[BaseRetriever]:
        """The retrievers of indexes inside, however deep."""
        raise NotImplementedError

    def _returned_nodes(self) -> list[BaseNode]:
        """All nodes of the indexes that are searched."""
        raise NotImplementedError

    def _nodes(self, query: str) -> Any:
        """What the retriever returns."""
        raise NotImplementedError

    def _returned(self, query: str, options: dict[str, Any]) -> Hits:
        if options:
            raise InvalidInput(f"a LlamaIndex retriever takes no {next(iter(options))}=: set it where it is made")
        hits = map(carried, self._nodes(query))
        return Hits(hit for hit in hits if hit is not None)

    def _corpus(self) -> Corpus:
        searching = self._searching()
        if len(searching) != 1:
            what = "searches no index" if not searching else f"searches {len(searching)} indexes"
            raise InvalidInput(f"{type(self.base).__name__} {what}: ask a retriever around one index")
        engine = engine_of_retriever(searching[0])
        if engine is None:
            raise InvalidInput("what the index's store holds is not known here: docs/stores.md has those that are")
        return EngineCorpus(engine, lambda: _documents(self._returned_nodes()))

    def _removed(self, query: str, options: dict[str, Any], corpus: Corpus) -> Removed:
        (searching,) = self._searching()
        wide = unfiltered(searching, max(1, len(corpus.entries or ())))
        if wide is None:
            return Removed()
        with_filter, without_filter = wide

        @cache
        def removed() -> set[str]:
            found = ({one.node.node_id for one in asked.retrieve(query)} for asked in (without_filter, with_filter))
            return set.difference(*found)

        def filtered(entry: Entry) -> str | None:
            told = "the index finds it without the retriever's metadata filters, and not with them"
            return told if entry.key in removed() else None

        return Removed(filtered)


def _documents(nodes: Iterable[BaseNode]) -> Iterable[RetrievedDocument]:
    for node in nodes:
        metadata = {**node.metadata, **({"ref_doc_id": node.ref_doc_id} if node.ref_doc_id else {})}
        yield RetrievedDocument(id=node.node_id, text=embedded(node), metadata=metadata)
