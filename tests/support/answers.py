"""Answers to log: explanations with one token per word and weights that follow from the seed."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from rag_explain.results.deferred import Deferred
from rag_explain.results.explanation import Explanation
from rag_explain.results.hits import Hit
from rag_explain.results.stages import Stage
from rag_explain.texts.tokens import Token
from tests.support.samples import with_notices

QUERY = "How do bees find their way home?"
DOCUMENTS = (
    "Honeybees navigate back to the hive by the position of the sun.",
    "Our home insurance covers damage by insects.",
    "The bakery on the corner is closed on Mondays.",
)


def tokens(text: str) -> tuple[Token, ...]:
    words = [Token(m[0], m.start(), m.end(), "text", m[0].lower()) for m in re.finditer(r"\w+", text)]
    return (Token("", 0, 0, "special", "[CLS]"), *words, Token("", len(text), len(text), "special", "[SEP]"))


def explanation(query: str = QUERY, document: str = DOCUMENTS[0], seed: int = 0, **changes) -> Explanation:
    rows, columns = tokens(query), tokens(document)
    matrix = np.random.default_rng(seed).normal(scale=0.02, size=(len(rows) + 1, len(columns) + 1)).astype(np.float32)
    fields = {
        "query": query,
        "document": document,
        "query_tokens": rows,
        "document_tokens": columns,
        "matrix": matrix,
        "score": float(matrix.sum(dtype=np.float64)) + 1e-7,
        "method": "bilrp",
        "settings": {"layer": 0, "rules": "lrp"},
        "model": "tiny",
        "fingerprint": "f" * 32,
        "provenance": {"path": "cold", "seconds": 0.01},
    }
    return Explanation(**{**fields, **with_notices((), changes)})


def hit(document: str = DOCUMENTS[0], rank: int = 0, query: str = QUERY, seed: int = 0, **changes) -> Hit:
    why = explanation(query, document, seed)
    fields = {
        "id": f"doc-{rank}",
        "text": document,
        "rank": rank,
        "score": why.score,
        "metric": "cosine",
        "metadata": {"source": "bees.md"},
        "handle": Deferred.ready(why),
    }
    return Hit(**{**fields, **changes})


def reranked(hit: Hit, rank: int = 1, score: float | None = 2.0) -> Hit:
    """A hit that a search found at rank 3 and a reranker put elsewhere."""
    found = Stage("VectorIndexRetriever", "search", 3, None, hit.score, hit.metric)
    stage = Stage("Reranker", "rerank", rank, 3, score)
    return replace(hit, rank=rank, score=score, metric="unknown", stages=(found, stage))


def hits(query: str = QUERY) -> list[Hit]:
    return [hit(document, rank, query, seed=rank) for rank, document in enumerate(DOCUMENTS)]
