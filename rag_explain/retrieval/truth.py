"""Is what is explained what the retriever scored? Every reason why not, in the order in which it becomes known.

The scorer and the method put their reasons on the explanation. Added here are the retriever's, declared by the user or
found out by an adapter, and what comparing shows: the framework's query vector, the index's vector and the index's
score, each with this encoder's. No reason switches another one off.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from rag_explain.errors import InvalidInput
from rag_explain.results.explanation import Explanation
from rag_explain.results.highlights import Highlights
from rag_explain.results.metric import SCALE_FREE, UNKNOWN, Metric
from rag_explain.results.notices import (
    MISMATCH,
    OTHER_RANKING,
    OTHER_SCORE,
    STAND_INS,
    UNCHECKED,
    Notice,
    stand_in_reason,
)
from rag_explain.retrieval.engines import TOLERANCE, Engine
from rag_explain.retrieval.search import Moment, RetrievedDocument

if TYPE_CHECKING:
    from rag_explain.explainer import Explainer

logger = logging.getLogger("rag_explain.retrieval")

Vector = NDArray[np.float64]

# What 16 bits may round a vector by on its way through a model: two batches with the same text differ by as much.
_HALF_TOLERANCE = 2e-2
_UNIT = 1e-3
_CAUSE = "the index was probably built with another model, another prompt or header, or rescaled vectors"
_PROMPTS = 'prompts={"query": ..., "document": ...}'
_CHANGED = Notice(
    MISMATCH, "the model was changed between the search and this explanation, which is of the model as it is now"
)
_OTHER_USAGE = "{} embeds otherwise than in the search: how it embedded the query then cannot be compared any more"
_UNASKED = "{} embeds elsewhere, where asking may cost money: that it embeds queries as this encoder does is not known"
_NOT_CHECKED = "that its index was built with this encoder was not checked"
_NOTHING = Notice(
    UNCHECKED, f"this store tells neither scores nor vectors that can be compared: {_NOT_CHECKED}", "note"
)
_UNKNOWN_SCORES = Notice(
    UNCHECKED,
    f"what the scores of this store are is not known here, nor the vectors that it keeps: {_NOT_CHECKED}; "
    'pass metric="cosine" or what else they are, to have them compared',
    "note",
)
_UNKNOWN_METRIC = Notice(
    UNCHECKED,
    "this index keeps the vector that this encoder computes, but by what it compares vectors is not known here: that "
    'it ranks by what is explained was not checked; pass metric="cosine" or what else its scores are',
    "note",
)


@dataclass(frozen=True)
class Stored:
    """The vector (e,) that an engine keeps for a document, this encoder's own, and how the engine compares."""

    metric: Metric
    vector: Vector
    own: Vector  # as the engine would keep it
    is_given: bool = False  # it came with the document, and no engine was asked

    def difference(self, measure: str, tolerance: float) -> str | None:
        """How the vector differs from this encoder's, or None when it is the same."""
        if self.vector.shape != self.own.shape:
            sizes = f"{self.vector.size} dimensions, but this encoder's have {self.own.size}"
            return f"the index's vectors have {sizes}: {_CAUSE}"
        if _distance(self.own, self.vector, by_length=measure == "dot") <= tolerance:
            return None
        cosine = f"(their cosine is {_cosine(self.own, self.vector):.6f})"
        return f"the index's vector of this document is not the one that this encoder computes {cosine}: {_CAUSE}"

    def other_ranking(self, measure: str) -> str | None:
        """Why vectors of this length are ranked by something else than what is explained."""
        agrees = self.metric.base in SCALE_FREE if measure == "cosine" else "inner product" in self.metric.base
        if agrees or self.metric.base == "unknown" or abs(float(np.linalg.norm(self.vector)) - 1.0) <= _UNIT:
            return None
        explained = "inner product" if measure == "dot" else measure
        return f"the index compares vectors that are not normalised by {self.metric.base}; the {explained} is explained"


@dataclass(frozen=True)
class Seen:
    """What comparing showed of one document."""

    stored: Stored | None = None  # what the engine keeps
    expected: float | None = None  # the similarity that it would tell of this encoder's vector, which it codes
    loss: float = 0.0  # how far the similarity that it tells may be from this encoder's
    scale: float = 1.0  # the product of the vectors' lengths: what an inner product can be at most, and rounds by
    asked: Sequence[Notice] = ()  # what asking the framework's embedding object showed
    unasked: str | None = None  # why it was not asked


@dataclass(frozen=True)
class Scoring:
    """How a search scored its documents, as far as that is known."""

    metric: Metric
    reasons: Sequence[str]  # why the scores are not the encoder's similarity alone: reranked, mixed, diversified
    tolerance: float  # how far a score may be from the encoder's similarity before the two are said to differ
    note: str | None = None  # what is not known of the search, where no score tells it

    def notices(self, explanation: Explanation | Highlights, score: float | None, seen: Seen) -> tuple[Notice, ...]:
        """What the explanation of a document with this score must say, beside what it says already."""
        found = [*(Notice(OTHER_RANKING, reason) for reason in self.reasons), *seen.asked]
        if any(notice.code == OTHER_SCORE for notice in explanation.notices):
            return tuple(found)  # a score other than the model's similarity cannot be compared
        claimed, other_ranking = self.metric.similarity(score), None
        if seen.stored is not None:
            difference = seen.stored.difference(explanation.measure, self.tolerance)
            other_ranking = seen.stored.other_ranking(explanation.measure) if difference is None else None
            found += [Notice(MISMATCH, difference)] if difference else []
            found += [Notice(OTHER_RANKING, other_ranking)] if other_ranking else []
        if claimed is None and seen.unasked is not None:
            is_kept = seen.stored is not None and not found
            found.append(Notice(UNCHECKED, seen.unasked, "note") if is_kept else Notice(OTHER_RANKING, seen.unasked))
        is_known = stand_in_reason((*explanation.notices, *found)) is not None
        if claimed is not None and other_ranking is None and not self._agree(claimed, explanation.score, seen):
            shown = ".4f" if seen.scale == 1.0 else ".4g"
            text = f"the index's score implies a similarity of {claimed:{shown}}, but this encoder computes "
            # The cause is guessed only where none is known.
            found.append(Notice(MISMATCH, f"{text}{explanation.score:{shown}}" + ("" if is_known else f": {_CAUSE}")))
        elif claimed is None and not is_known:
            if seen.stored is None:
                found.append(_NOTHING if score is None else _UNKNOWN_SCORES)
            elif self.metric == UNKNOWN == seen.stored.metric and not (score is None and seen.stored.is_given):
                found.append(_UNKNOWN_METRIC)
            elif self.note is not None and not found:
                found.append(Notice(UNCHECKED, self.note, "note"))
        return tuple(found)

    def _agree(self, claimed: float, own: float, seen: Seen) -> bool:
        """Whether an index tells what it must of a vector, and not too far from what is explained."""
        expected = own if seen.expected is None else seen.expected
        strict = max(self.tolerance, seen.loss if seen.expected is None else 0.0)
        is_near = abs(claimed - own) <= max(self.tolerance, seen.loss) * seen.scale
        return is_near and abs(claimed - expected) <= strict * seen.scale


class Checks:
    """Compares what is explained with what was searched, for one retriever. Safe to use from several threads."""

    def __init__(self) -> None:
        self._asked: tuple[object, list[Notice]] | None = None
        self._asked_last: tuple[Moment, bool] | None = None
        self._asking = threading.Lock()
        self._has_warned = False

    def checked(
        self,
        explainer: Explainer,
        moment: Moment,
        query: str,
        scoring: Scoring,
        found: Sequence[tuple[RetrievedDocument, Explanation | Highlights]],
    ) -> list[Explanation | Highlights]:
        """The explanations, which say so where they are not of what the retriever scored. The log says it once."""
        scoring = replace(scoring, tolerance=max(scoring.tolerance, rounding(explainer)))
        is_scored = any(scoring.metric.similarity(document.score) is not None for document, _ in found)
        is_other = moment.has_changed_model(explainer)
        embedder = moment.search.embedder
        is_given = moment.search.query_vector is not None
        # What explains itself gives its own vector of the query: there is nothing else to compare it with.
        is_here = embedder is None or moment.model is not None or is_given or moment.asked is not None
        unasked = None if embedder is None or is_here else _UNASKED.format(embedder.name)
        asked = [_CHANGED] if is_other else self._asked_notices(explainer, moment, query, is_scored) if is_here else []
        documents, checked = [document for document, _ in found], []
        compared = _compared(explainer, moment, query, documents, scoring.metric, is_scored)

        def told() -> list[tuple[Notice, ...]]:
            return [
                scoring.notices(explanation, document.score, replace(one, asked=asked, unasked=unasked))
                for (document, explanation), one in zip(found, compared, strict=True)
            ]

        noticed = told()
        if is_scored and is_here and not asked and any(one.code == MISMATCH for one in chain(*noticed)):
            # Of a query that was embedded otherwise, some scores agree by chance: its vector tells.
            asked = self._asked_notices(explainer, moment, query, False)
            noticed = told() if asked else noticed
        for (document, explanation), notices in zip(found, noticed, strict=True):
            reasons = [one for one in (*explanation.notices, *notices) if one.code in STAND_INS]
            if reasons and {one.code for one in reasons} == {MISMATCH} and not self._has_warned:
                self._has_warned = True
                logger.warning("document %r: %s; its explanation is of the encoder only", document.id, reasons[0].text)
            checked.append(explanation.with_notices(*notices))
        return checked

    def _asked_notices(self, explainer: Explainer, moment: Moment, query: str, is_scored: bool) -> list[Notice]:
        """What the query's vector shows: the framework's embedding object is asked for each query that is looked at.

        One that was given with the search need not be asked for. Where scores tell the same, and the explainer was
        made to embed as the object does, once is enough. One that was changed since the search would tell of another.
        """
        if moment.search.embedder is None and moment.search.query_vector is None:
            return []
        with self._asking:
            if self._asked_last not in ((moment, False), (moment, is_scored)):
                self._asked = self._asked_now(explainer, moment, query, is_scored)
                self._asked_last = moment, is_scored
            assert self._asked is not None
            return self._asked[1]

    def _asked_now(
        self, explainer: Explainer, moment: Moment, query: str, is_scored: bool
    ) -> tuple[object, list[Notice]]:
        given, embedder = moment.search.query_vector, moment.search.embedder
        if given is not None or embedder is None:
            name = moment.search.name if embedder is None else embedder.name
            return None, _vector_notices(explainer, name, lambda: np.ravel(given), moment, query)
        is_seen = moment.has_changed_usage()
        if moment.asked is not None and not is_seen:
            return None, []
        if is_seen or moment.has_hidden_usage():
            text, is_known = _OTHER_USAGE.format(embedder.name), is_seen and moment.is_followed
            return None, [Notice(UNCHECKED, text, "note") if is_known else Notice(OTHER_RANKING, text)]
        key = ref(explainer), moment.usage, None if moment.is_followed and is_scored else moment
        is_known = self._asked is not None and self._asked[0] == key
        if self._asked and is_known:
            return self._asked
        return key, _vector_notices(explainer, embedder.name, partial(embedder.vector, query), moment, query)


def _compared(
    explainer: Explainer,
    moment: Moment,
    query: str,
    found: Sequence[RetrievedDocument],
    metric: Metric,
    is_scored: bool,
) -> list[Seen]:
    """What is kept for each document, and how far its scores may be off: one call for all."""
    nothing, engine = [Seen()] * len(found), moment.search.engine
    try:
        ids = [name for document in found if (name := document.engine_id)]
        known = {} if engine is None or not ids else engine.vectors(ids)
        kept = [known.get(document.engine_id) if document.vector is None else document.vector for document in found]
        by_length = explainer.scorer.measure == "dot"
        loses = engine is not None and engine.tolerance > TOLERANCE
        if not any(one is not None for one in kept) and not (is_scored and (by_length or loses)):
            return nothing
        own = explainer.vectors_at_hand([document.text or "" for document in found])
        width = next((len(vector) for vector in own if vector is not None), 0)
        asked = explainer.query_vector(query).astype(np.float64) if is_scored else np.zeros(width)
        asked = asked if by_length else _unit(asked)
        return [
            Seen()
            if vector is None
            else _seen(engine if loses or known else None, metric, one, asked, vector.astype(np.float64), by_length)
            for one, vector in zip(kept, own, strict=True)
        ]
    except Exception as error:
        logger.debug("the engine's vectors cannot be compared: %s: %s", type(error).__name__, error)
        return nothing


def _seen(engine: Engine | None, metric: Metric, kept: Any, asked: Vector, own: Vector, by_length: bool) -> Seen:
    """What is seen of a document: `kept` is its vector in the index, `asked` the query's, `own` this encoder's."""
    scale = float(np.linalg.norm(asked) * np.linalg.norm(own)) if by_length else 1.0
    if engine is None and kept is None:
        return Seen(scale=scale)
    if not by_length:  # only directions are compared, but what is coded has a length
        own = _unit(own) * (1.0 if kept is None else float(np.linalg.norm(kept)))
    if engine is None:  # the vector came with the document
        return Seen(Stored(metric, np.asarray(kept, np.float64), own, is_given=True), scale=scale)
    coded_own = engine.coded(own[None]) if kept is None or len(kept) == len(own) else own[None]
    loss = engine.tolerance if engine.tolerance > TOLERANCE else 0.0
    like = own if coded_own is None else np.asarray(coded_own[0], np.float64)
    is_kept = kept is not None and (coded_own is not None or engine.gives_originals)
    stored = Stored(engine.metric, np.asarray(kept, np.float64), like) if is_kept else None
    if coded_own is None:
        return Seen(stored=stored, loss=loss, scale=scale)
    distance = "L2" in engine.metric.base
    expected = 1 - float(((asked - like) ** 2).sum()) / 2 if distance else float(asked @ like)
    return Seen(stored=stored, expected=expected if loss else None, loss=loss, scale=scale)


def _vector_notices(
    explainer: Explainer, name: str, vector: Callable[[], Any], moment: Moment, query: str
) -> list[Notice]:
    """What the query's vector of the framework shows, beside this encoder's; nothing when they agree."""
    is_followed, usage = moment.is_followed, moment.usage
    try:
        theirs = np.asarray(vector(), np.float64)
    except Exception as error:
        text = f"{name} could not be compared with this encoder ({type(error).__name__}: {error})"
        return [Notice(UNCHECKED, text, "note")]  # an object that holds a model is likely to use it
    try:
        own = explainer.query_vector(query).astype(np.float64)
    except InvalidInput as error:
        return [Notice(MISMATCH, f"the documents were ranked by vectors of {name}, but {error}")]
    by_length = explainer.scorer.measure == "dot"
    if theirs.shape != own.shape:
        seen = f"a vector of {theirs.size} dimensions, and this encoder has {own.size}"
    elif _distance(own, theirs, by_length=False) > rounding(explainer):
        seen = f"another vector than this encoder's (their cosine is {_cosine(own, theirs):.6f})"
    elif by_length and _distance(own, theirs, by_length=True) > rounding(explainer):
        seen = f"a vector of length {np.linalg.norm(theirs):.4g}, and this encoder's has {np.linalg.norm(own):.4g}"
    else:
        return []
    made = "explainer=Explainer(SentenceTransformer(..., {}))"
    if is_followed:
        hint = "what it does with a text cannot be done again here"
    elif usage is None:
        hint = f"pass {made.format(_PROMPTS)} of the model that it uses"
    else:
        hint = f"leave explainer= out, or pass {made.format(usage.arguments)}"
        hint += ", for which line breaks become blanks" if usage.query.joins_lines and "\n" in query else ""
    return [Notice(MISMATCH, f"{name} gives the query {seen}: {hint}")]


def rounding(explainer: Explainer) -> float:
    """How far two vectors of one text may be apart in the precision of this model, as a share of their length.

    What gives a text another vector each time is off by that, and no other model.
    """
    scorer = explainer.scorer
    if scorer.is_metered:
        return max(TOLERANCE, scorer.tolerance)
    return TOLERANCE if scorer.tolerance <= 1e-4 else _HALF_TOLERANCE


def retriever_reason(declared: str | bool | None, found_out: str | None) -> str | None:
    """Why a retriever's scores are not the encoder's: what the user declared, else what the adapter found out.

    A declared False says that they are the encoder's.
    """
    if isinstance(declared, str):
        return declared
    return None if declared is False else found_out


def _distance(own: Vector, other: Vector, *, by_length: bool) -> float:
    """Between the directions of two vectors, or the vectors themselves as a share of the length of the first.

    No similarity with any third vector differs by more; a cosine of the two would hide what it squares.
    """
    if not by_length:
        own, other = _unit(own), _unit(other)
    return float(np.linalg.norm(own - other)) / max(float(np.linalg.norm(own)), 1e-30)


def _cosine(one: Vector, other: Vector) -> float:
    return float(_unit(one) @ _unit(other))


def _unit(vector: Vector) -> Vector:
    result: Any = vector / max(float(np.linalg.norm(vector)), 1e-30)
    return np.asarray(result, np.float64)
