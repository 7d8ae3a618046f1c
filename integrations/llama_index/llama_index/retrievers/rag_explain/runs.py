"""What is known of an outermost query, chat, retrieval or run of a workflow, until it ends and becomes a record."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llama_index.core.schema import MetadataMode, NodeWithScore
from llama_index.retrievers.rag_explain.nodes import carried, last_stage, score_of

from rag_explain.log.runs import NOT_WRAPPED
from rag_explain.results.deferred import Deferred
from rag_explain.results.hits import Hit
from rag_explain.retrieval import StagedHits


@dataclass
class Asked:
    """What an engine or a retriever was asked, outside of all others of the run."""

    query: str
    nodes: Sequence[NodeWithScore] = ()
    hits: Sequence[Hit | None] | None = None  # of the nodes, once it has answered

    @property
    def keys(self) -> set[Hashable]:
        """What the nodes are known by."""
        return {_key(node, hit) for node, hit in zip(self.nodes, self.hits or (), strict=False)}


@dataclass
class Answer:
    """An outermost query, or run of a workflow, that has not ended yet."""

    span: str
    start: Any  # what a workflow was started with; a query's question stands in `asked`
    asked: dict[str, Asked] = field(default_factory=dict)  # by span; an outermost query itself, or those of a workflow
    staged: StagedHits = field(default_factory=StagedHits)

    def ask(self, span: str, query: str, around: Iterable[str]) -> None:
        """An engine or a retriever is asked; inside another one it is a part of that."""
        if self.asked.keys().isdisjoint(around):
            self.asked[span] = Asked(query)
            self.staged.enter(span)

    def answered(self, span: str, nodes: Sequence[NodeWithScore]) -> None:
        """It has answered from these nodes, or from what was retrieved inside it."""
        one = self.asked.get(span)
        if one is not None and one.hits is None:
            one.nodes = nodes or one.nodes
            one.hits = self.hits(one.nodes, run=span)

    def step(self, nodes: Sequence[NodeWithScore], hits: Sequence[Hit | None]) -> None:
        """A part of the workflow returned nodes that were found before; what it merges is told once."""
        keys = [_key(node, hit) for node, hit in zip(nodes, hits, strict=True)]
        sources = [one for one in self.asked.values() if not one.keys.isdisjoint(keys)]
        queries = _queries(sources)
        if sources and queries.keys() >= set(keys):
            known = [hit or _bare(node, 0, queries[key]) for key, node, hit in zip(keys, nodes, hits, strict=True)]
            for one in sources:
                one.nodes, one.hits = (nodes, known) if one is sources[0] else ((), ())

    def hits(
        self, nodes: Sequence[NodeWithScore], stage: str | None = None, run: Hashable = None, outer: Hashable = None
    ) -> list[Hit | None]:
        """The hits of nodes that the stage of this name returned; None: one that is named as well as can be."""
        found = [((node.node.node_id,), carried(node)) for node in nodes]
        name = stage or last_stage(nodes, [self.staged.find(*one, run) for one in found])
        scores, is_seen = [score_of(node) for node in nodes], stage is not None
        return self.staged.pass_through(name, found, scores, run=run, outer=outer, is_seen=is_seen)

    def sources(self, nodes: Sequence[NodeWithScore]) -> list[Hit]:
        """The hits that the answer rests on: those of `nodes`, or else all that were found."""
        return [
            _bare(node, rank, query) if hit is None else replace(hit, rank=rank)
            for rank, (query, node, hit) in enumerate(self._found(nodes), 1)
        ]

    def _found(self, nodes: Sequence[NodeWithScore]) -> Iterator[tuple[str | None, NodeWithScore, Hit | None]]:
        """With what was asked to find each."""
        if nodes and self.span not in self.asked:
            queries = _queries(self.asked.values())
            for node, hit in zip(nodes, self.hits(nodes), strict=True):
                yield queries.get(_key(node, hit)), node, hit
            return
        for span, one in self.asked.items():
            self.answered(span, nodes)
            for node, hit in zip(one.nodes, one.hits or (), strict=True):
                yield one.query, node, hit


def _key(node: NodeWithScore, hit: Hit | None) -> Hashable:
    return node.node.node_id if hit is None else hit.handle


def _queries(asked: Iterable[Asked]) -> dict[Hashable, str]:
    """What was asked first to find each node."""
    return {key: one.query for one in reversed(list(asked)) for key in one.keys}


def _bare(node: NodeWithScore, rank: int, query: str | None) -> Hit:
    """A hit for a node that no wrapped retriever found."""
    content = node.node.get_content(metadata_mode=MetadataMode.NONE)
    return Hit(
        id=node.node.node_id,
        text=content if isinstance(content, str) else None,
        rank=rank,
        score=score_of(node),
        metric="unknown",
        metadata=node.node.metadata,
        query=query,
        handle=Deferred.skipped(NOT_WRAPPED),
    )
