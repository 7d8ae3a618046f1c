"""DocumentExplainer: a component behind any retriever of a pipeline, whose documents then say why they were found."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from haystack import Document, component, default_from_dict, default_to_dict
from haystack.core.errors import SerializationError
from haystack_integrations.components.explainers.rag_explain._internals import input_names
from haystack_integrations.components.explainers.rag_explain.hits import PipelineHit, PipelineHits
from haystack_integrations.components.explainers.rag_explain.upstream import (
    PairedEmbedder,
    Upstream,
    embedded,
    engine_of_documents,
    kept_vector,
    names_of,
    score_metric,
)

from rag_explain.errors import InvalidInput
from rag_explain.results.metric import UNKNOWN, Metric
from rag_explain.results.precomputed import Precomputed
from rag_explain.retrieval import (
    MAX_CALLS,
    UNNAMED,
    Embedder,
    ExplainerSource,
    ExplainMode,
    HitExplainer,
    RetrievedDocument,
    Search,
    after,
    check_source,
    retriever_reason,
)
from rag_explain.types import Unit

_UNSEEN = "DocumentExplainer does not see what scored the documents; this encoder's similarity is explained"


@component
class DocumentExplainer:
    """The same documents in the same order with the same scores; beside them, as `hits`, why they were found.

        pipeline.add_component("explainer", DocumentExplainer())
        pipeline.connect("retriever.documents", "explainer.documents")
        hits = pipeline.run({"embedder": {"text": query}, "explainer": {"query": query}})["explainer"]["hits"]

    Args:
        explainer: an Explainer, a model to make one from or its name, or a text embedder; None: the model of the text
            embedder that gives the retriever its query, which then reads texts as that does. Where the embedders hold
            none, their own vectors of edited texts explain: nothing is sent before an explanation is looked at.
        document_embedder: what embedded the documents, where that has a prefix, a suffix or fields of `meta` to embed.
        explain, top, time_limit, unit, max_calls: see `rag_explain.retrieval.HitExplainer`.
        metric: what the documents' scores are, by the name of a `rag_explain.results.metric.Metric`; None: found out,
            for the stores that tell.
        surrogate: why the documents were not chosen by this encoder's similarity alone; False: they were; None: found
            out from the components before this one.
    """

    def __init__(
        self,
        explainer: ExplainerSource | object | None = None,
        *,
        document_embedder: object | None = None,
        explain: ExplainMode = "lazy",
        top: int | None = None,
        time_limit: float | None = None,
        unit: Unit | None = None,
        metric: str | None = None,
        surrogate: str | bool | None = None,
        max_calls: int | None = MAX_CALLS,
    ) -> None:
        _check(explainer, document_embedder, surrogate)
        self.explainer: Any = str(explainer) if isinstance(explainer, Path) else explainer
        self.document_embedder = document_embedder
        self.explain, self.top, self.time_limit, self.unit = explain, top, time_limit, unit
        self.metric, self.surrogate = None if metric is None else Metric.named(metric).name, surrogate
        limits: dict[str, Any] = {"top": top, "time_limit": time_limit, "unit": unit, "max_calls": max_calls}
        self._hit_explainer = HitExplainer(explain=explain, **limits)
        self.max_calls = max_calls
        self._paired: PairedEmbedder | None = None
        self._is_warm = False

    def to_dict(self) -> dict[str, Any]:
        """The settings, with the embedders that were passed; an Explainer or a loaded model has no such form."""
        if not (self.explainer is None or isinstance(self.explainer, str) or input_names(self.explainer)):
            raise SerializationError(
                f"DocumentExplainer was made with an object of {type(self.explainer).__name__}, which cannot be "
                "written: pass explainer= as the name or folder of the model, or leave it out"
            )
        names = ("explainer", "document_embedder", "explain", "top", "time_limit", "unit", "metric", "surrogate")
        return default_to_dict(self, **{name: getattr(self, name) for name in (*names, "max_calls")})

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> DocumentExplainer:
        """What `to_dict` wrote."""
        return default_from_dict(cls, data)

    def warm_up(self) -> None:
        """Load the embedders and look at their model, once; where none is found that is refused."""
        if self._is_warm:
            return
        upstream = Upstream.of(self)
        for one in (self._text_embedder(upstream), self.document_embedder):
            if hasattr(one, "warm_up"):
                one.warm_up()
        search = self._search(upstream)
        if search.source is None:
            raise InvalidInput(
                "nothing that embeds was found in the pipeline before DocumentExplainer: "
                "pass explainer=Explainer(model) with the model that embeds the documents, or the model's name"
            )
        self._hit_explainer.prepare(search)
        self._is_warm = True

    @component.output_types(documents=list[Document], hits=PipelineHits)
    def run(
        self,
        query: str,
        documents: list[Document],
        query_embedding: list[float] | None = None,
        hits: PipelineHits | None = None,
        scale_score: bool | None = None,
        explain: ExplainMode | None = None,
        top: int | None = None,
    ) -> dict[str, Any]:
        """The documents as they are, and their hits.

        Args:
            query_embedding: what the retriever was given: it is compared with this encoder's, in place of asking the
                text embedder for it.
            hits: those of an earlier DocumentExplainer, which are kept; what came since is named in their stages.
            scale_score: what the retriever was told when it was run, if it was.
            explain, top: as in the class, for this run.
        """
        upstream, known = Upstream.of(self), {hit.id: hit for hit in hits or ()}
        made = self._hit_explainer.hits(
            query + getattr(self._text_embedder(upstream), "suffix", ""),
            [self._found(document, upstream, document.id in known) for document in documents],
            explain,
            top=top,
            query_vector=query_embedding,
            search=self._search(upstream, scale_score),
        )
        carried = [known.get(hit.id, hit) for hit in made]
        final = after(names_of(upstream.recent) or UNNAMED, carried, [document.score for document in documents])
        return {"documents": documents, "hits": PipelineHits(PipelineHit.of(hit) for hit in final if hit is not None)}

    def precompute(self, documents: Iterable[Document] | None = None, **options: Any) -> Precomputed:
        """Fill the explainer's store with the factors of these documents, or of all in the store that is searched.

        Options and result are those of `Explainer.precompute`.
        """
        upstream = Upstream.of(self)
        if documents is None and upstream.store is None:
            raise InvalidInput(f"{upstream.name} has no document store: pass the documents to precompute")
        listed = upstream.store.filter_documents() if documents is None else documents
        texts = {one.id: text for one in listed if (text := embedded(one, self.document_embedder)) is not None}
        self.warm_up()
        return self._hit_explainer.precompute(list(texts.values()), self._search(upstream), ids=list(texts), **options)

    def _found(self, document: Document, upstream: Upstream, is_known: bool) -> RetrievedDocument:
        """A document as `rag_explain` knows it; one that has its hit already needs no text."""
        return RetrievedDocument(
            id=document.id,
            text=None if is_known else embedded(document, self.document_embedder),
            score=None if document.score is None else float(document.score),
            metadata=document.meta,
            vector=kept_vector(document, upstream.store),
        )

    def _search(self, upstream: Upstream, scale_score: bool | None = None) -> Search:
        """What searches, embeds and scores at the moment: pipelines and attributes may be changed at any time."""
        embedder, engine = self._embedder(upstream), engine_of_documents(upstream.store)
        metric = score_metric(upstream, engine, scale_score) if self.metric is None else Metric.named(self.metric)
        is_unseen = not upstream.finders and metric == UNKNOWN
        return Search(
            source=embedder if self.explainer is None or input_names(self.explainer) else self.explainer,
            embedder=embedder,
            engine=engine,
            metric=metric,
            surrogate=retriever_reason(self.surrogate, _UNSEEN if is_unseen else upstream.reason()),
            name=upstream.name,
        )

    def _text_embedder(self, upstream: Upstream) -> Any:
        return self.explainer if input_names(self.explainer) else upstream.embedder

    def _embedder(self, upstream: Upstream) -> Embedder | None:
        """One object for as long as the components are the same: it remembers what it has seen of them."""
        query, document = self._text_embedder(upstream), self.document_embedder
        if query is None:
            return None
        if self._paired is None or not self._paired.is_of(query, document):
            self._paired = PairedEmbedder.of(query, document)
        return self._paired


def _check(explainer: object, document_embedder: object, surrogate: object) -> None:
    """Refuse what a component cannot be made with."""
    if not (explainer is None or input_names(explainer)):
        check_source(explainer)
    if not (document_embedder is None or input_names(document_embedder)):
        raise InvalidInput(f"document_embedder must be a document embedder, not {type(document_embedder).__name__}")
    if not (surrogate is None or isinstance(surrogate, (str, bool))):
        raise InvalidInput(f"surrogate must be a sentence, False or None, not {surrogate!r}")
