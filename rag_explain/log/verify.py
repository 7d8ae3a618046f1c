"""Does a record still hold? Its digest, the hashes of its texts, and the explanation computed again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rag_explain.errors import RagExplainError
from rag_explain.log.files import Folder
from rag_explain.log.record import Record, decode, digest, digest_around, whole
from rag_explain.texts.passage import Passage

if TYPE_CHECKING:
    from rag_explain.explainer import Explainer
    from rag_explain.results.explanation import Explanation

Outcome = Literal["holds", "moved", "changed", "damaged", "unknown"]
Explainers = Callable[[Mapping[str, Any]], "Explainer"]
"""Gives the Explainer for an explanation's `model`, `method` and `settings`."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What is known about one hit of a record, or about a whole line.

    Attributes:
        outcome: "holds": computed again, and the same; or, without a model, every hash is right.
            "moved": the encoder at hand gives another score or other pairs.
            "changed": the text is not the one that was explained.
            "damaged": the line is not as it was written.
            "unknown": it cannot be computed again, and `reason` says why.
        score: what the encoder at hand says, where it was asked.
        shift: the largest difference among score and kept pairs.
    """

    record: str
    document: str
    outcome: Outcome
    reason: str = ""
    score: float | None = None
    shift: float | None = None


def verify(
    path: str | os.PathLike[str],
    explainers: Explainers | None = None,
    *,
    documents: Mapping[str, str] | None = None,
    record_id: str | None = None,
    tolerance: float = 1e-4,
    hash_key: bytes | None = None,
) -> Iterator[Finding]:
    """One finding per hit of each record, and one per damaged line.

    Args:
        explainers: who computes again; None checks digests and hashes only.
        documents: today's texts by document id: used instead of the logged ones, and told when they have changed.
        record_id: only this record.
        tolerance: how far score and pairs may move, in score units; float32 on another machine moves them by 1e-6.
    """
    for line in Folder(path).lines():
        if not whole(line):
            if record_id is None:
                yield Finding("", "", "damaged", "a line is torn or was changed after it was written")
            continue
        record = decode(line)
        if record_id is None or record.id.startswith(record_id):
            yield from verify_record(
                record, explainers, documents=documents or {}, tolerance=tolerance, hash_key=hash_key
            )


def verify_record(
    record: Record,
    explainers: Explainers | None,
    *,
    documents: Mapping[str, str],
    tolerance: float,
    hash_key: bytes | None,
) -> Iterator[Finding]:
    """The findings of one record."""
    for index, hit in enumerate(record.data["hits"]):
        query, document = _texts(record, index, documents)
        outcome, reason = _check_texts(record, index, query, document, hash_key)
        explanation = hit["explanation"]
        if outcome == "holds" and explanation is None:
            outcome, reason = "unknown", f"there is no explanation: {hit['reason'] or hit['status']}"
        if outcome != "holds" or explainers is None or query is None or document is None:
            yield Finding(record.id, hit["id"], outcome, reason)
        else:
            passage, reason = _passage(hit, document, hash_key)
            if passage is None:
                yield Finding(record.id, hit["id"], "unknown", reason)
            else:
                yield _recompute(record, index, query, passage, explainers, tolerance)


def _texts(record: Record, index: int, documents: Mapping[str, str]) -> tuple[str | None, str | None]:
    hit = record.data["hits"][index]
    return record.asked(index), documents.get(hit["id"], hit["text"])


def _check_texts(
    record: Record, index: int, query: str | None, document: str | None, key: bytes | None
) -> tuple[Outcome, str]:
    """Whether both texts are at hand and are the ones that were explained."""
    hit = record.data["hits"][index]
    if query is None or document is None:
        return "unknown", "the texts were not kept" if hit["reason"] != "erased" else "the document was erased"
    asked = hit.get("query") or record.data["query"]
    for text, expected, name in ((query, asked["hash"], "query"), (document, hit["hash"], "document")):
        if expected is None:
            continue
        if expected.startswith("hmac-") and key is None:
            return "unknown", "its hashes are keyed: give the key"
        if digest(text, key if expected.startswith("hmac-") else None) != expected:
            if record.data["text"] == "redacted" and "█" in text:
                return "unknown", f"the {name} is redacted"
            return "changed", f"the {name} is not the text that was explained"
    return "holds", ""


def _passage(hit: Mapping[str, Any], document: str, key: bytes | None) -> tuple[Passage | None, str]:
    """The document inside the string that the encoder read; None, and why, where that is not known any more."""
    around = hit.get("around")
    if around is None:
        if hit["explanation"]["metadata_tokens"]:
            return None, "the encoder read more than the document's text, and that is not in the record"
        return Passage(document), ""
    before, after = around["text"] or ("", "")
    if digest_around((before, after), key if around["hash"].startswith("hmac-") else None) != around["hash"]:
        return None, "what was embedded with the document is redacted or was not kept"
    return Passage(before + document + after, len(before), len(before) + len(document)), ""


def _recompute(
    record: Record, index: int, query: str, document: Passage, explainers: Explainers, tolerance: float
) -> Finding:
    hit = record.data["hits"][index]
    logged = hit["explanation"]
    try:
        explainer = explainers(logged)
        again = explainer.explain(query, document)
    except RagExplainError as error:
        return Finding(record.id, hit["id"], "unknown", str(error))
    shown = {"token": lambda: again, "word": again.by_word, "sentence": again.by_sentence}[logged["unit"]]()
    shift = max([abs(again.score - logged["score"]), *_pair_shifts(shown, logged)])
    reasons = [
        f"{name} is {getattr(again, name)!r}, was {logged[name]!r}"
        for name in ("fingerprint", "method")
        if getattr(again, name) != logged[name]
    ]
    if dict(again.settings) != logged["settings"]:
        reasons.append(f"settings are {dict(again.settings)}, were {logged['settings']}")
    outcome: Outcome = "holds" if shift <= tolerance else "moved"
    return Finding(record.id, hit["id"], outcome, "; ".join(reasons), again.score, shift)


def _pair_shifts(again: Explanation, logged: Mapping[str, Any]) -> Iterator[float]:
    rows = {(token.start, token.end): i for i, token in enumerate(again.query_tokens)}
    columns = {(token.start, token.end): j for j, token in enumerate(again.document_tokens)}
    for q0, q1, d0, d1, value in logged["pairs"]:
        i, j = rows.get((q0, q1)), columns.get((d0, d1))
        # A word that the encoder at hand does not see carries nothing.
        found = 0.0 if i is None or j is None else float(again.pairs[i, j])
        yield abs(found - value)
