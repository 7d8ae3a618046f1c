"""FaissRetriever: a FAISS index whose hits say why they were found. The embedded default.

retriever = FaissRetriever.from_texts(texts, Explainer("all-MiniLM-L6-v2"))
for hit in retriever.search("how do bees find home?", k=3):
    print(hit.score, hit.explanation.top_pairs(3))
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from rag_explain.errors import InvalidInput, ProcessBound, import_extra, whole_number
from rag_explain.explainer import Explainer
from rag_explain.probes import Probes
from rag_explain.results.hits import Hits
from rag_explain.results.metric import UNKNOWN, Metric
from rag_explain.results.precomputed import Precomputed
from rag_explain.retrieval.adapter import ExplainMode, HitExplainer
from rag_explain.retrieval.black_box import MAX_CALLS
from rag_explain.retrieval.engines import FaissEngine, Place
from rag_explain.retrieval.faiss_questions import FaissQuestions
from rag_explain.retrieval.faiss_rows import Filter, Sieve
from rag_explain.retrieval.saved_index import read_calibration, read_index, read_manifest, write_index
from rag_explain.retrieval.search import RetrievedDocument, Search
from rag_explain.retrieval.usage import Embedder
from rag_explain.texts.passage import Passage, check_id
from rag_explain.texts.tokens import Unit

faiss = import_extra("faiss", "faiss-cpu", "faiss")
logger = logging.getLogger("rag_explain.retrieval")

T = TypeVar("T")
Lookup: TypeAlias = Sequence[T] | Mapping[int, T] | Callable[[int], T]

_UNIT = 1e-3
# The id with which FAISS fills up what it did not find. Other negative ids are an IDMap's own.
_NOTHING = -1


class FaissRetriever(FaissQuestions, ProcessBound):
    """Searches a FAISS index by text and explains what it finds. The index is only read, and by several threads.

    Args:
        index: any FAISS index of float vectors: Flat, HNSW, IVF, PQ, inside an IDMap or not; inner product or L2.
        documents: the text of each row (or of each id of an IDMap): a sequence, a mapping, or a function.
        explainer: of the model that the index was built with; it embeds the queries too. Or an `Embedder`: a
            framework's embedding object that the index was built with, whose model is explained as it uses it.
        ids: what to call each row, like `documents`; by default its number.
        metadata: a mapping for each row, like `documents`.
        normalize: scale query vectors to length one, for an index of vectors that were scaled.
        embedder: what the index was built with and embeds the queries, where that is not what explains.
        explain, top, time_limit, unit, max_calls: see `rag_explain.retrieval.HitExplainer`.
    """

    instead = "use save(folder), and FaissRetriever.load(folder) where it is needed"

    def __init__(
        self,
        index: Any,
        documents: Lookup[str | Passage | None],
        explainer: Explainer | Embedder,
        *,
        ids: Lookup[str | None] | None = None,
        metadata: Lookup[Mapping[str, Any]] | None = None,
        normalize: bool = False,
        embedder: Embedder | None = None,
        explain: ExplainMode = "lazy",
        top: int | None = None,
        time_limit: float | None = None,
        unit: Unit | None = None,
        max_calls: int | None = MAX_CALLS,
    ) -> None:
        if not isinstance(index, faiss.Index):
            raise InvalidInput(f"index must be a FAISS index of float vectors, not {type(index).__name__}")
        _check_ids(ids)
        self.index, self._source, self.normalize = index, explainer, normalize
        self.embedder = explainer if isinstance(explainer, Embedder) else embedder
        if self.embedder is None:
            self.explainer.scorer.embed([], "query")  # refused in words by a scorer that has no vector per text
        self._documents, self._ids, self._metadata = documents, ids, metadata
        options: dict[str, Any] = {"explain": explain, "top": top, "time_limit": time_limit, "unit": unit}
        self._hit_explainer = HitExplainer(explainer, embedder=embedder, max_calls=max_calls, **options)

    @property
    def explainer(self) -> Explainer:
        """What explains; made of an embedder's model when it is first asked for."""
        return self._hit_explainer.explainer if isinstance(self._source, Embedder) else self._source

    @explainer.setter
    def explainer(self, explainer: Explainer) -> None:
        self._source = explainer

    @classmethod
    def from_texts(
        cls,
        texts: Sequence[str | Passage],
        explainer: Explainer,
        *,
        ids: Sequence[str] | None = None,
        metadata: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> Self:
        """Embed the texts and search them exactly, by the similarity that the model was made for."""
        if isinstance(texts, (str, Passage)) or not texts:
            raise InvalidInput("from_texts takes a list of at least one text")
        for name, values in (("ids", ids), ("metadata", metadata)):
            if values is not None and len(values) != len(texts):
                raise InvalidInput(f"{name} must have one entry per text: {len(values)} for {len(texts)} texts")
        _check_ids(ids)
        vectors = explainer.scorer.embed(texts, "document")
        return cls.from_vectors(vectors, list(texts), explainer, ids=ids, metadata=metadata, **options)

    @classmethod
    def from_vectors(
        cls, vectors: Any, documents: Lookup[str | Passage | None], explainer: Explainer | Embedder, **options: Any
    ) -> Self:
        """Search these vectors (D, e), one per document, exactly, by the similarity that the model was made for."""
        normalize = _measure(explainer) == "cosine"
        vectors = np.asarray(vectors, np.float32)
        vectors = _unit(vectors) if normalize else vectors
        index = faiss.IndexFlatIP(vectors.shape[1])
        index.add(vectors)
        return cls(index, documents, explainer, normalize=normalize, **options)

    def search(
        self,
        query: str,
        k: int = 10,
        explain: ExplainMode | None = None,
        *,
        top: int | None = None,
        filter: Filter | None = None,
        min_score: float | None = None,
    ) -> Hits:
        """The k nearest documents, nearest first; fewer where the index has or finds fewer.

        Args:
            filter: what the metadata must hold, as {name: value} or {name: [one, or the other]}; or a function of them.
                Of what the index finds, more and more is looked at until k documents pass.
            min_score: the worst score that is let through, in the index's own unit: of a distance the largest.
        """
        return self.search_many([query], k, explain, top=top, filter=filter, min_score=min_score)[0]

    def search_many(
        self,
        queries: Sequence[str],
        k: int = 10,
        explain: ExplainMode | None = None,
        *,
        top: int | None = None,
        filter: Filter | None = None,
        min_score: float | None = None,
    ) -> list[Hits]:
        """`search` for several queries, which are embedded and looked up together."""
        return [hits for _, hits in self._searched(queries, k, explain, top, Sieve(filter, min_score, self.index))]

    def search_rows(
        self,
        query: str,
        k: int = 10,
        explain: ExplainMode | None = None,
        *,
        top: int | None = None,
        filter: Filter | None = None,
        min_score: float | None = None,
    ) -> tuple[list[int], Hits]:
        """`search`, with the row of each hit: for those who keep more of a document than its text."""
        return self._searched([query], k, explain, top, Sieve(filter, min_score, self.index))[0]

    def _searched(
        self, queries: Sequence[str], k: int, explain: ExplainMode | None, top: int | None, sieve: Sieve
    ) -> list[tuple[list[int], Hits]]:
        if isinstance(queries, str):
            raise InvalidInput("search_many takes a list of queries: use search for one")
        k = whole_number(k, "k")
        if k < 1:
            raise InvalidInput(f"k must be at least 1, not {k}")
        if not queries:
            return []
        vectors = self._vectors(queries, explain)
        metric, reason = self._scoring(vectors)
        search = self._search(metric, reason)
        found = self._found(vectors, k, sieve)
        return [
            ([row for row, _ in one], self._hits(query, one, search, explain, top))
            for query, one in zip(queries, found, strict=True)
        ]

    def _search(self, metric: Metric, reason: str | None = None) -> Search:
        corpus = partial(self._places, metric)
        return Search(source=self._source, embedder=self.embedder, metric=metric, surrogate=reason, corpus=corpus)

    def _calibrated_search(self) -> Search:
        return self._search(UNKNOWN)

    def _vectors(self, queries: Sequence[str], explain: ExplainMode | None = "off") -> NDArray[np.float32]:
        """(Q, d): the queries as they are searched with."""
        vectors = self._embed(queries, explain)
        if vectors.shape[1] != self.index.d:
            raise InvalidInput(
                f"the index has {self.index.d} dimensions and {self._name} gives {vectors.shape[1]}: use the model "
                "that the index was built with"
            )
        return _unit(vectors) if self.normalize else vectors

    def _found(self, vectors: NDArray[np.float32], k: int, sieve: Sieve) -> list[list[tuple[int, float]]]:
        """Row and score of what is returned for each query; with a filter, twice as many are asked for until k pass."""
        size = min(k, most := max(1, len(self)))
        while True:
            scores, rows = self.index.search(vectors, size)
            found = [_found(*one) for one in zip(rows, scores, strict=True)]
            passed = [[one for one in each if sieve.is_enough(one[1])] for each in found]
            if sieve.filter is not None:
                passed = [[one for one in each if sieve.reason(self._document(*one)) is None] for each in passed]
            if sieve.filter is None or size >= most or all(len(each) >= k for each in passed):
                return [each[:k] for each in passed]
            size = min(2 * size, most)

    def _hits(
        self, query: str, found: list[tuple[int, float]], search: Search, explain: ExplainMode | None, top: int | None
    ) -> Hits:
        documents = list(starmap(self._document, found))
        counts = Counter(document.id for document in documents)  # ids are the user's own: two rows may have the same
        rows = {one.id: row for (row, _), one in zip(found, documents, strict=True) if counts[one.id] == 1}
        engine = FaissEngine(self.index, Place(rows=lambda ids: {name: rows[name] for name in ids if name in rows}))
        return self._hit_explainer.hits(query, documents, explain, top=top, search=replace(search, engine=engine))

    @property
    def _name(self) -> str:
        return self.explainer.scorer.name if self.embedder is None else self.embedder.name

    def _embed(self, queries: Sequence[str], explain: ExplainMode | None) -> NDArray[np.float32]:
        """The queries as vectors. Where one is explained in any case, one forward pass serves both."""
        if self.embedder is not None:
            return np.array([self.embedder.vector(query) for query in queries], np.float32)
        if len(queries) == 1 and self._hit_explainer.is_eager(explain) and self._hit_explainer.time_limit is None:
            try:
                return self.explainer.query_vector(queries[0])[None]
            except Exception as error:  # what is wrong with the explanation must not fail the search
                logger.debug("the query is embedded without its factors: %s", error)
        return self.explainer.scorer.embed(queries, "query")

    def _document(self, row: int, score: float | None = None) -> RetrievedDocument:
        name, text = _look_up(self._ids, row), _look_up(self._documents, row)
        metadata = _look_up(self._metadata, row) or {}
        return RetrievedDocument(id=str(row if name is None else name), text=text, score=score, metadata=metadata)

    def rows(self) -> dict[int, RetrievedDocument]:
        """All documents by row, without an id where none was given."""
        if callable(self._documents):
            raise InvalidInput("documents given as a function cannot be listed: give a sequence or a mapping")
        rows = self._documents if isinstance(self._documents, Mapping) else range(len(self._documents))
        return {row: replace(self._document(row), id=_look_up(self._ids, row)) for row in rows}

    def _scoring(self, vectors: NDArray[np.float32]) -> tuple[Metric, str | None]:
        """What the index's scores are, and why they are not what is explained, when they are not."""
        metric = FaissEngine(self.index).metric
        if metric == UNKNOWN:
            return metric, f"the index compares by FAISS metric {self.index.metric_type}, not by this similarity"
        is_product = metric.base == "inner product"
        if (np.abs(np.linalg.norm(vectors, axis=1) - 1.0) <= _UNIT).all():
            return Metric("cosine") if is_product else metric, None
        # What only embeds strings is compared as its index does.
        is_free = isinstance(self._source, Embedder) and self._source.is_black_box
        by_dot = is_free or _measure(self._source) == "dot"
        if is_product and by_dot:
            return metric, None
        explained = "inner product" if by_dot else "cosine"
        reason = f"the index compares vectors that are not normalised by {metric.base}; the {explained} is explained"
        return replace(metric, is_normalised=False), reason

    def precompute(self, **options: Any) -> Precomputed:
        """Fill the explainer's store with the factors of all documents; options of `Explainer.precompute`."""
        named = [self._document(row) for row in self.rows()]
        kept = [(one.id, one.text) for one in named if one.text is not None]
        return self.explainer.precompute([text for _, text in kept], ids=[name for name, _ in kept], **options)

    def save(self, folder: str | Path, *, model: str | None = None) -> None:
        """Write the index, the documents as JSON lines, and which model they belong to. Nothing is pickled."""
        if self.embedder is not None and (self.embedder is not self._source or self.embedder.usage() is None):
            raise InvalidInput(
                f"how {self._name} embeds cannot be written down: keep the index with faiss.write_index instead"
            )
        scorer = self.explainer.scorer
        about: dict[str, Any] = {
            "model": model or scorer.name,
            "fingerprint": scorer.fingerprint,
            "probes": scorer.probes.to_dict(),
        }
        about |= {"normalize": self.normalize}
        write_index(Path(folder), self.index, self.rows(), about, self.calibration)

    @classmethod
    def load(cls, folder: str | Path, explainer: Explainer | Embedder | None = None, **options: Any) -> Self:
        """What `save` wrote. Without an explainer, one is made for the model that the index was built with."""
        folder = Path(folder)
        manifest = read_manifest(folder)
        explainer = Explainer(manifest["model"]) if explainer is None else explainer
        if isinstance(explainer, Embedder) and explainer.model is None:  # only asking it would tell
            raise InvalidInput(
                f"{explainer.name} holds no SentenceTransformer: that the index was built with it cannot be known "
                "here; read it with faiss.read_index"
            )
        made = HitExplainer(explainer).explainer if isinstance(explainer, Embedder) else explainer
        scorer, built_with = made.scorer, Probes.from_dict(manifest["probes"])
        name = explainer.name if isinstance(explainer, Embedder) else scorer.name
        is_same = scorer.fingerprint == manifest["fingerprint"]
        if not is_same or not scorer.probes.distance(built_with) <= scorer.tolerance:
            raise InvalidInput(
                f"the index in {folder} was built with {manifest['model']}, whose weights, settings or "
                f"embeddings differ from those of {name}: use that model, or build the index again"
            )
        index, rows = read_index(folder, manifest["documents"])
        documents = {row: document.text for row, document in rows.items()}
        ids = {row: document.id for row, document in rows.items() if document.id is not None}
        metadata = {row: document.metadata for row, document in rows.items()}
        given = {"ids": ids, "metadata": metadata, "normalize": manifest["normalize"], **options}
        retriever = cls(index, documents, explainer, **given)
        if (calibration := read_calibration(folder)) is not None:
            retriever.calibration = calibration
        return retriever

    def __len__(self) -> int:
        return int(self.index.ntotal)

    def __repr__(self) -> str:
        return f"FaissRetriever({type(self.index).__name__}, {len(self)} vectors, {self._name!r})"


def _measure(explainer: Explainer | Embedder) -> str:
    """What the model compares by, without making an Explainer."""
    if not isinstance(explainer, Embedder):
        return explainer.scorer.measure
    usage = explainer.usage()
    return "dot" if usage is not None and usage.similarity == "dot" else "cosine"


def _found(rows: NDArray[np.int64], scores: NDArray[np.float32]) -> list[tuple[int, float]]:
    return [(row, score) for row, score in zip(rows.tolist(), scores.tolist(), strict=True) if row != _NOTHING]


def _look_up(values: Lookup[T] | None, row: int) -> T | None:
    """The entry of a row; None where there is none: a gap in the documents must not fail the search."""
    if values is None or (row < 0 and not callable(values) and not isinstance(values, Mapping)):
        return None  # no sequence has a negative id: Python would count from its end
    try:
        return values(row) if callable(values) else values[row]
    except (KeyError, IndexError):
        return None
    except Exception as error:
        logger.warning("looking up row %d failed: %s: %s", row, type(error).__name__, error)
        return None


def _check_ids(ids: Lookup[str | None] | None) -> None:
    """Refuse ids that are not strings; what a function gives is not known before it is called."""
    if ids is not None and not callable(ids):
        for name in ids.values() if isinstance(ids, Mapping) else ids:
            if name is not None:
                check_id(name)


def _unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: NDArray[np.float32] = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
    return scaled
