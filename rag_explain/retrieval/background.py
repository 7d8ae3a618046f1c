"""How sure? The similarities of unrelated pairs of one encoder and corpus, measured on a sample of both.

Without queries of the caller's own, sentences of documents are the queries, each compared with all documents but
its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rag_explain.errors import InvalidInput
from rag_explain.results.calibration import LEVELS, Calibration
from rag_explain.results.metric import Metric
from rag_explain.retrieval.corpus import Corpus, Entry, owners, text_of
from rag_explain.retrieval.places import Embed
from rag_explain.retrieval.search import Moment, Moments, Search
from rag_explain.texts.segments import part_spans, sentence_spans

if TYPE_CHECKING:
    from rag_explain.explainer import Explainer

_DOCUMENTS, _QUERIES = 1000, 200  # that are sampled
_FEWEST_WORDS = 4  # of a sentence that stands for a query
Table = NDArray[np.float64]


def calibrated(
    corpus: Corpus, explainer: Explainer, metric: Metric, queries: Sequence[str] | None, embed: Embed
) -> Calibration:
    """Measure the background of an index; nothing is drawn anew the next time, so that it comes out the same."""
    if isinstance(queries, str) or (queries is not None and not all(isinstance(one, str) for one in queries)):
        raise InvalidInput("queries must be a list of queries that people ask, or None for sentences of the documents")
    entries = [one for one in corpus.entries or () if one.document.text is not None]
    if len(entries) < 2:
        raise InvalidInput("the index cannot list its documents with their texts, or has fewer than two: no sample")
    drawn = random.Random(0)
    asked, own = _sentences(entries, drawn) if queries is None else (list(queries), [None] * len(queries))
    if not asked:
        raise InvalidInput("there is no query to calibrate with: give queries=, or documents that have sentences")
    sample = drawn.sample(entries, min(_DOCUMENTS, len(entries)))
    scorer = explainer.scorer
    fingerprint, probes = scorer.fingerprint, scorer.probes
    with scorer.computing():
        found = corpus.compared(embed(asked), sample, explainer)
    if found is None:
        raise InvalidInput("the index does not give the vectors of its documents, or scores that tell a similarity")
    rows = [_unrelated(row, one, sample) for row, one in zip(found, own, strict=True)]
    rows = [row for row in rows if len(row)]
    if not rows:
        raise InvalidInput("every document is of the same text or source: there is no unrelated pair; give queries=")
    scores, errors = _distribution(rows)
    return Calibration(
        levels=LEVELS,
        scores=scores,
        errors=errors,
        queries=len(rows),
        documents=len(sample),
        pairs=sum(map(len, rows)),
        source="sentences" if queries is None else "queries",
        metric=metric.name,
        model=scorer.name,
        fingerprint=fingerprint,
        probes=probes,
    )


def _sentences(entries: Sequence[Entry], drawn: random.Random) -> tuple[list[str], list[Entry | None]]:
    """One sentence each of some documents, with the document that it is of."""
    texts, own = list[str](), list[Entry | None]()
    for entry in drawn.sample(entries, len(entries)):
        text = text_of(entry.document) or ""
        whole = [text[a:b] for a, b in sentence_spans(text) if len(part_spans(text[a:b])) >= _FEWEST_WORDS]
        if whole:
            texts.append(drawn.choice(whole))
            own.append(entry)
        if len(texts) == _QUERIES:
            break
    return texts, own


def _unrelated(row: Table, own: Entry | None, sample: Sequence[Entry]) -> Table:
    """The similarities to all but the document that a query is a sentence of, and its other chunks."""
    if own is None:
        return row
    of, text = owners(own.document)[:1], text_of(own.document)
    is_other = [
        one.key != own.key and text_of(one.document) != text and (not of or owners(one.document)[:1] != of)
        for one in sample
    ]
    others: Table = row[np.array(is_other)]
    return others


def _distribution(rows: Sequence[Table]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The similarity at each level, and the standard error of the share below it: queries differ, not only pairs."""
    scores = np.quantile(np.concatenate(rows), LEVELS)
    shares = np.array([[float((row < score).mean()) for score in scores] for row in rows])
    errors = shares.std(axis=0, ddof=1) / np.sqrt(len(rows)) if len(rows) > 1 else np.full(len(scores), 1.0)
    return tuple(scores.tolist()), tuple(errors.tolist())


class Owner(Protocol):
    """What makes hits: it has the Explainer and the moment of each search."""

    _moments: Moments

    def _explainer_for(self, search: Search) -> Explainer: ...


class Background:
    """The calibration that hits are given: only as long as the model is the one that it was made with."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self.calibration: Calibration | None = None
        self._glances: Any = None  # at the models, when it was measured

    def measure(self, made: Callable[[Explainer], Calibration], search: Search) -> Calibration:
        """Give hits from now on what this measures."""
        self.use(found := made(self._owner._explainer_for(search)), search)
        return found

    def use(self, calibration: Calibration | None, search: Search) -> None:
        """Give hits from now on this calibration; refused where it is of another encoder."""
        if calibration is not None:
            explainer = self._owner._explainer_for(search)
            if not _fits(calibration, explainer):
                now = f"{explainer.scorer.name} as it is now"
                raise InvalidInput(f"the calibration is of {calibration.model}, not of {now}: calibrate again")
            self._glances = self._owner._moments.take(search).glances
        self.calibration = calibration

    def of(self, search: Search, moment: Moment | None) -> Calibration | None:
        """What it is for hits of a search; None where the model is another one since."""
        if self.calibration is None:
            return None
        moment = moment or self._owner._moments.take(search)
        if moment.glances != self._glances:
            if moment.made is None or not _fits(self.calibration, moment.made):
                return None
            self._glances = moment.glances
        return self.calibration


def _fits(calibration: Calibration, explainer: Explainer) -> bool:
    try:
        scorer = explainer.scorer
        return calibration.fits(scorer.fingerprint, scorer.probes, scorer.tolerance)
    except Exception:  # a model that was changed is another one
        return False
