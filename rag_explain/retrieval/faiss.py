"""FaissRetriever: a FAISS index whose hits say why they were found. The embedded default.

retriever = FaissRetriever.from_texts(texts, Explainer("all-MiniLM-L6-v2"))
for hit in retriever.search("how do bees find home?", k=3):
    print(hit.score, hit.explanation.top_pairs(3))
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from rag_explain.errors import FormatError, InvalidInput, MissingExtra
from rag_explain.explainer import Explainer
from rag_explain.results.hits import Hits
from rag_explain.results.serialization import to_json, to_plain
from rag_explain.retrieval import TOLERANCE, Explain, HitExplainer, RetrievedDocument
from rag_explain.texts.passage import Passage

try:
    import faiss
except ImportError as error:
    raise MissingExtra("faiss-cpu", "faiss") from error

logger = logging.getLogger(__name__)

T = TypeVar("T")
Lookup: TypeAlias = Sequence[T] | Mapping[int, T] | Callable[[int], T]

_FORMAT, _VERSION = "rag_explain.faiss", 1
_INDEX, _DOCUMENTS, _MANIFEST = "index.faiss", "documents.jsonl", "manifest.json"
# Indexes that compare the vectors they were given; any other may compare compressed ones.
_EXACT = frozenset(("IndexFlat", "IndexFlatIP", "IndexFlatL2", "IndexHNSWFlat", "IndexIVFFlat", "IndexNSGFlat"))
_COMPRESSED_TOLERANCE = 0.25
_UNIT = 1e-3


class FaissRetriever:
    """Searches a FAISS index by text and explains what it finds. The index is only read, and by several threads.

    Args:
        index: any FAISS index of float vectors: Flat, HNSW, IVF, PQ, behind an IDMap or not; inner product or L2.
        documents: the text of each row (or of each id of an IDMap): a sequence, a mapping, or a function.
        explainer: of the model that the index was built with; it embeds the queries too.
        ids: what to call each row, like `documents`; by default its number.
        metadata: a mapping for each row, like `documents`.
        normalize: scale query vectors to length one, for an index of vectors that were scaled.
        explain, budget: see `rag_explain.retrieval.Retrieval`.
    """

    def __init__(
        self,
        index: Any,
        documents: Lookup[str | Passage | None],
        explainer: Explainer,
        *,
        ids: Lookup[str] | None = None,
        metadata: Lookup[Mapping[str, Any]] | None = None,
        normalize: bool = False,
        explain: Explain = "lazy",
        budget: float | None = None,
    ) -> None:
        if not isinstance(index, faiss.Index):
            raise InvalidInput(f"index must be a FAISS index of float vectors, not {type(index).__name__}")
        explainer.scorer.embed([], "query")  # refused in words by a scorer that has no vector per text
        self.index = index
        self.explainer = explainer
        self.normalize = normalize
        self._documents = documents
        self._ids = ids
        self._metadata = metadata
        tolerance = TOLERANCE if _is_exact(index) else _COMPRESSED_TOLERANCE
        self._retrieval = HitExplainer(explainer, explain=explain, budget=budget, tolerance=tolerance)

    @classmethod
    def from_texts(
        cls,
        texts: Sequence[str | Passage],
        explainer: Explainer,
        *,
        ids: Sequence[str] | None = None,
        metadata: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> FaissRetriever:
        """Embed the texts and search them exactly, by the similarity that the model was made for."""
        if isinstance(texts, (str, Passage)) or not texts:
            raise InvalidInput("from_texts takes a list of at least one text")
        for name, values in (("ids", ids), ("metadata", metadata)):
            if values is not None and len(values) != len(texts):
                raise InvalidInput(f"{name} must have one entry per text: {len(values)} for {len(texts)} texts")
        vectors = explainer.scorer.embed(texts, "document")
        normalize = explainer.scorer.measure == "cosine"
        if normalize:
            vectors = _unit(vectors)
        index = faiss.IndexFlatIP(vectors.shape[1])
        index.add(vectors)
        return cls(index, list(texts), explainer, ids=ids, metadata=metadata, normalize=normalize, **options)

    # ------------------------------------------------------------------ searching

    def search(self, query: str, k: int = 10, explain: Explain | None = None) -> Hits:
        """The k nearest documents, nearest first; fewer where the index has or finds fewer."""
        return self.batch_search([query], k, explain)[0]

    def batch_search(self, queries: Sequence[str], k: int = 10, explain: Explain | None = None) -> list[Hits]:
        """`search` for several queries, which are embedded and looked up together."""
        if isinstance(queries, str):
            raise InvalidInput("batch_search takes a list of queries: use search for one")
        if k < 1:
            raise InvalidInput(f"k must be at least 1, not {k}")
        if not queries:
            return []
        vectors = self._embed(queries, explain)
        if vectors.shape[1] != self.index.d:
            raise InvalidInput(
                f"the index has {self.index.d} dimensions and {self.explainer.scorer.name} gives {vectors.shape[1]}: "
                "use the model that the index was built with"
            )
        if self.normalize:
            vectors = _unit(vectors)
        scores, rows = self.index.search(vectors, k)
        metric, surrogate = self._metric(vectors)
        return [
            self._retrieval.hits(query, self._found(scores[i], rows[i]), explain, metric=metric, surrogate=surrogate)
            for i, query in enumerate(queries)
        ]

    def _embed(self, queries: Sequence[str], explain: Explain | None) -> NDArray[np.float32]:
        """The queries as vectors. Where one is explained in any case, one forward pass serves both."""
        if len(queries) == 1 and self._retrieval.is_eager(explain) and self._retrieval.budget is None:
            try:
                return self.explainer.query_vector(queries[0])[None]
            except Exception as error:  # what is wrong with the explanation must not fail the search
                logger.debug("the query is embedded without its factors: %s", error)
        return self.explainer.scorer.embed(queries, "query")

    def _found(self, scores: NDArray[np.float32], rows: NDArray[np.int64]) -> Iterator[RetrievedDocument]:
        for score, row in zip(scores.tolist(), rows.tolist(), strict=True):
            if row >= 0:  # FAISS fills up what it did not find with -1
                yield RetrievedDocument(
                    id=str(row if (name := _look_up(self._ids, row)) is None else name),
                    text=_look_up(self._documents, row),
                    score=score,
                    metadata=_look_up(self._metadata, row) or {},
                )

    def _metric(self, vectors: NDArray[np.float32]) -> tuple[str, str | None]:
        """What the index's scores are, and why they are not what is explained, when they are not."""
        unit = bool((np.abs(np.linalg.norm(vectors, axis=1) - 1.0) <= _UNIT).all())
        metric = self.explainer.scorer.measure
        if self.index.metric_type == faiss.METRIC_INNER_PRODUCT:
            if unit or metric == "dot":
                return "cosine" if unit else "inner product", None
            return "inner product", "the index compares vectors that are not normalised; the cosine is explained"
        if self.index.metric_type == faiss.METRIC_L2:
            if unit:
                return "squared L2", None
            explained = "inner product" if metric == "dot" else "cosine"
            return (
                "squared L2 of vectors that are not normalised",
                f"the index compares by L2 distance of vectors that are not normalised; the {explained} is explained",
            )
        return "unknown", f"the index compares by FAISS metric {self.index.metric_type}, not by this similarity"

    def precompute(self, **options: Any) -> int:
        """Fill the explainer's store with the factors of all documents; options of `Explainer.precompute`."""
        rows = [row for row in self._rows() if _look_up(self._documents, row) is not None]
        texts = [_look_up(self._documents, row) for row in rows]
        ids = [str(row if (name := _look_up(self._ids, row)) is None else name) for row in rows]
        return self._retrieval.precompute([text for text in texts if text is not None], ids=ids, **options)

    def _rows(self) -> list[int]:
        if callable(self._documents):
            raise InvalidInput("documents given as a function cannot be listed: give a sequence or a mapping")
        return list(self._documents) if isinstance(self._documents, Mapping) else list(range(len(self._documents)))

    # ------------------------------------------------------------------ keeping

    def save(self, folder: str | Path, *, model: str | None = None) -> None:
        """Write the index, the documents as JSON lines, and which model they belong to. Nothing is pickled."""
        rows = self._rows()
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        manifest = {
            "format": _FORMAT,
            "version": _VERSION,
            "model": model or self.explainer.scorer.name,
            "fingerprint": self.explainer.scorer.fingerprint,
            "normalize": self.normalize,
            "documents": len(rows),
        }
        with _replacing(folder / _DOCUMENTS) as path, path.open("w", encoding="utf-8") as file:
            file.writelines(f"{to_json(self._record(row))}\n" for row in rows)
        with _replacing(folder / _INDEX) as path:
            faiss.write_index(self.index, str(path))
        with _replacing(folder / _MANIFEST) as path:
            path.write_text(to_json(manifest), encoding="utf-8")

    def _record(self, row: int) -> dict[str, Any]:
        text = _look_up(self._documents, row)
        record: dict[str, Any] = {"row": row, "id": _look_up(self._ids, row), "text": text}
        if isinstance(text, Passage):
            record |= {"text": text.string, "span": [text.start, text.end]}
        return record | {"metadata": to_plain(_look_up(self._metadata, row) or {})}

    @classmethod
    def load(cls, folder: str | Path, explainer: Explainer | None = None, **options: Any) -> FaissRetriever:
        """What `save` wrote. Without an explainer, one is made for the model that the index was built with."""
        folder = Path(folder)
        manifest = read_manifest(folder)
        explainer = Explainer(manifest["model"]) if explainer is None else explainer
        if explainer.scorer.fingerprint != manifest["fingerprint"]:
            raise InvalidInput(
                f"the index in {folder} was built with {manifest['model']}, whose weights or settings differ "
                f"from those of {explainer.scorer.name}: use that model, or build the index again"
            )
        documents: dict[int, str | Passage | None] = {}
        ids: dict[int, str] = {}
        metadata: dict[int, Mapping[str, Any]] = {}
        try:
            with (folder / _DOCUMENTS).open(encoding="utf-8") as file:
                for record in map(json.loads, file):
                    row, text, span = record["row"], record["text"], record.get("span")
                    documents[row] = Passage(text, *span) if span else text
                    metadata[row] = record["metadata"]
                    if record["id"] is not None:
                        ids[row] = record["id"]
            index = faiss.read_index(str(folder / _INDEX))
        except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
            raise FormatError(f"the index in {folder} is damaged: {error}") from error
        if len(documents) != manifest["documents"]:
            raise FormatError(
                f"the index in {folder} is damaged: {len(documents)} of {manifest['documents']} documents"
            )
        return cls(index, documents, explainer, ids=ids, metadata=metadata, normalize=manifest["normalize"], **options)

    def __len__(self) -> int:
        return int(self.index.ntotal)

    def __repr__(self) -> str:
        return f"FaissRetriever({type(self.index).__name__}, {len(self)} vectors, {self.explainer.scorer.name!r})"


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a saved index says of itself."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidInput(f"there is no index in {folder}: make one with  rag-explain index FILE") from None
    except (OSError, ValueError) as error:
        raise FormatError(f"the index in {folder} is damaged: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT or manifest.get("version") != _VERSION:
        raise FormatError(f"{folder / _MANIFEST} was not written by this version: build the index again")
    return manifest


class _replacing:  # noqa: N801  # reads as a statement: with _replacing(path) as fresh
    """A file that takes the place of another only once it is whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fresh = path.with_name(f".{path.name}.{os.getpid()}")

    def __enter__(self) -> Path:
        return self._fresh

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._fresh.replace(self._path)
        else:
            self._fresh.unlink(missing_ok=True)


def _look_up(values: Lookup[T] | None, row: int) -> T | None:
    """The entry of a row; None where there is none: a gap in the documents must not fail the search."""
    if values is None:
        return None
    try:
        return values(row) if callable(values) else values[row]
    except (KeyError, IndexError):
        return None
    except Exception as error:
        logger.warning("looking up row %d failed: %s: %s", row, type(error).__name__, error)
        return None


def _unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: NDArray[np.float32] = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
    return scaled


def _is_exact(index: Any) -> bool:
    """Whether the index compares the vectors it was given, whatever stands in front of them."""
    index = faiss.downcast_index(index)
    while type(index).__name__ in ("IndexIDMap", "IndexIDMap2"):
        index = faiss.downcast_index(index.index)
    return type(index).__name__ in _EXACT
