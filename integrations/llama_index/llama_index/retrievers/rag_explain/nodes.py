"""Nodes with an explanation beside them, what was embedded of a node, and the event that tells of both."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core import instrumentation
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.bridge.pydantic import PrivateAttr, field_serializer
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore, QueryBundle

from rag_explain import Explanation, Hit
from rag_explain.errors import InvalidInput
from rag_explain.log import LogSource, explain_again
from rag_explain.results.hits import Hits
from rag_explain.retrieval import UNNAMED, RetrievedDocument, reranked, same_score, scored
from rag_explain.texts.passage import Passage
from rag_explain.texts.tokens import Unit

if TYPE_CHECKING:
    from rag_explain import Explainer

logger = logging.getLogger("llama_index.retrievers.rag_explain")
dispatcher = instrumentation.get_dispatcher(__name__)  # type: ignore[attr-defined]  # documented, re-exported
_FRAMES = 50  # how far up the stack the postprocessor or retriever that sets a score is looked for


class ExplainedNode(NodeWithScore):
    """What the retriever returned, with its `hit`: score, status, and the explanation, computed on first use.

    The node inside is the retriever's own and is not touched: nothing is added to its metadata, its hash stays.
    """

    _hit: Hit | None = PrivateAttr(default=None)
    _scored_by: Any = PrivateAttr(default=None)  # what set the score after this node was made

    @classmethod
    def beside(cls, node: NodeWithScore, hit: Hit | None) -> ExplainedNode:
        """The same node and score, with a hit beside them."""
        explained = cls.model_construct(node=node.node, score=node.score)
        explained._hit = hit
        return explained

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "score":  # rerankers and fusion set it in place
            self._scored_by = _caller()

    @property
    def hit(self) -> Hit:
        """The node's score and what set it, the exact similarity, and where the explanation stands.

        A node does not know its place in a list: after a reranker, `hit.rank` is still the rank in the search.
        """
        if self._hit is None:
            raise AttributeError(
                "no explanation stands beside this node: it was made from fields, as one that is read back; "
                "get_explanation(node, query=..., log=...) looks up what was logged"
            )
        score = score_of(self)
        if same_score(score, self._hit.score):
            return self._hit
        handle = reranked(self._scored_by, self._hit.query, embedded(self.node))
        return scored(self._hit, _name(self._scored_by), score, handle)

    @property
    def explanation(self) -> Explanation | None:
        """Computed on first use; None when it was skipped or failed, and then `hit.reason` says why."""
        return self.hit.explanation

    def __repr_name__(self) -> str:
        return NodeWithScore.__name__

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """LlamaIndex drops private attributes from pickles."""
        return ExplainedNode.beside, (NodeWithScore(node=self.node, score=self.score), self._hit and self.hit)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NodeWithScore):
            return NotImplemented
        return self.node == other.node and self.score == other.score

    __hash__ = None  # type: ignore[assignment]  # like every NodeWithScore: its score may be set


def get_explanation(
    node: NodeWithScore,
    *,
    query: str | None = None,
    log: LogSource | None = None,
    explainer: Explainer | None = None,
    unit: Unit = "word",
) -> Explanation | None:
    """The explanation of a node: computed on first use; None if there is none.

    A node that was made anew or read back has none beside it. With `query`, the question that it was found for, it is
    looked up in `log` (an ExplanationLog or its folder), or else computed again by `explainer`, in this `unit`. A
    `LogError` says what the log has instead.
    """
    if isinstance(node, ExplainedNode) and node._hit is not None and (beside := node.explanation) is not None:
        return beside
    if not isinstance(node, NodeWithScore):
        kind = type(node).__name__
        raise InvalidInput(f"get_explanation takes a NodeWithScore, not {kind}: NodeWithScore(node=node) makes one")
    found_node = RetrievedDocument(id=node.node.node_id, text=embedded(node.node))
    return explain_again(found_node, query, log, explainer, unit)


def carried(node: NodeWithScore) -> Hit | None:
    """The hit that was put beside a node when it was found; None where there is none."""
    return node._hit if isinstance(node, ExplainedNode) else None


def score_of(node: NodeWithScore) -> float | None:
    """The score that the node has now."""
    return None if node.score is None else float(node.score)


def last_stage(nodes: Sequence[NodeWithScore], hits: Sequence[Hit | None]) -> str:
    """What gave nodes other scores than their hits have, as far as they can tell."""
    for node, hit in zip(nodes, hits, strict=True):
        if isinstance(node, ExplainedNode) and hit is not None and not same_score(score_of(node), hit.score):
            return _name(node._scored_by)
    return UNNAMED


def _name(owner: object) -> str:
    return UNNAMED if owner is None else type(owner).__name__


def _caller() -> BaseNodePostprocessor | BaseRetriever | None:
    """The innermost postprocessor or retriever that is at work in this thread."""
    frame = inspect.currentframe()
    for _ in range(_FRAMES):
        if frame is None:
            break
        if isinstance(owner := frame.f_locals.get("self"), BaseNodePostprocessor | BaseRetriever):
            return owner
        frame = frame.f_back
    return None


class ExplanationEvent(BaseEvent):
    """What a retrieval found and why, as far as that has been computed; serialised as plain data."""

    query: str
    hits: Any

    @classmethod
    def class_name(cls) -> str:
        """The event's name in traces."""
        return "ExplanationEvent"

    @field_serializer("hits")
    def _plain(self, hits: Hits) -> list[dict[str, Any]]:
        return [hit.to_dict() for hit in hits]


def announce(query: str, hits: Hits) -> None:
    """Send the event; a handler that fails does not fail the retrieval."""
    try:
        dispatcher.event(ExplanationEvent(query=query, hits=hits))
    except Exception as error:
        logger.warning("the explanation event was not sent: %s: %s", type(error).__name__, error)


def embedded(node: BaseNode) -> Passage | None:
    """The string that was embedded, and where in it the node's own text stands; None when it has no text."""
    try:
        string = node.get_content(metadata_mode=MetadataMode.EMBED)
        text = node.get_content(metadata_mode=MetadataMode.NONE)
    except Exception as error:
        logger.warning("the text of node %r cannot be read: %s: %s", node.node_id, type(error).__name__, error)
        return None
    if not isinstance(string, str) or not isinstance(text, str):
        return None
    if string == text:
        return Passage(string)
    # The template is filled in and stripped: blanks at the end of the text may be gone.
    for candidate in (text, text.rstrip(), text.strip()):
        start = _find(string, candidate, getattr(node, "text_template", "{content}"))
        if candidate and start >= 0:
            return Passage(string, start, start + len(candidate))
    return Passage(string)


def _find(string: str, text: str, template: str) -> int:
    """Metadata may repeat the text: look from the side where the template puts it."""
    return string.find(text) if template.lstrip().startswith("{content}") else string.rfind(text)


def query_string(bundle: QueryBundle) -> tuple[str, str | None]:
    """The string that was embedded for a query, and why it was not the only one."""
    strings = bundle.embedding_strs
    if len(strings) == 1:
        return strings[0], None
    return (
        bundle.query_str,
        f"the query's embedding is the mean of {len(strings)} strings'; the query itself is explained",
    )


def found(
    nodes: Sequence[NodeWithScore], is_unscored: Callable[[NodeWithScore], bool] = lambda node: False
) -> Iterator[RetrievedDocument]:
    """The nodes as `rag_explain` knows documents; a score may not be their own."""
    for node in nodes:
        yield RetrievedDocument(
            id=node.node.node_id,
            text=embedded(node.node),
            score=None if is_unscored(node) else score_of(node),
            metadata=node.node.metadata,
        )
