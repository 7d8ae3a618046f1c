"""A search as it was when it was made: what found the documents, what embedded them, and the state of the model.

A hit may be looked at long after its search. By then the store, the embedding object or the model may be other ones.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

from rag_explain.errors import BudgetSpent, EmbeddingFailed, InvalidInput
from rag_explain.results.metric import UNKNOWN, Metric
from rag_explain.retrieval.engines import Engine
from rag_explain.retrieval.mmr import Diversity
from rag_explain.retrieval.sharing import ExplainerSource, asking_explainer, explainer_of, glance, has_changed
from rag_explain.retrieval.usage import Embedder, Usage
from rag_explain.texts.passage import Passage

if TYPE_CHECKING:
    from rag_explain.explainer import Explainer

logger = logging.getLogger("rag_explain.retrieval")


@dataclass(frozen=True, kw_only=True)
class RetrievedDocument:
    """A document as a retriever returned it: the string that was embedded, and the retriever's own score.

    `id` is the caller's own name of the document, under which a store can forget it; None where there is none.
    Where a chunk was embedded and the document that it is of is returned, `text` and `score` are the chunk's.
    `vector` is what the index keeps for it, where that is at hand: it is compared with this encoder's own.
    """

    id: str | None
    text: str | Passage | None
    score: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    vector: Any = field(default=None, repr=False, compare=False)
    whole: str | None = None  # the document of which the text is a chunk
    start: int | None = None  # where the chunk stands in it; None where it does not, as a summary of it
    vector_id: str | None = None  # what the engine calls the chunk

    @property
    def engine_id(self) -> str:
        """What the engine calls it."""
        return self.vector_id or self.id or ""

    @property
    def chunk(self) -> tuple[int, int] | None:
        """Where in the whole document the text that was embedded stands."""
        if self.text is None or self.start is None:
            return None
        text = self.text.text if isinstance(self.text, Passage) else self.text
        return self.start, self.start + len(text)


@dataclass(frozen=True, kw_only=True)
class Search:
    """What a retriever is made of at the moment: read from its attributes for each search, since people change them.

    Attributes:
        source: an Explainer, or what one is made from: from an `Embedder`, so that it embeds as the framework does;
            None where nothing was found that one could be made from.
        embedder: the framework's embedding object, where there is one.
        engine: what was searched, where it is known.
        metric: what the scores are.
        surrogate: why the scores are not the encoder's similarity alone, when they are not.
        name: what finds the documents: the first of every hit's stages.
        note: what is not known of the search, where no score tells it.
        diversity: how it weighed relevance against redundancy, where it did (MMR).
        query_vector: what was searched with, where it is at hand: the embedder is then not asked for it.
        corpus: gives a `rag_explain.retrieval.corpus.Corpus`, for what is asked about ranks; None: the engine is one.
    """

    source: ExplainerSource | Embedder | None
    embedder: Embedder | None = None
    engine: Engine | None = None
    metric: Metric = UNKNOWN
    surrogate: str | None = None
    name: str = "the index"
    note: str | None = None
    diversity: Diversity | None = None
    query_vector: Any = field(default=None, repr=False, compare=False)
    corpus: Callable[[], Any] | None = field(default=None, repr=False, compare=False)

    @property
    def measure(self) -> str:
        """By what the vectors of an embedding object are compared that says nothing of it: as the index does."""
        metric = self.engine.metric if self.metric == UNKNOWN and self.engine is not None else self.metric
        return "dot" if "inner product" in metric.base else "cosine"


def readable(read: Callable[[], Search], source: ExplainerSource | None) -> Search:
    """What a retriever is made of, or that it cannot be read at the moment, of which no search fails."""
    try:
        return read()
    except Exception as error:
        logger.warning("what searches cannot be read: %s: %s", type(error).__name__, error)
        return Search(source=source, surrogate=f"what searched could not be read ({type(error).__name__}: {error})")


@dataclass(frozen=True, eq=False)
class Moment:
    """The state of everything that decides an embedding when a search was made; nothing is computed to know it."""

    search: Search
    model: Any  # the one that the embedder embedded with, where that is here
    usage: Usage | None  # how it did
    glances: tuple[tuple[Any, tuple[int, int]], ...]  # the models that are here, and what a glance at each told
    made: Explainer | None  # what explained at that time
    asked: str | None = None  # which model an embedding object said it asks, that holds none and explains itself

    @property
    def is_followed(self) -> bool:
        """Whether the Explainer is made to embed as the framework's object did."""
        return self.usage is not None and self.search.source is self.search.embedder

    def has_changed_model(self, explainer: Explainer) -> bool:
        """Whether a model may not be what it was: written to, or changed where this Explainer did not watch it."""
        watch = explainer.scorer.watch
        for model, (writes, moves) in self.glances:
            is_watched = explainer is self.made and watch is not None and watch.model is model
            now = glance(model)
            if now[0] != writes or (now[1] != moves and not is_watched):
                return True
        return False

    def has_changed_usage(self) -> bool:
        """Whether the embedding object embeds with another model by now, or otherwise."""
        embedder = self.search.embedder
        if embedder is None or embedder.seen() != (self.model, self.usage):
            return embedder is not None
        return self.asked is not None and self.asked != embedder.asked_model

    def has_hidden_usage(self) -> bool:
        """Whether the object embeds otherwise than its attributes showed: when that began is not known."""
        embedder = self.search.embedder
        return embedder is not None and embedder.usage(is_anew=True) != self.usage


class Moments:
    """Takes the moment of each search, and makes the Explainer of one: anew when the model or its usage is another."""

    def __init__(self) -> None:
        self._made: tuple[Any, Moment, Future[Explainer]] | None = None
        self._embedder: Embedder | None = None
        self._lock = threading.Lock()

    def take(self, search: Search) -> Moment:
        """Cheap enough for every search, and waits for nothing."""
        embedder, source, kept = search.embedder, search.source, self._embedder
        if embedder is not None and kept is not None and embedder.holder is kept.holder:
            source, embedder = (kept if source is embedder else source), kept  # it remembers what it has seen
        self._embedder = embedder
        search = replace(search, source=source, embedder=embedder)
        made: Any = source if hasattr(source, "scorer") else self._ready()
        try:
            model, usage = (None, None) if embedder is None else embedder.seen()
            watch = None if made is None else made.scorer.watch
            explained = source if hasattr(source, "named_modules") else watch and watch.model
            found = {id(one): one for one in (model if source is embedder else explained, model) if one is not None}
            asked = embedder.asked_model if embedder is not None and source is embedder and model is None else None
            return Moment(search, model, usage, tuple((one, glance(one)) for one in found.values()), made, asked)
        except Exception as error:  # a model that cannot be looked at is refused when it is to explain
            logger.debug("the state of the model is not known: %s: %s", type(error).__name__, error)
            return Moment(search, None, None, (), made)

    def _ready(self) -> Explainer | None:
        made = self._made
        return None if made is None or made[2].exception() is not None else made[2].result()

    def explainer(self, moment: Moment) -> Explainer:
        """Created on first use. If that failed, the same exception is raised until the model or its usage changes.

        What asks a service that failed is tried again in another search.
        """
        with self._lock:
            source: Any = moment.search.source
            usage = None
            if moment.asked is not None:
                make = partial(asking_explainer, source, measure := moment.search.measure)
                return self._kept((id(source.holder), moment.asked, measure), moment, make)
            if isinstance(source, Embedder):
                source, usage = moment.model, moment.usage
            if source is None:
                embedder = moment.search.embedder
                name = moment.search.name if embedder is None else embedder.name
                raise InvalidInput(
                    f"{name} holds no SentenceTransformer any more, or several: pass explainer=Explainer(model)"
                )
            key = (ref(source) if hasattr(source, "named_modules") else id(source)), usage
            return self._kept(key, moment, partial(explainer_of, source, usage))

    def _kept(self, key: Any, moment: Moment, make: Callable[[], Explainer]) -> Explainer:
        made = self._made
        if made is None or made[0] != key or _is_outdated(made[2], made[1], moment):
            made = self._made = key, moment, _attempt(make)
        return made[2].result()


def _is_outdated(made: Future[Explainer], then: Moment, now: Moment) -> bool:
    error = made.exception()
    if isinstance(error, EmbeddingFailed):
        return then is not now or isinstance(error, BudgetSpent)
    return then.glances != now.glances if error is not None else has_changed(made.result())


def _attempt(make: Callable[[], Explainer]) -> Future[Explainer]:
    made: Future[Explainer] = Future()
    try:
        made.set_result(make())
    except Exception as error:
        made.set_exception(error)
        logger.warning("documents are returned without explanations: %s", error)
    return made
