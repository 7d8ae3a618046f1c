"""Explanations made by hand: deterministic, in the shape that an encoder gives, without one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from rag_explain.results.deferred import Deferred
from rag_explain.results.explanation import Explanation
from rag_explain.results.hits import Hit, Hits
from rag_explain.results.notices import OTHER_RANKING, TRUNCATED, Notice
from rag_explain.results.terms import Term
from rag_explain.texts.segments import word_spans
from rag_explain.texts.tokens import Role, Token

QUERY = "How do I reset a forgotten bank password?"
DOCUMENT = (
    "If you cannot remember your password, open the bank's sign-in page and choose “Forgot password”. "
    "A link to reset it arrives by e-mail within five minutes. Cards are not affected."
)
OTHER = "The river bank was flooded in spring. Nobody remembers a higher level since the gauge was built."

HOSTILE = [
    "<script>window.hacked = 1</script> <img src=x onerror=window.hacked=1>",
    '"onload="window.hacked=1" style="position:fixed',
    "--> <b>bold</b> </style></script><iframe src='javascript:alert(1)'>",
    "</textarea></title><svg onload=window.hacked=1> &lt;i&gt; &#x3c;i&#x3e; \u2028\u2029",
    "\u202egnirts desrever \x1b[2J\x1b]0;title\x07 \x00 \ud800 ${7*7} {{7*7}} $x_1^2$ <!--",
    "javascript:window.hacked=1",
]


def tokens_of(text: str, *, limit: int | None = None) -> tuple[Token, ...]:
    """[CLS], pieces of at most five characters of each word, [SEP]."""
    found = [
        Token(text[a:b], a, b, piece=text[a:b].lower())
        for start, end in word_spans(text)
        for a in range(start, end, 5)
        for b in [min(a + 5, end)]
    ]
    return (Token("", 0, 0, "special", "[CLS]"), *found[:limit], Token("", 0, 0, "special", "[SEP]"))


def explain(
    query: str = QUERY,
    document: str = DOCUMENT,
    *,
    method: str = "bilrp",
    limit: int | None = None,
    **changes: Any,
) -> Explanation:
    """An explanation that sums to its score, with a few strong pairs, weak ones of both signs, and a rest."""
    query_tokens, document_tokens = tokens_of(query), tokens_of(document, limit=limit)
    seed = hashlib.sha256(f"{method}\0{query}\0{document}".encode(errors="replace")).digest()
    random = np.random.default_rng(int.from_bytes(seed[:8], "little"))
    matrix = random.normal(0.001, 0.004, (len(query_tokens) + 1, len(document_tokens) + 1))
    for i, left in enumerate(query_tokens):
        for j, right in enumerate(document_tokens):
            if len(left.piece) > 2 and left.piece[:4] == right.piece[:4] and left.part == "text":
                matrix[i, j] += 0.12
    matrix[-1, -1] = -0.21
    fields: dict[str, Any] = {
        "query": query,
        "document": document,
        "query_tokens": query_tokens,
        "document_tokens": document_tokens,
        "matrix": matrix.astype(np.float32),
        "score": float(matrix.astype(np.float32).sum(dtype=np.float64)),
        "method": method,
        "settings": {"layer": 0},
        "model": "all-MiniLM-L6-v2",
        "fingerprint": "0" * 16,
        "notices": [] if limit is None else [truncation("document")],
        "provenance": {"path": "cold", "seconds": 0.4},
    }
    return Explanation(**fields | with_notices(fields["notices"], changes))


def terms(text: str = "password", count: int = 3) -> tuple[Term, ...]:
    """Terms made by hand: the first is absent from the document."""
    numbers = {"idf": 1.5, "length factor": 0.91}
    return tuple(Term(f"{text} {k}", (text,), (text,) * bool(k), 0.5 * k, numbers if k else {}) for k in range(count))


def truncation(side: Role) -> Notice:
    return Notice(TRUNCATED, f"The encoder read only the first 10 of 90 characters of the {side}.", side=side)


def with_notices(notices: Sequence[Notice], changes: dict[str, Any]) -> dict[str, Any]:
    """Changes of an explanation's fields, in which `surrogate` and `truncated` stand for the notices they come from."""
    more = [truncation(side) for side in changes.pop("truncated", ())]
    reason = changes.pop("surrogate", None)
    more += [] if reason is None else [Notice(OTHER_RANKING, reason)]
    return {"notices": (*notices, *more), **changes}


def hits(query: str = QUERY, documents: Sequence[str] = (DOCUMENT, OTHER)) -> Hits:
    """Hits with ready explanations."""
    found = []
    for rank, document in enumerate(documents, 1):
        explanation = explain(query, document)
        found.append(
            Hit(
                id=f"doc-{rank}",
                text=document,
                rank=rank,
                score=explanation.score,
                metric="cosine",
                metadata={"source": f"file-{rank}.md"},
                handle=Deferred.ready(explanation),
            )
        )
    return Hits(found)


def hostile(text: str) -> list[Hit]:
    """Hits in which every string is `text`."""
    explanation: Explanation = explain(
        query=text, document=text, method=text, model=text, surrogate=text, settings={text: text}, references={text: 1}
    )
    handle = Deferred.ready(explanation)
    failed = Deferred(None, status="failed", reason=text)
    common: dict[str, Any] = {"id": text, "text": text, "score": 0.5, "metric": text, "metadata": {text: text}}
    return [Hit(rank=1, handle=handle, **common), Hit(rank=2, handle=failed, **common)]
